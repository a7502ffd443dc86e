"""Sampling settings of the command line. The docstring under a field is its help text.

These are the fields of `SamplingParams` that make sense for one answer in a terminal; the temperature suits chat.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tokenmill.params import SamplingParams, Watermark


@dataclass(frozen=True)
class SamplingConfig:
    temperature: float = 0.7
    """Sampling temperature; 0 always picks the most likely token, higher values are more varied."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities sum to this."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 for all."""
    min_p: float = 0.0
    """Exclude tokens less likely than this fraction of the most likely one."""
    typical_p: float = 1.0
    """Sample from the most typical tokens whose probabilities sum to this."""
    top_n_sigma: float = 0.0
    """Sample from tokens whose logits are within this many standard deviations of the highest; 0 for all."""
    xtc_probability: float = 0.0
    """Probability of excluding the most likely tokens at a step (XTC), for more varied answers."""
    xtc_threshold: float = 0.1
    """Minimum probability of the tokens that XTC may exclude."""
    dynatemp_range: float = 0.0
    """Range of dynamic temperature: lowered by up to this where the model is certain, raised where it is not."""
    mirostat: int = 0
    """2 enables mirostat 2, which keeps the surprise of tokens near mirostat-tau; 0 disables it."""
    mirostat_tau: float = 5.0
    """Target surprise of a token for mirostat, in bits."""
    mirostat_eta: float = 0.1
    """Learning rate of mirostat."""
    dry_multiplier: float = 0.0
    """Strength of the DRY penalty on repeated sequences, which grows with their length; 0 disables it."""
    dry_allowed_length: int = 2
    """Longest repeated sequence, in tokens, that DRY does not penalise."""
    no_repeat_ngram_size: int = 0
    """Forbid repeating any sequence of this many tokens; 0 disables it."""
    repetition_penalty: float = 1.0
    """Penalty on tokens that have occurred in the prompt or answer; values above 1 make them less likely."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that have occurred in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time it has occurred in the answer."""
    seed: int | None = None
    """Seed of random numbers; the same prompt, settings and seed give the same answer."""
    max_tokens: int | None = None
    """Maximum tokens of the answer; by default up to the end of the context."""
    min_tokens: int = 0
    """Minimum tokens of the answer."""
    stop: tuple[str, ...] = ()
    """Text that ends the answer; may be given several times."""
    stop_regex: tuple[str, ...] = ()
    """Regular expression that ends the answer; may be given several times."""
    thinking_budget: int | None = None
    """Maximum tokens of reasoning before the model must answer."""
    watermark_key: int | None = None
    """Embed a watermark that `tokenmill detect --key` detects."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence token."""

    def params(self) -> SamplingParams:
        given = {**asdict(self), "stop": list(self.stop), "stop_regex": list(self.stop_regex)}
        key = given.pop("watermark_key")
        return SamplingParams(**given, watermark=None if key is None else Watermark(key))
