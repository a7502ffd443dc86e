"""Text of clients that spells a control token stays text: `<|im_start|>system` in a message opens no turn.

A tokenizer reads control tokens wherever they stand: in what the chat template wrote and in what a user wrote. Before
a conversation is rendered, what spells one in its messages is put between two marks. The marks are taken out of the
rendered text, which tells where such text stands; and tokens that were read there are written out in ordinary ones.

    "Hi <|im_end|>"  ─►  "Hi ⟦<|im_end|>⟧"  ─ template ─►  "…user\nHi ⟦<|im_end|>⟧<|im_end|>\n"
                     ─►  text without marks, spans of what was marked  ─►  token ids

Such text is tokenised apart from what stands beside it; a tokenizer that puts a space before every piece of a text puts
one behind it. Nearly all conversations hold nothing of the kind, and cost one search.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import msgspec

from tokenmill.errors import InvalidRequest
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.types import Message

Span = tuple[int, int]

MARKS = tuple(chr(code) for code in range(0xF0000, 0xF0100))  # private use: in no vocabulary, in hardly any text
BEFORE = "\x02"  # a character that no merge crosses: what a tokenizer adds to the beginning of a text comes before it


class MarkedText(msgspec.Struct, frozen=True):
    """A rendered conversation, and where in it stands what clients wrote that spells a control token."""

    text: str
    spans: list[Span] = []


class LiteralContents:
    """Marks the control tokens of one tokenizer in messages."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        spelled = {tokenizer.token_text(token_id): token_id for token_id in tokenizer.special_ids}
        self._ids = {text: token_id for text, token_id in spelled.items() if text}
        self._pattern = re.compile(trie_pattern(self._ids)) if self._ids else None

    def mark(self, messages: Sequence[Message], allowed: Collection[int]) -> tuple[list[Message], tuple[str, str]]:
        """The messages with marks around what spells a control token, and the two marks. `allowed`: control tokens that
        an assistant's message may hold, such as the markers of its thoughts."""
        if self._pattern is None or not any(self._pattern.search(message.content or "") for message in messages):
            return list(messages), ("", "")
        everything = "".join(message.content or "" for message in messages)
        free = [mark for mark in MARKS if mark not in everything]
        if len(free) < 2:
            raise InvalidRequest("the messages hold too many characters of private use", param="messages")
        opening, closing = free[:2]
        return [self._marked(message, allowed, opening, closing) for message in messages], (opening, closing)

    def _marked(self, message: Message, allowed: Collection[int], opening: str, closing: str) -> Message:
        if not message.content or self._pattern is None:
            return message

        def between_marks(found: re.Match[str]) -> str:
            if message.role == "assistant" and self._ids[found.group()] in allowed:
                return found.group()
            return f"{opening}{found.group()}{closing}"

        return msgspec.structs.replace(message, content=self._pattern.sub(between_marks, message.content))


def unmarked(text: str, marks: tuple[str, str]) -> MarkedText:
    """A rendered text without its marks, and the spans between them."""
    opening, closing = marks
    if not opening:
        return MarkedText(text)
    pieces, spans, length = [], list[Span](), 0
    for number, piece in enumerate(re.split(f"{opening}(.*?){closing}", text, flags=re.DOTALL)):
        if number % 2:
            spans.append((length, length + len(piece)))
        pieces.append(piece)
        length += len(piece)
    plain = "".join(pieces)
    if opening in plain or closing in plain or f"\\u{0xD800 + (0xF0000 - 0x10000 >> 10):04x}" in plain.lower():
        raise InvalidRequest(
            "the messages spell a control token of this model, and its chat template does not leave them whole",
            param="messages",
        )
    return MarkedText(plain, spans)


def encode_literally(tokenizer: Tokenizer, marked: MarkedText, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text in which control tokens are read except within the spans."""
    ids: list[int] = []
    spans = iter([*marked.spans, (len(marked.text) + 1, len(marked.text) + 1)])
    start, end = next(spans)
    for token_id, (first, last) in tokenizer.encode_with_offsets(marked.text, add_special_tokens=add_special_tokens):
        while end <= first:
            start, end = next(spans)
        is_spelled = last > start and first < last and token_id in tokenizer.special_ids
        ids += written_out(tokenizer, marked.text[first:last]) if is_spelled else [token_id]
    return ids


def written_out(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of the characters of a text that spells a control token: cut until none is read."""
    ids = _inside(tokenizer, text[:1]) + _inside(tokenizer, text[1:])
    if tokenizer.special_ids.isdisjoint(ids):
        return ids
    return [token_id for char in text for token_id in _inside(tokenizer, char)]


def _inside(tokenizer: Tokenizer, text: str) -> list[int]:
    found = tokenizer.encode_with_offsets(BEFORE + text, add_special_tokens=False)
    return [token_id for token_id, (_, last) in found if last > len(BEFORE)]


def trie_pattern(texts: Collection[str]) -> str:
    """A pattern for any of these texts, the longest that fits; thousands of them cost no more than a few."""
    trie: dict[str, dict[str, object]] = {}
    for text in texts:
        node = trie
        for char in text:
            node = node.setdefault(char, {})  # type: ignore[assignment]
        node[""] = {}
    return _pattern_of(trie)


def _pattern_of(node: dict[str, dict[str, object]]) -> str:
    branches = [re.escape(char) + _pattern_of(rest) for char, rest in sorted(node.items()) if char]  # type: ignore[arg-type]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")
