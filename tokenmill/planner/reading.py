"""The TPOT that a reader needs: reading speeds in words a minute as seconds per token."""

from __future__ import annotations

from dataclasses import dataclass

TOKENS_PER_WORD = 4 / 3  # English with a vocabulary of 100,000


@dataclass(frozen=True)
class Reader:
    who: str
    words_per_minute: int

    @property
    def tpot_s(self) -> float:
        return 60 / (self.words_per_minute * TOKENS_PER_WORD)


READERS = (
    Reader("listens to speech", 150),
    Reader("reads carefully", 200),
    Reader("reads (adult average)", 240),
    Reader("reads fast", 400),
    Reader("skims", 700),
)


def readers_kept_up_with(tpot_s: float) -> list[str]:
    return [reader.who for reader in READERS if tpot_s <= reader.tpot_s]
