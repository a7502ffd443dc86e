"""The sampler in plain Python, used as the reference: every step follows its definition, on lists of floats."""

from __future__ import annotations

import math
from collections import Counter

from tokenmill.params import SamplingParams, Watermark

NEVER = -math.inf


def softmax(logits: list[float]) -> list[float]:
    best = max(logits)
    powers = [math.exp(x - best) for x in logits]
    total = math.fsum(powers)
    return [x / total for x in powers]


def only(logits: list[float], kept: set[int]) -> list[float]:
    return [x if i in kept else NEVER for i, x in enumerate(logits)]


def penalties(logits: list[float], p: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    result = list(logits)
    for token in {*prompt, *output}:
        x = result[token]
        result[token] = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
    for token, times in Counter(output).items():
        result[token] -= p.frequency_penalty * times + p.presence_penalty
    return result


def bias(logits: list[float], p: SamplingParams) -> list[float]:
    return [x + (p.logit_bias or {}).get(i, 0.0) for i, x in enumerate(logits)]


def temperature(logits: list[float], p: SamplingParams) -> list[float]:
    return [x / p.temperature for x in logits]


def top_k(logits: list[float], p: SamplingParams) -> list[float]:
    kth = sorted(logits, reverse=True)[min(p.top_k, len(logits)) - 1]
    return [x if x >= kth else NEVER for x in logits]


def _until(order: list[int], probs: list[float], share: float) -> set[int]:
    kept: set[int] = set()
    mass = 0.0
    for token in order:
        kept.add(token)
        mass += probs[token]
        if mass >= share:
            break
    return kept


def top_p(logits: list[float], p: SamplingParams) -> list[float]:
    probs = softmax(logits)
    order = sorted(range(len(logits)), key=lambda i: -probs[i])
    return only(logits, _until(order, probs, p.top_p))


def typical(logits: list[float], p: SamplingParams) -> list[float]:
    probs = softmax(logits)
    alive = [i for i, q in enumerate(probs) if q > 0]
    entropy = -math.fsum(probs[i] * math.log(probs[i]) for i in alive)
    order = sorted(alive, key=lambda i: abs(-math.log(probs[i]) - entropy))
    return only(logits, _until(order, probs, p.typical_p))


def min_p(logits: list[float], p: SamplingParams) -> list[float]:
    probs = softmax(logits)
    return [x if q >= p.min_p * max(probs) else NEVER for x, q in zip(logits, probs, strict=True)]


def top_n_sigma(logits: list[float], p: SamplingParams) -> list[float]:
    mean = math.fsum(logits) / len(logits)
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in logits) / len(logits))
    return [x if x >= max(logits) - p.top_n_sigma * sigma else NEVER for x in logits]


def top_a(logits: list[float], p: SamplingParams) -> list[float]:
    probs = softmax(logits)
    return [x if q >= p.top_a * max(probs) ** 2 else NEVER for x, q in zip(logits, probs, strict=True)]


def epsilon(logits: list[float], p: SamplingParams) -> list[float]:
    probs = softmax(logits)
    least = min(p.epsilon_cutoff, max(probs))
    return [x if q >= least else NEVER for x, q in zip(logits, probs, strict=True)]


def xtc(logits: list[float], p: SamplingParams) -> list[float]:
    """Apply the step as if its random choice (here with probability 1) had selected it."""
    probs = softmax(logits)
    reaching = sorted((i for i, q in enumerate(probs) if q >= p.xtc_threshold), key=lambda i: probs[i])
    return only(logits, set(range(len(logits))) - set(reaching[1:]))


def eta(logits: list[float], p: SamplingParams) -> list[float]:
    probs = softmax(logits)
    entropy = -math.fsum(q * math.log(q) for q in probs if q > 0)
    least = min(p.eta_cutoff, math.sqrt(p.eta_cutoff) * math.exp(-entropy), max(probs))
    return [x if q >= least else NEVER for x, q in zip(logits, probs, strict=True)]


def dynatemp(logits: list[float], p: SamplingParams) -> list[float]:
    probs = [q for q in softmax(logits) if q > 0]
    entropy = -math.fsum(q * math.log(q) for q in probs)
    low, high = max(0.0, p.temperature - p.dynatemp_range), p.temperature + p.dynatemp_range
    share = entropy / math.log(len(probs)) if len(probs) > 1 else 0.0
    moved = low + (high - low) * share**p.dynatemp_exponent if len(probs) > 1 else p.temperature
    return [x / moved for x in logits]


def mirostat(logits: list[float], mu: float) -> list[float]:
    probs = softmax(logits)
    return [x if -math.log2(q) <= mu or q == max(probs) else NEVER for x, q in zip(logits, probs, strict=True)]


def mirostat_mu(mu: float, drawn: int, logits: list[float], p: SamplingParams) -> float:
    """Return mu after a draw from `logits`, which mirostat has truncated."""
    return mu - p.mirostat_eta * (-math.log2(softmax(logits)[drawn]) - p.mirostat_tau)


def dry(logits: list[float], p: SamplingParams, tokens: list[int], breakers: list[list[int]]) -> list[float]:
    """Compare backwards from every earlier position, token by token."""
    window = tokens if p.dry_penalty_last_n < 0 else tokens[len(tokens) - min(p.dry_penalty_last_n, len(tokens)) :]
    since = _since_breaker(window, breakers)
    if len(window) <= p.dry_allowed_length or since < p.dry_allowed_length:
        return logits
    longest: dict[int, int] = {}
    for place in range(1, len(window)):
        run = 0
        while run < place and window[place - 1 - run] == window[-1 - run]:
            run += 1
        if min(run, since) >= p.dry_allowed_length:
            longest[window[place]] = max(longest.get(window[place], 0), min(run, since))
    result = list(logits)
    for token, run in longest.items():
        if [token] not in breakers:
            result[token] -= p.dry_multiplier * p.dry_base ** (run - p.dry_allowed_length)
    return result


def _since_breaker(tokens: list[int], breakers: list[list[int]]) -> int:
    for first in range(len(tokens) - 1, -1, -1):
        found = [len(b) for b in breakers if tokens[first : first + len(b)] == b]
        if found:
            return len(tokens) - first - max(found)
    return len(tokens)


def green(mark: Watermark, context: list[int], token: int) -> bool:
    """Return the hash, written out: SplitMix64's finaliser over the key, the context and the token."""
    word = _splitmix(mark.key)
    for one in context:
        word = _splitmix(word ^ one)
    return _splitmix(word ^ token) / 2**64 < mark.gamma


def _splitmix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def chi_square_limit(freedom: int) -> float:
    """Return the value that a chi-square variable exceeds about once in 30,000 times (Wilson and Hilferty, z = 4)."""
    return freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(observed: Counter[int], probs: list[float]) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom. A token that cannot occur must not have occurred."""
    draws = sum(observed.values())
    possible = [i for i, q in enumerate(probs) if q > 0]
    assert set(observed) <= set(possible)
    value = math.fsum((observed[i] - draws * probs[i]) ** 2 / (draws * probs[i]) for i in possible)
    return value, len(possible) - 1
