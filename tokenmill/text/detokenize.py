"""Token ids to text while they arrive, never half a character, at constant cost per token.

    tokens   b"caf"   b"\\xc3"   b"\\xa9"   b"!"
    text     "caf"     ""        "é"       "!"

Bytes that begin a character wait for its end; U+FFFD stands only for bytes that a following byte, or the end of
the text, proves wrong. All that was sent, joined, is what `Tokenizer.decode` says of all ids at once.

After a prompt the text goes on: a leading space then belongs to it, and a character that the prompt left
half finished is completed, if anything follows. Without a prompt the text begins, and SentencePiece's unwritten first
space is dropped.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence

from tokenmill.text.tokenizer import Spelling, Tokenizer

_LONGEST_CHARACTER = 4  # bytes of UTF-8, and so the most tokens that one can be spread over
_CONTEXT = 6  # tokens that a neighbour-sensitive decoder sees before new ones
_MOST_PENDING = 16  # tokens after which an unfinished character is taken for a broken one


class IncrementalDetokenizer:
    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        if tokenizer.spelling is not None:
            text: _SpelledText | _WindowedText = _SpelledText(tokenizer, tokenizer.spelling, prompt_ids, hidden)
        else:
            text = _WindowedText(tokenizer, prompt_ids, hidden)
        self.push: Callable[[Iterable[int]], str] = text.push
        """The text that these ids complete; may be empty."""
        self.finish: Callable[[], str] = text.finish
        """The text is over: what still waited."""


class _SpelledText:
    """Tokens are runs of bytes: a UTF-8 decoder holds back what is incomplete."""

    def __init__(
        self, tokenizer: Tokenizer, spelling: Spelling, prompt_ids: Sequence[int], hidden: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._drop_space = spelling.drops_first_space and not prompt_ids
        self._unfinished = _unfinished_character(self._joined(prompt_ids[-_LONGEST_CHARACTER:]))
        self._is_prompts = True  # what is unfinished, all of it

    def push(self, ids: Iterable[int]) -> str:
        if joined := self._joined(ids):
            self._is_prompts = False
        return self._decoded(self._unfinished + joined)

    def finish(self) -> str:
        return "" if self._is_prompts else self._decoded(self._unfinished, is_final=True)

    def _decoded(self, waiting: bytes, is_final: bool = False) -> str:
        text, num_read = codecs.utf_8_decode(waiting, "replace", is_final)
        self._unfinished = waiting[num_read:]
        return self._begun(text) if self._drop_space else text

    def _joined(self, ids: Iterable[int]) -> bytes:
        return b"".join([self._tokenizer.token_bytes(token_id) for token_id in ids if token_id not in self._hidden])

    def _begun(self, text: str) -> str:
        self._drop_space = not text
        return text.removeprefix(" ")


def _unfinished_character(tail: bytes) -> bytes:
    """The bytes at the end that begin a character and do not finish it."""
    for length in range(1, min(len(tail), _LONGEST_CHARACTER - 1) + 1):
        lead = tail[-length]
        if lead >= 0xC0:
            needed = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return tail[-length:] if length < needed else b""
        if lead < 0x80:
            break
    return b""


class _WindowedText:
    """The decoder looks at neighbours: decode a few tokens of context with and without the new ones.

    ids:   ... [context | pending]     sent text ends with the context; pending ids wait for a finished character
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._context = self._shown(prompt_ids[-_CONTEXT:])
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in self._shown(ids)])

    def finish(self) -> str:
        return self._send() if self._pending else ""

    def _push_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._decoded(self._context + self._pending)
        is_unfinished = text.endswith("\ufffd") and len(self._pending) < _MOST_PENDING
        return "" if is_unfinished else self._send()

    def _send(self) -> str:
        before = self._decoded(self._context)
        after = self._decoded(self._context + self._pending)
        self._context = (self._context + self._pending)[-_CONTEXT:]
        self._pending = []
        return after[len(before) :]

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _shown(self, ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in ids if token_id not in self._hidden]
