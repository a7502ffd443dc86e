"""The state of one sequence in its grammar.

    Matcher      the grammar engine's state: advance, fork, forced tokens, mask
    RowGrammar   a row of the runner that follows a grammar: its matcher, and pending forced tokens

A grammar forces text; the tokens that it proposes are only the tokenizer's split of that text. A request may exclude
one of them: banned, not among the allowed ones, biased by -100 (a ban in OpenAI's API), or a stop token before
`min_tokens`. Such a token is not forced: the row samples from all tokens that begin the same text. The end token of a
complete grammar is never excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import llguidance
import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import InvalidRequest, RequestFailed, TokenmillError
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.params import SamplingParams

BAN = -100.0

NOT_ALLOWED = "doesn't satisfy the grammar"  # in llguidance's error for a token that is not allowed

IsExcluded = Callable[[int, int], bool]  # (token id, number of output tokens before it)


class Matcher:
    """A grammar and the tokens processed so far. After a token that the grammar does not allow, or after exceeding a
    limit of the grammar engine, the matcher stays in error.

    Forks share the lexer of their original, and so its limit of states; `lexer` identifies it.
    """

    def __init__(self, ll: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self.ll = ll
        self.lexer = object()
        self._vocabulary = vocabulary
        self._has_ended = False  # an end token was processed; it is not passed to the grammar engine

    @property
    def error(self) -> str | None:
        return first_line(self.ll.get_error()) if self.ll.is_error() else None

    @property
    def has_exceeded_limit(self) -> bool:
        """Return whether the matcher is in error because of a limit, not because of a token."""
        return self.ll.is_error() and NOT_ALLOWED not in self.ll.get_error()

    @property
    def is_complete(self) -> bool:
        """Return whether the text so far satisfies the grammar; more may be allowed."""
        return self._has_ended or bool(self.ll.is_accepting())

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Append tokens; return False, and stay in error, if the grammar does not allow them."""
        return all(self._take(token_id) for token_id in token_ids)

    def _take(self, token_id: int) -> bool:
        if self.is_end(token_id) and self.ll.is_accepting():
            self._has_ended = True
        elif not self.ll.consume_token(token_id):
            return False
        return True

    def fork(self) -> Matcher:
        """Return an independent copy."""
        copy = Matcher(self.ll.deep_copy(), self._vocabulary)
        copy._has_ended = self._has_ended
        copy.lexer = self.lexer
        return copy

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, in order, the grammar allows next."""
        return int(self.ll.validate_tokens(list(token_ids)))

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as the tokenizer splits their text; the end token if only that is
        allowed."""
        if self._has_ended or self.ll.is_error():
            return []
        tokens: list[int] = self.ll.compute_ff_tokens()
        if not tokens and self.ll.is_stopped() and not self.ll.is_error():
            return [self._vocabulary.eos_token_ids[0]]
        return tokens

    def spellings(self) -> list[int]:
        """Return all tokens that are a prefix of the forced text, not only the tokenizer's choice."""
        return [] if not self.forced() else self._vocabulary.prefix_tokens(self.ll.compute_ff_bytes())

    def is_end(self, token_id: int) -> bool:
        return token_id in self._vocabulary.eos_token_ids

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write which tokens may come next, one bit each, lowest first, into int32 [ceil(vocab / 32)]."""
        self.ll.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


def none_excluded(token_id: int, num_outputs: int) -> bool:
    """Exclude no token."""
    return False


def excluded_tokens(params: SamplingParams, stop_token_ids: list[int]) -> IsExcluded:
    """Return the test for tokens that a request excludes even if its grammar forces them."""
    allowed, banned = params.allowed_token_ids, {*(params.banned_token_ids or ())}
    banned |= {token_id for token_id, bias in (params.logit_bias or {}).items() if bias <= BAN}
    if allowed is None and not banned and not params.min_tokens:
        return none_excluded
    allowed_ids, stops = frozenset(allowed or ()), frozenset(stop_token_ids)

    def is_excluded(token_id: int, num_outputs: int) -> bool:
        is_early_stop = num_outputs < params.min_tokens and token_id in stops
        return is_early_stop or token_id in banned or (allowed is not None and token_id not in allowed_ids)

    return is_excluded


class ReopensGrammar(Protocol):
    """A grammar that a row can open again after its lexer has reached the limit."""

    def reopen(self, full: Matcher, num_reopened: int) -> Matcher:
        """Return a matcher in its initial state whose lexer has more space than that of `full`; raise TokenmillError if
        there is none. `num_reopened`: how often this row has reopened the grammar before."""
        ...


class RowGrammar:
    """A row that follows a grammar: its matcher, and the forced tokens up to the first that the request excludes.

    A lexer's limit counts the states reached by all rows of the grammar, present and past. So a row that exceeds it
    starts again with another lexer, processes the same tokens, and fails only if its own answer needs too many states.
    """

    def __init__(
        self,
        matcher: Matcher,
        outputs: list[int],
        is_excluded: IsExcluded = none_excluded,
        source: ReopensGrammar | None = None,
    ) -> None:
        self.matcher = matcher
        self.matcher.advance(outputs)
        self.failure: TokenmillError | None = None  # the reason why the row can't continue
        self.has_walk_failed = False  # the last walk along drafts exceeded a limit
        self._outputs = list(outputs)
        self._is_excluded = is_excluded
        self._source = source
        self._num_reopened = 0
        self.forced = self._forced(0)
        self.recover()

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    def recover(self) -> None:
        """Recover from an error of the matcher by using another lexer, or set `failure`."""
        while self.failure is None and self.matcher.ll.is_error():
            self.reopen()

    def reopen(self) -> None:
        """Continue with another lexer, or set `failure`."""
        try:
            if self.matcher.ll.is_error() and not self.matcher.has_exceeded_limit:
                raise RequestFailed(f"the grammar can't be enforced further: {self.matcher.error}")
            if self._source is None:
                raise InvalidRequest(f"the grammar is too complex for this answer: {self.matcher.error}")
            self.matcher = self._source.reopen(self.matcher, self._num_reopened)
        except TokenmillError as failure:
            self.failure = failure
            return
        self._num_reopened += 1
        self.matcher.advance(self._outputs)
        self.forced = self._forced(0)

    @property
    def choices(self) -> list[int]:
        """The tokens that may come next if text is forced; empty if the matcher's mask decides."""
        return self._choices(self.forced)

    def advance(self, token_id: int) -> None:
        """Advance by a sampled token."""
        self.matcher.advance([token_id])
        self._outputs.append(token_id)
        self.forced = self.forced[1:] or self._forced(0)

    def jump(self) -> list[int]:
        """Advance by all forced tokens, and return them."""
        taken: list[int] = []
        while self.forced and self.matcher.advance(self.forced):
            taken += self.forced
            self._outputs += self.forced
            self.forced = self._forced(0)
        return taken

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """Return how many of these draft tokens, in order, may come next; if tokens are forced, only those may."""
        if self.matcher.error is not None:
            return 0
        for position, (token_id, forced) in enumerate(zip(drafts, self.forced, strict=False)):
            if token_id != forced:
                return position
        return self.matcher.num_allowed(drafts)

    def walk(self, drafts: Sequence[int]) -> Iterator[list[int]]:
        """Yield the choices after each draft, as long as the drafts are allowed.

        While a value is used, `matcher` is a copy in the state after that draft; the original is restored at the end.
        The grammar engine's own rollback can't be used: after a rollback past a position where forced tokens were
        computed, it refuses valid tokens later.
        """
        here, forced = self.matcher, self.forced
        self.matcher = here.fork()
        try:
            for taken, draft in enumerate(drafts, 1):
                if (forced and draft != forced[0]) or not self.matcher.advance([draft]):
                    break
                forced = forced[1:] or self._forced(taken)
                yield self._choices(forced)
        finally:
            self.has_walk_failed = self.matcher.has_exceeded_limit
            self.matcher = here

    def _forced(self, num_drafts: int) -> list[int]:
        """Return the forced tokens, up to the first that the request excludes; the matcher has processed `num_drafts`
        drafts."""
        tokens = self.matcher.forced()
        for position, token_id in enumerate(tokens):
            if self.matcher.is_end(token_id):
                break
            if self._is_excluded(token_id, self.num_outputs + num_drafts + position):
                return tokens[:position]
        return tokens

    def _choices(self, forced: list[int]) -> list[int]:
        if forced or self._is_excluded is none_excluded:
            return forced[:1]
        return self.matcher.spellings()


def first_line(message: str) -> str:
    """Return the first line of an error message that has text and no markup."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("<")]
    return lines[0] if lines else "unknown problem"
