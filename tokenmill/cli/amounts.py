"""Numbers on the command line that have a least and a largest value; others are refused while flags are read."""

from __future__ import annotations

import re
from typing import Annotated

from cyclopts import App, ArgumentCollection, Parameter
from cyclopts.validators import Number

from tokenmill.errors import InvalidConfig

FRACTION = re.compile(r"[+-]?\d*\.\d*[1-9]\d*")
MOST = 10**9  # of whatever: years of seconds, more tokens than any context; neither infinity nor what overflows later

Count = Annotated[int, Parameter(validator=Number(gte=1, lte=MOST))]
CountOrZero = Annotated[int, Parameter(validator=Number(gte=0, lte=MOST))]
Amount = Annotated[float, Parameter(validator=Number(gt=0, lte=MOST))]
AmountOrZero = Annotated[float, Parameter(validator=Number(gte=0, lte=MOST))]
Share = Annotated[float, Parameter(validator=Number(gt=0, lte=1))]


def whole_numbers_only(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse 1.5 where a whole number is wanted; left to itself the parser would round it."""
    for argument in arguments:
        if argument.hint in (int, int | None):
            for token in argument.tokens:
                if FRACTION.fullmatch(token.value):
                    raise InvalidConfig(f"{argument.name} takes a whole number, not {token.value}")
