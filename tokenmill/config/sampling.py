"""Sampling settings as the command line has them. The docstring under a field is its help text.

These are the fields of `SamplingParams` that make sense for one answer in a terminal; the temperature suits chat.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tokenmill.params import SamplingParams, Watermark


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
    top_n_sigma: float = 0.0
    """Sample only tokens whose logits lie within this many standard deviations of the highest; 0 for all."""
    xtc_probability: float = 0.0
    """How often the most likely tokens are left out, for more surprising answers."""
    xtc_threshold: float = 0.1
    """Tokens at least this likely count as the most likely ones there."""
    dynatemp_range: float = 0.0
    """The temperature moves this far to both sides: down where the model is sure, up where it is not."""
    mirostat: int = 0
    """2 keeps the surprise of each token near mirostat-tau; 0 does not."""
    mirostat_tau: float = 5.0
    """The wanted surprise of a token, in bits."""
    mirostat_eta: float = 0.1
    """How quickly mirostat corrects itself."""
    dry_multiplier: float = 0.0
    """Above 0, passages that repeat earlier ones become less likely the longer they are (DRY)."""
    dry_allowed_length: int = 2
    """Repeated sequences up to this many tokens are not penalised."""
    no_repeat_ngram_size: int = 0
    """No sequence of this many tokens occurs twice; 0: off."""
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
    stop_regex: tuple[str, ...] = ()
    """A pattern that ends the answer; may be given several times."""
    thinking_budget: int | None = None
    """The most tokens the model may spend thinking before it must answer."""
    watermark_key: int | None = None
    """Leaves a watermark that `tokenmill detect --key` finds."""
    ignore_eos: bool = False
    """Go on when the model would end its answer."""

    def params(self) -> SamplingParams:
        given = {**asdict(self), "stop": list(self.stop), "stop_regex": list(self.stop_regex)}
        key = given.pop("watermark_key")
        return SamplingParams(**given, watermark=None if key is None else Watermark(key))
