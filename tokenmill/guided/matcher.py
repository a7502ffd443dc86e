"""Where one sequence stands in its grammar.

    advance(ids)   tokens were appended        forced()   what must come next, if only one thing can
    rollback(n)    the last n were taken back  fill(line) which tokens may come next, as bits
    fork()         a twin that goes its own way   spellings()   all tokens that begin what must come next

A matcher that was given a wrong token, or met a limit of the grammar engine, is in error and stays so.
"""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np
from numpy.typing import NDArray

from tokenmill.guided.vocabulary import Vocabulary


class Matcher:
    def __init__(self, ll: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self.ll = ll
        self._vocabulary = vocabulary
        self._num_tokens = 0
        self._has_ended = False  # an end token was taken; the grammar engine does not count it, so it never sees it

    @property
    def error(self) -> str | None:
        return first_line(self.ll.get_error()) if self.ll.is_error() else None

    @property
    def is_complete(self) -> bool:
        """The text so far satisfies the grammar (more may be allowed)."""
        return self._has_ended or bool(self.ll.is_accepting())

    def advance(self, token_ids: Sequence[int]) -> bool:
        """False: the grammar does not allow them; the matcher is in error from now on."""
        return all(self._take(token_id) for token_id in token_ids)

    def _take(self, token_id: int) -> bool:
        if self.is_end(token_id) and self.ll.is_accepting():
            self._has_ended = True
        elif not self.ll.consume_token(token_id):
            return False
        self._num_tokens += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= self._num_tokens, "rolled back beyond the beginning"
        self._num_tokens -= num_tokens
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens:
            self.ll.rollback(num_tokens)

    def fork(self) -> Matcher:
        twin = Matcher(self.ll.deep_copy(), self._vocabulary)
        twin._num_tokens, twin._has_ended = self._num_tokens, self._has_ended
        return twin

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these, in order, the grammar allows next (a draft's good beginning)."""
        return int(self.ll.validate_tokens(list(token_ids)))

    def forced(self) -> list[int]:
        """Tokens that must come next, cut as the tokenizer cuts text; the end token where nothing else is allowed."""
        if self._has_ended or self.ll.is_error():
            return []
        tokens: list[int] = self.ll.compute_ff_tokens()
        if not tokens and self.ll.is_stopped() and not self.ll.is_error():
            return [self._vocabulary.eos_token_ids[0]]
        return tokens

    def spellings(self) -> list[int]:
        """All tokens that begin the text which must come next: other cuts than the tokenizer's own among them."""
        return [] if not self.forced() else self._vocabulary.beginnings(self.ll.compute_ff_bytes())

    def is_end(self, token_id: int) -> bool:
        return token_id in self._vocabulary.eos_token_ids

    def fill(self, line: NDArray[np.int32]) -> None:
        """One bit per token, lowest first, into int32 [ceil(vocab / 32)]."""
        self.ll.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)


def first_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("<")]
    return lines[0] if lines else "unknown problem"
