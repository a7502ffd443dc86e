"""How answers are drawn, as the command line sets it. The docstring under a field is its help text.

These are the fields of `SamplingParams` that make sense for one answer in a terminal; the temperature suits chat.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tokenmill.params import SamplingParams


@dataclass(frozen=True)
class SamplingConfig:
    temperature: float = 0.7
    """0 always takes the most likely token; higher is more varied."""
    top_p: float = 1.0
    """Draw from the most likely tokens that together have this probability."""
    top_k: int = 0
    """Draw from this many most likely tokens; 0 for all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the most likely one."""
    typical_p: float = 1.0
    """Draw from the most typical tokens that together have this probability."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that occurred already less likely."""
    presence_penalty: float = 0.0
    """Taken from the logit of a token that occurred in the answer."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token for each time it occurred in the answer."""
    seed: int | None = None
    """Same prompt, same settings, same seed: same answer."""
    max_tokens: int | None = None
    """Longest answer in tokens; by default up to the end of the context."""
    min_tokens: int = 0
    """Shortest answer in tokens."""
    stop: tuple[str, ...] = ()
    """Text that ends the answer; may be given several times."""
    ignore_eos: bool = False
    """Go on when the model would end its answer."""

    def params(self) -> SamplingParams:
        return SamplingParams(**{**asdict(self), "stop": list(self.stop)})
