"""The tokenizer in the form that llguidance needs: bytes of every token, special tokens, and a function that splits
text.

Only vocabularies whose tokens are fixed byte strings can be masked; others are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import llguidance

from tokenmill.errors import InvalidRequest
from tokenmill.text.tokenizer import Tokenizer

_MARK = "\x02"  # a character that no merge of any vocabulary crosses


class Vocabulary:
    """A vocabulary for matchers, which use `ll`. Any of `eos_token_ids` ends a text; a forced end uses the first.

    Special tokens and `markers` do not match text: a grammar must refer to them by id.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], markers: Sequence[int] = ()
    ) -> None:
        if tokenizer.spelling is None:
            raise InvalidRequest(
                "a grammar needs tokens with fixed bytes, but this model's decoder depends on neighbouring tokens"
            )
        if not eos_token_ids:
            raise InvalidRequest("this model has no end token, which a grammar needs")
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._splitter = _SplittingTokenizer(tokenizer, vocab_size, self.eos_token_ids[0], markers)
        self._splitter(b" ")  # makes the tokenizer's backend for literal text, which takes longer than most grammars
        wrapper = cast(llguidance.TokenizerWrapper, self._splitter)
        self.ll = llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(eos_token_ids))

    def prefix_tokens(self, raw: bytes) -> list[int]:
        """Return the tokens whose bytes are a prefix of this text."""
        return sorted({token_id for end in range(1, len(raw) + 1) for token_id in self._splitter.single(raw[:end])})


class _SplittingTokenizer:
    """The interface that `llguidance.LLTokenizer` needs: these attributes, and a call that converts text to ids."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int, markers: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        # Embeddings are often padded beyond the vocabulary: such ids have no bytes and are never allowed.
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        special = {token_id for token_id in (*tokenizer.special_ids, *markers) if token_id < vocab_size}
        self.special_token_ids = sorted(special)
        self._markers = frozenset(markers)
        self._ids = {raw: i for i, raw in reversed(list(enumerate(self.tokens))) if raw and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return token ids of exactly this text, split as the model's tokenizer splits it inside a longer text."""
        raw = text if isinstance(text, bytes) else text.encode()
        ids = self._tokenize_inside(raw)
        return ids if ids is not None else self._greedy(raw)

    def single(self, raw: bytes) -> set[int]:
        """Return the single tokens with these bytes: the tokenizer's choice, and the first in the vocabulary, if
        any."""
        if raw not in self._ids:
            return set()
        whole = self(raw)
        return {self._ids[raw], *(whole if len(whole) == 1 else ())}

    def _tokenize_inside(self, raw: bytes) -> list[int] | None:
        """Tokenize after a mark character, so that a space which the tokenizer adds at the beginning comes before the
        mark."""
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            return None
        ids = self._tokenizer.encode(_MARK + text, add_special_tokens=False, parse_special=False)
        if not self._markers.isdisjoint(ids):  # the text of a marker must be split into other tokens
            return None
        tail_len = 0
        for start in range(len(ids) - 1, -1, -1):
            if tail_len == len(raw):
                tail = ids[start + 1 :]
                return tail if b"".join(self.tokens[i] for i in tail) == raw else None
            tail_len += len(self.tokens[ids[start]])
        return None

    def _greedy(self, raw: bytes) -> list[int]:
        ids, position = [], 0
        while position < len(raw):
            for length in range(min(self._longest, len(raw) - position), 0, -1):
                token_id = self._ids.get(raw[position : position + length])
                if token_id is not None:
                    ids.append(token_id)
                    position += length
                    break
            else:
                return []  # no token has this byte, so the text can't be tokenized
        return ids
