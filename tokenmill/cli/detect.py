"""`tokenmill detect`: detect a watermark in a text.

tokenmill detect answer.txt --model smollm2:135m --key 1234
tokenmill run "A story" --watermark-key 1234 | tokenmill detect - --key 1234 --json

Needs only the model's tokenizer, neither weights nor torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from tokenmill.cli.output import print_facts
from tokenmill.errors import InvalidRequest
from tokenmill.params import Watermark
from tokenmill.sampling.watermark import WatermarkScore, detect_watermark
from tokenmill.store import DEFAULT_MODEL, resolve_model

MAX_TEXT_BYTES = 16 << 20
CERTAIN = 4.0  # plain text reaches this z-score about once in 30,000 texts


def command(
    file: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    key: int,
    model: str = DEFAULT_MODEL,
    gamma: float = 0.25,
    context: int = 1,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Detect a watermark in a text: count its green tokens, and compute how unlikely that number is by chance.

    Parameters
    ----------
    file
        The text; - reads it from stdin.
    key
        Key with which the text may have been generated.
    model
        Model that may have generated the text; its tokenizer is used.
    gamma
        Share of green tokens in the vocabulary, as used for generation.
    context
        Number of preceding tokens that determine the green tokens, as used for generation.
    json
        Print one JSON object.
    """
    mark = Watermark(key=key, gamma=gamma, context=context)
    reading = detect_watermark(mark, _token_ids(model, _text(file)))
    if json:
        print(msgspec.json.encode({**_facts(reading), "watermarked": reading.z_score > CERTAIN}).decode())
    else:
        print_facts([(name.replace("_", " "), f"{value:g}") for name, value in _facts(reading).items()])
        print(_verdict(reading))
    return 0


def _facts(reading: WatermarkScore) -> dict[str, float]:
    return {
        "scored_tokens": reading.num_scored,
        "green_tokens": reading.num_green,
        "z_score": round(reading.z_score, 3),
        "p_value": reading.p_value,
    }


def _verdict(reading: WatermarkScore) -> str:
    if not reading.num_scored:
        return "the text is too short"
    return "watermarked with this key" if reading.z_score > CERTAIN else "no watermark with this key found"


def _token_ids(model: str, text: str) -> list[int]:
    from tokenmill.engine.frontend import (
        tokenizer_of,
    )  # imports the tokenizer's libraries, after the arguments are checked

    tokenizer = tokenizer_of(resolve_model(model).path)
    if tokenizer is None:
        raise InvalidRequest(f"{model} has no tokenizer", param="model")
    return tokenizer.encode(text, add_special_tokens=False, parse_special=False)


def _text(file: str) -> str:
    try:
        if file == "-":
            data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
        else:
            with Path(file).open("rb") as opened:
                data = opened.read(MAX_TEXT_BYTES + 1)
    except OSError as problem:
        raise InvalidRequest(f"{file} can't be read: {problem.strerror}") from problem
    if len(data) > MAX_TEXT_BYTES:
        raise InvalidRequest(f"{file} is longer than {MAX_TEXT_BYTES >> 20} MB")
    return data.decode("utf-8", errors="replace")
