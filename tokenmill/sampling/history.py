"""The token history of a row, for the sampler steps that depend on earlier tokens.

    TokenCounts      distinct tokens and their number of occurrences in the output: repetition, frequency and presence
                     penalties
    NgramIndex       tokens that would complete an n-gram seen before: no_repeat_ngram_size
    RepeatRuns       tokens that would extend a repeated passage: DRY
    ThinkingBudget   tokens spent inside think sections: thinking_budget

A row keeps only the parts that its steps use. Each part is a pure function of the row's own prompt and output tokens,
so a row that resumes after a preemption rebuilds its history from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenmill.types import RowInit

STEPS_READING_TOKENS = ("watermark", "processors")  # steps that need the token ids themselves


@dataclass
class History:
    """The token history of one row; a part is None where no sampler step of the row uses it."""

    num_tokens: int  # of prompt and output
    prompt_len: int
    counts: TokenCounts | None = None  # penalties
    ngrams: NgramIndex | None = None  # no_repeat_ngram_size
    repeats: RepeatRuns | None = None  # DRY
    thinking: ThinkingBudget | None = None  # thinking_budget
    tokens: list[int] | None = None  # for STEPS_READING_TOKENS

    def record(self, token: int) -> None:
        self.num_tokens += 1
        for part in (self.counts, self.ngrams, self.repeats, self.thinking):
            if part is not None:
                part.record(token)
        if self.tokens is not None:
            self.tokens.append(token)


def history_of(new_row: RowInit, steps: frozenset[str], vocab_size: int) -> History | None:
    """Build the history that the given steps need; None where none of them depends on earlier tokens."""
    params, prompt, output = new_row.params, new_row.prompt_token_ids, new_row.output_token_ids
    history = History(num_tokens=len(prompt) + len(output), prompt_len=len(prompt))
    if "penalties" in steps:
        history.counts = TokenCounts(prompt, output, vocab_size)
    if "no_repeat_ngram" in steps:
        history.ngrams = NgramIndex(params.no_repeat_ngram_size, (*prompt, *output))
    if "dry" in steps:
        breakers = Breakers(new_row.tokenized.dry_break_ids, new_row.tokenized.dry_breakers)
        history.repeats = RepeatRuns((*prompt, *output), breakers)
    if "thinking" in steps:
        history.thinking = _thinking_budget(new_row)
    if not steps.isdisjoint(STEPS_READING_TOKENS):
        history.tokens = [*prompt, *output]
    parts = (history.counts, history.ngrams, history.repeats, history.thinking, history.tokens)
    return history if any(part is not None for part in parts) else None


def _thinking_budget(new_row: RowInit) -> ThinkingBudget:
    tokenized, budget = new_row.tokenized, new_row.params.thinking_budget
    assert budget is not None and tokenized.think_end_ids, "a thinking budget needs the token ids of the markers"
    is_open = tokenized.starts_thinking
    thinking = ThinkingBudget(budget, tokenized.think_start_ids, tokenized.think_end_ids, is_open=is_open)
    for token in new_row.output_token_ids:
        thinking.record(token)
    return thinking


class TokenCounts:
    """The distinct tokens of a sequence, and how often the output holds each of them.

    Two host arrays over the distinct tokens: a few hundred entries, where the vocabulary has a hundred thousand.
    """

    def __init__(self, prompt_ids: Iterable[int], output_ids: Iterable[int], vocab_size: int) -> None:
        # a prompt may hold placeholders outside the vocabulary; they have no logit to penalise
        seen = [token for token in dict.fromkeys(prompt_ids) if 0 <= token < vocab_size]
        self._entries = {token: entry for entry, token in enumerate(seen)}  # token -> index into both arrays
        capacity = max(64, 2 * len(seen))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(seen)] = seen
        self._outputs = np.zeros(capacity, dtype=np.int64)
        for token in output_ids:
            self.record(token)

    def record(self, token: int) -> None:
        """Count one more output token."""
        entry = self._entries.setdefault(token, len(self._entries))
        if entry == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._outputs = np.concatenate([self._outputs, np.zeros_like(self._outputs)])
        self._ids[entry] = token
        self._outputs[entry] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct tokens of prompt and output, int64 [N]."""
        return self._ids[: len(self._entries)]

    @property
    def output_counts(self) -> NDArray[np.int64]:
        """Number of times that each of `ids` was generated, int64 [N]; 0 for a token of the prompt only."""
        return self._outputs[: len(self._entries)]


class NgramIndex:
    """For each run of size - 1 tokens, the tokens that have followed it in prompt or output.

    Finds the tokens that would repeat an n-gram without reading the sequence again.
    """

    def __init__(self, size: int, tokens: Iterable[int]) -> None:
        self._size = size
        self._tail: tuple[int, ...] = ()  # the last size - 1 tokens
        self._followers: dict[tuple[int, ...], list[int]] = {}
        for token in tokens:
            self.record(token)

    def record(self, token: int) -> None:
        if len(self._tail) == self._size - 1:
            self._followers.setdefault(self._tail, []).append(token)
        longer = (*self._tail, token)
        self._tail = longer[max(0, len(longer) - (self._size - 1)) :]

    def repeating(self) -> list[int]:
        """Return the tokens that would complete an n-gram of the sequence."""
        if len(self._tail) < self._size - 1:
            return []
        return self._followers.get(self._tail, [])


class Breakers:
    """Token sequences that end a repeat: single tokens, and longer ones by their last token."""

    def __init__(self, single: Sequence[int], longer: Sequence[Sequence[int]]) -> None:
        self.single = frozenset(single)
        self._longer: dict[int, list[list[int]]] = {}
        for sequence in longer:
            self._longer.setdefault(sequence[-1], []).append(list(sequence))

    def ending_with(self, token: int) -> list[list[int]]:
        """Return the breakers whose last token is `token`."""
        found = self._longer.get(token, [])
        return [[token], *found] if token in self.single else found


class RepeatRuns:
    """Repeated passages of a sequence: which tokens would extend one, and how long it is by now (DRY).

        tokens   a b c d | a b c ?       the run "a b c" occurs a second time: d would extend the repeat by one

    For every earlier position, the length of the run that ends both there and at the end of the sequence is kept up to
    date: one comparison with the whole sequence per token. A breaker (a line break, a quote: tokens that are common
    everywhere) ends all runs: repeats count from the last breaker on. The rules are llama.cpp's.
    """

    def __init__(self, tokens: Sequence[int], breakers: Breakers) -> None:
        self._breakers = breakers
        self._length = len(tokens)
        capacity = max(256, 2 * len(tokens))
        self._tokens = np.zeros(capacity, np.int64)
        self._tokens[: len(tokens)] = tokens
        self._runs = np.zeros(capacity, np.int64)  # entry j: how many tokens up to position j equal the last ones
        self._runs[: len(tokens)] = suffix_runs(tokens)
        self._broken = (-1, -1)  # first and last position of the breaker that begins last
        for end in range(len(tokens)):
            self._record_breaker(end)

    def record(self, token: int) -> None:
        if self._length == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._runs = np.concatenate([self._runs, np.zeros_like(self._runs)])
        end = self._length
        longer = self._runs[:end]
        longer[1:] = longer[:-1] + 1
        longer[:1] = 1
        longer *= self._tokens[:end] == token
        self._tokens[end] = token
        self._length += 1
        self._record_breaker(end)

    def repeating(self, allowed_length: int, last_n: int) -> dict[int, int]:
        """Map each token that would extend a repeat of at least `allowed_length` tokens to the length of that repeat.

        Only the last `last_n` tokens of the sequence count; a negative number means all.
        """
        looked = self._length if last_n < 0 else min(last_n, self._length)
        limit = self._unbroken(looked)
        if looked <= allowed_length or limit < allowed_length:
            return {}
        first = self._length - looked
        runs = np.minimum(self._runs[first : self._length - 1], np.arange(1, looked))  # none starts before first
        runs = np.minimum(runs, limit)
        positions = np.nonzero(runs >= allowed_length)[0]
        followers = self._tokens[first + 1 + positions].tolist()
        found: dict[int, int] = {}
        for token, run in zip(followers, runs[positions].tolist(), strict=True):
            if token not in self._breakers.single and run > found.get(token, -1):
                found[token] = run
        return found

    def _unbroken(self, looked: int) -> int:
        """Return how many of the last `looked` tokens follow the last breaker."""
        first, last = self._broken
        return self._length - 1 - last if first >= self._length - looked and first >= 0 else looked

    def _record_breaker(self, end: int) -> None:
        """Remember the breaker that ends at `end`, if it begins after the one known so far (or is longer)."""
        for sequence in self._breakers.ending_with(int(self._tokens[end])):
            first = end + 1 - len(sequence)
            if first >= 0 and (first, end) > self._broken and self._tokens[first : end + 1].tolist() == sequence:
                self._broken = (first, end)


def suffix_runs(tokens: Sequence[int]) -> list[int]:
    """Return, for each position, the length of the run ending there that also ends the sequence.

    This is the Z-function of the reversed sequence.
    """
    back = list(reversed(tokens))
    runs = [0] * len(back)
    left, right = 0, 0  # the furthest range of `back` that equals its beginning: [left, right)
    for position in range(1, len(back)):
        run = min(right - position, runs[position - left]) if position < right else 0
        while position + run < len(back) and back[run] == back[position + run]:
            run += 1
        if position + run > right:
            left, right = position, position + run
        runs[position] = run
    return runs[::-1]


class ThinkingBudget:
    """The number of tokens spent in think sections, and the tokens that close a section once the budget is spent.

        <think> t t t t t </think> answer ...        with a budget of 3:   <think> t t t </think> answer ...

    Sections begin and end with the token ids of their markers. All sections share one budget, so opening a second one
    gains nothing. A prompt may end inside a section (many chat templates do); its tokens do not count.
    """

    def __init__(self, budget: int, start_ids: Sequence[int], end_ids: Sequence[int], *, is_open: bool) -> None:
        self._budget = budget
        self._start_ids, self._end_ids = list(start_ids), list(end_ids)
        self._is_open = is_open
        self._num_thought = 0
        self._tail: list[int] = []  # the last output tokens, as many as the longer marker has

    def record(self, token: int) -> None:
        self._tail = [*self._tail, token][-max(len(self._start_ids), len(self._end_ids)) :]
        self._num_thought += self._is_open
        if self._is_open and self._tail[-len(self._end_ids) :] == self._end_ids:
            self._is_open = False
            self._num_thought -= len(self._end_ids)  # the marker itself does not count
        elif not self._is_open and self._tail[-len(self._start_ids) :] == self._start_ids:
            self._is_open = True

    def forced(self) -> int | None:
        """Return the next token of the closing marker once the budget is spent, else None."""
        written = self._num_written()
        if not self._is_open or self._num_thought - written < self._budget:
            return None
        return self._end_ids[written]

    def _num_written(self) -> int:
        """Return how many tokens of the closing marker the output already ends with."""
        longest = min(len(self._tail), len(self._end_ids) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if self._tail[-n:] == self._end_ids[:n]), 0)
