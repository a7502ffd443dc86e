"""Random numbers without state: a pure function of (seed, output index, purpose).

The n-th random number of a row does not depend on the batch, on the order of its rows or on preemptions, because there
is no generator to advance: the counter is the position in the output. The mixing function is SplitMix64's finaliser
(Steele, Lea, Flood 2014), applied once per word of the key, on the host, in integers.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

DRAW = 0  # purposes: each has its own stream, so two numbers for one position are independent
XTC = 1


def mix(word: int) -> int:
    """SplitMix64's finaliser: 64 bits to 64 bits."""
    word = (word + GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def uniform(seed: int, output_index: int, purpose: int = DRAW) -> float:
    """Return a number in [0, 1) with 53 random bits, for any 64-bit seed (negative ones included)."""
    # mixed in one after another, so that (seed 1, index 0) and (seed 0, index 1) differ
    word = mix(mix(mix(seed & _MASK) + output_index) + purpose)
    return (word >> 11) * 2.0**-53
