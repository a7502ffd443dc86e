"""Watermarks of green tokens, written and detected: Kirchenbauer et al. 2023, "A Watermark for Large Language Models".

A token is green if a hash of (key, the last `context` tokens, the token itself) falls below `gamma` of its range. So
the green list needs no shuffled vocabulary and no generator: it is the same on every machine, in any batch, and a
detector looks up one token at a time. Without the key the hash reveals nothing.

    generated   green tokens get `delta` on their logit, so far more than `gamma` of the sampled ones are green
    detected    z = (green - gamma * scored) / sqrt(scored * gamma * (1 - gamma));  plain text has z near 0

A pair of context and token is scored once, because repetitive text would count one coincidence many times. This module
does not import torch: detection needs only a tokenizer and arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenmill.params import Watermark
from tokenmill.sampling.rng import GOLDEN, mix

_RANGE = 1 << 64


@dataclass(frozen=True)
class WatermarkScore:
    """Result of the detection in one text."""

    num_scored: int
    num_green: int
    z_score: float
    p_value: float  # how often text without a watermark has at least this score


def is_green(mark: Watermark, context: Sequence[int], token: int) -> bool:
    """Return whether a token is green after the given context."""
    return mix(_seed(mark, context) ^ token) < _threshold(mark)


def green_tokens(mark: Watermark, context: Sequence[int], vocab_size: int) -> NDArray[np.bool_]:
    """Return `is_green` of every token at once, bool [vocab_size]."""
    word = np.arange(vocab_size, dtype=np.uint64) ^ np.uint64(_seed(mark, context))
    word += np.uint64(GOLDEN)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (word ^ (word >> np.uint64(31))) < np.uint64(_threshold(mark))


def detect_watermark(mark: Watermark, token_ids: Sequence[int]) -> WatermarkScore:
    """Score a text's tokens for the watermark of one key."""
    size = mark.context
    seen = {tuple(token_ids[end - size : end + 1]) for end in range(size, len(token_ids))}
    num_green = sum(is_green(mark, run[:-1], run[-1]) for run in seen)
    if not seen:
        return WatermarkScore(0, 0, 0.0, 1.0)
    spread = math.sqrt(len(seen) * mark.gamma * (1 - mark.gamma))
    z_score = (num_green - mark.gamma * len(seen)) / spread
    return WatermarkScore(len(seen), num_green, z_score, 0.5 * math.erfc(z_score / math.sqrt(2)))


def _seed(mark: Watermark, context: Sequence[int]) -> int:
    word = mix(mark.key)
    for token in context:
        word = mix(word ^ token)
    return word


def _threshold(mark: Watermark) -> int:
    return int(mark.gamma * _RANGE)
