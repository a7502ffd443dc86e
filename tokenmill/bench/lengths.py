"""Lengths of prompts and answers: one number, or all between two with equal chance. Written `128` or `256:768`."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenmill.errors import InvalidConfig


@dataclass(frozen=True)
class Lengths:
    low: int
    high: int

    @classmethod
    def parse(cls, text: str, param: str) -> Lengths:
        low, _, high = text.partition(":")
        try:
            found = cls(int(low), int(high or low))
        except ValueError:
            raise InvalidConfig(f"--{param} must be a number or LOW:HIGH, not {text!r}", param=param) from None
        if not 1 <= found.low <= found.high:
            raise InvalidConfig(f"--{param} {text} is not a range of positive lengths", param=param)
        return found

    def draw(self, drawing: random.Random) -> int:
        return drawing.randint(self.low, self.high)

    def draw_many(self, drawing: random.Random, count: int) -> list[int]:
        return [self.draw(drawing) for _ in range(count)]
