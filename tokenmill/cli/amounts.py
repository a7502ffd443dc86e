"""Numbers on the command line that have a least value: smaller ones are refused while flags are read, by name."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

Count = Annotated[int, Parameter(validator=Number(gte=1))]
CountOrZero = Annotated[int, Parameter(validator=Number(gte=0))]
Amount = Annotated[float, Parameter(validator=Number(gt=0))]
AmountOrZero = Annotated[float, Parameter(validator=Number(gte=0))]
