"""Random numbers without state: a pure function of (seed, output index, purpose).

A row's n-th draw is the same number whatever else is in the batch, in whatever order the rows lie, and after any
preemption, because nothing is consumed: the counter is the position in the output. The mixing is SplitMix64's
finaliser (Steele, Lea, Flood 2014) applied once per word of the key, on the host, in whole numbers.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

DRAW = 0  # purposes: each has its own stream, so a second draw at one position is independent of the first
XTC = 1


def mix(word: int) -> int:
    """SplitMix64's finaliser: 64 bits to 64 bits."""
    word = (word + GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def uniform(seed: int, output_index: int, purpose: int = DRAW) -> float:
    """A number in [0, 1) with 53 random bits. Any 64-bit seed, negative ones included."""
    # the words enter one after another, so (seed 1, index 0) and (seed 0, index 1) part
    word = mix(mix(mix(seed & _MASK) + output_index) + purpose)
    return (word >> 11) * 2.0**-53
