"""Vectors into OpenAI's reply: floats, or base64 of little-endian 32-bit floats."""

from __future__ import annotations

import base64
import math
from array import array
from sys import byteorder
from typing import Any

import orjson

from tokenmill.engine.status import ModelInfo
from tokenmill.errors import RequestFailed
from tokenmill.server.generation import FoldedChoice
from tokenmill.server.openai.parse import EmbeddingCall
from tokenmill.server.openai.render import ErrorRendering
from tokenmill.types import Event, Usage


class EmbeddingRendering(ErrorRendering):
    def __init__(self, info: ModelInfo, call: EmbeddingCall) -> None:
        self._info = info
        self._call = call

    def begin(self) -> bytes:
        raise NotImplementedError("embeddings are never streamed")

    def event(self, choice: int, event: Event) -> bytes:
        raise NotImplementedError("embeddings are never streamed")

    def end(self, usage: Usage) -> bytes:
        raise NotImplementedError("embeddings are never streamed")

    def whole(self, choices: list[FoldedChoice], usage: Usage) -> bytes:
        data = [
            {"object": "embedding", "index": index, "embedding": self._vector(choice)}
            for index, choice in enumerate(choices)
        ]
        counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return orjson.dumps({"object": "list", "data": data, "model": self._info.name, "usage": counts})

    def _vector(self, choice: FoldedChoice) -> Any:
        if choice.embedding is None:
            raise RequestFailed("the engine returned no embedding")
        vector = shortened(choice.embedding, self._call.dimensions)
        return to_base64(vector) if self._call.is_base64 else vector


def shortened(vector: list[float], dimensions: int | None) -> list[float]:
    """The first `dimensions` numbers, of length one again."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    head = vector[:dimensions]
    norm = math.sqrt(sum(value * value for value in head))
    return [value / norm for value in head] if norm > 0 else head


def to_base64(vector: list[float]) -> str:
    numbers = array("f", vector)
    if byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")
