"""The tokenizer: text to token ids and back, and the exact bytes of every token.

`Spelling` says how a vocabulary encodes bytes as text (byte-level BPE, SentencePiece, WordPiece). With it every token
has exact bytes, which streaming, logprobs and grammars need:

    byte-level BPE   "Ġcafé" is written with 256 printable characters, one per byte  → b" caf\\xc3\\xa9"
    SentencePiece    "▁caf" marks a space with U+2581, "<0xC3>" is one raw byte       → b" caf", b"\\xc3"
    WordPiece        "cafe" begins a word, "##s" continues it                         → b" cafe", b"s"

Tokens are joined as bytes and decoded as UTF-8, so whole texts, streams and single tokens always agree. A vocabulary
whose decoder depends on neighbouring tokens has no spelling; the library decodes it.

`Tokenizer` wraps the `tokenizers` library and adds what a checkpoint's other files say: special tokens, end tokens,
chat templates. `byte_tokenizer` makes a vocabulary of 256 bytes for tests and for models without a tokenizer.

`IncrementalDetokenizer` decodes token ids as they arrive, never half a character, at constant cost per token:

    tokens   b"caf"   b"\\xc3"   b"\\xa9"   b"!"
    text     "caf"     ""        "é"       "!"

The first bytes of a character are held back until it is complete. U+FFFD replaces only bytes that a following byte, or
the end of the text, proves invalid. The pieces joined equal `Tokenizer.decode` of all ids. With a prompt, the output
continues the prompt's text: a leading space is kept, and a character that the prompt left incomplete is completed if
any byte follows. Without a prompt, the leading space that SentencePiece adds to a text is dropped.
"""

from __future__ import annotations

import codecs
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_CHARACTER_BYTES = 4  # of UTF-8, and so the most tokens that one character can be split into
_NUM_CONTEXT_TOKENS = 6  # shown before new tokens to a decoder that depends on neighbours
_MAX_PENDING_TOKENS = 16  # after so many tokens an incomplete character is treated as invalid


def byte_alphabet() -> dict[int, str]:
    """Return GPT-2's printable character for each byte: printable Latin-1 stays, the rest moves to U+0100 and above."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(moved)}


# Printable character → the Latin-1 character of the byte's value. Latin-1 characters outside the alphabet are mapped
# out of Latin-1, so that encoding such a token fails instead of producing a wrong byte.
_STAND_INS = {code: "\ufffe" for code in range(256)} | {ord(char): chr(byte) for byte, char in byte_alphabet().items()}


def byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_STAND_INS).encode("latin-1")
    except UnicodeEncodeError:  # not in the byte alphabet: plain text
        return piece.encode("utf-8", "surrogatepass")


def sentencepiece_bytes(piece: str) -> bytes:
    if piece.startswith("<0x") and (byte := _BYTE_TOKEN.fullmatch(piece)):
        return bytes([int(byte.group(1), 16)])
    return piece.replace(SPACE_MARK, " ").encode("utf-8", "surrogatepass")


def wordpiece_bytes(piece: str) -> bytes:
    return (piece[2:] if piece.startswith("##") else " " + piece).encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Spelling:
    """The rule that converts a vocabulary's pieces to bytes.

    `drops_first_space`: decoding a whole text drops its first space, which the tokenizer added.
    """

    piece_bytes: Callable[[str], bytes]
    drops_first_space: bool = False


BYTE_LEVEL = Spelling(byte_level_bytes)
WORDPIECE = Spelling(wordpiece_bytes, drops_first_space=True)


def sentencepiece(drops_first_space: bool) -> Spelling:
    return Spelling(sentencepiece_bytes, drops_first_space)


def spelling_of_decoder(decoder: dict[str, Any] | None) -> Spelling | None:
    """Return the spelling that a tokenizer.json decoder describes; None where tokens have no bytes of their own."""
    steps = _flattened(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return BYTE_LEVEL
    if kinds == ["Metaspace"] and steps[0].get("replacement", SPACE_MARK) == SPACE_MARK:
        return sentencepiece(_metaspace_prepends(steps[0]))
    if kinds == ["WordPiece"] and steps[0].get("prefix") == "##" and not steps[0].get("cleanup"):
        return WORDPIECE
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _replaces_space_mark(steps[0]):
        return _sentencepiece_with_strip(steps[3:])
    return None


def _flattened(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _flattened(inner)]
    return [decoder]


def _metaspace_prepends(step: dict[str, Any]) -> bool:
    return bool(step.get("add_prefix_space", True)) and step.get("prepend_scheme", "always") != "never"


def _replaces_space_mark(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": SPACE_MARK} and step.get("content") == " "


def _sentencepiece_with_strip(rest: list[dict[str, Any]]) -> Spelling | None:
    if not rest:
        return sentencepiece(drops_first_space=False)
    strip_one = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return sentencepiece(drops_first_space=True) if rest == [strip_one] else None


_MIN_LONG_CHARS = 4096  # texts of at least so many characters are tokenised without holding the GIL


@dataclass(frozen=True)
class Traits:
    """What a tokenizer's files say beside the vocabulary itself."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # every id that ends a generation
    prefix_ids: tuple[int, ...] = ()  # `add_special_tokens` puts these around a text, beside what the backend adds
    suffix_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token" → "<s>": what templates read
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # name → source; the main one is "default"


class Tokenizer:
    def __init__(self, backend: tokenizers.Tokenizer, spelling: Spelling | None, traits: Traits) -> None:
        # A file may contain training-time limits; a server must never truncate or pad a text silently.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.spelling = spelling
        self.traits = traits
        added = backend.get_added_tokens_decoder()
        self._added_text = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self._bytes: dict[int, bytes] = {}
        self._literal: tokenizers.Tokenizer | None = None
        self._literal_lock = threading.Lock()

    # ── properties of the vocabulary ───────────────────────────────────────────────────────────────────

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self.traits.bos_token_id

    @property
    def eos_token_ids(self) -> list[int]:
        return list(self.traits.eos_token_ids)

    @property
    def special_tokens(self) -> dict[str, str]:
        return dict(self.traits.special_tokens)

    @property
    def chat_template(self) -> str | None:
        return self.traits.chat_templates.get("default")

    @property
    def chat_templates(self) -> dict[str, str]:
        return dict(self.traits.chat_templates)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens added to the base vocabulary, special or not: text → id."""
        return {text: token_id for token_id, text in self._added_text.items()}

    def with_chat_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another chat template."""
        return Tokenizer(self.backend, self.spelling, replace(self.traits, chat_templates={"default": source}))

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that the vocabulary stores as this string, such as `<|im_end|>`."""
        return self.backend.token_to_id(text)

    # ── text to ids ────────────────────────────────────────────────────────────────────────────────────

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Return the ids of a text. With `parse_special=False`, "<|im_end|>" in the text is read as plain characters,
        not as the control token."""
        backend, text = self._backend_for(parse_special), _without_surrogates(text)
        if len(text) < _MIN_LONG_CHARS:
            # `encode` would also track offsets, which takes a quarter of its time
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        else:
            ids = _encode_long(backend, text, add_special_tokens)
        return self._with_prefix_and_suffix(ids) if add_special_tokens else ids

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool) -> list[tuple[int, tuple[int, int]]]:
        """Return the ids of a text, each with its character range [first, last); the range of added special tokens is
        empty."""
        (encoding,) = self.backend.encode_batch([_without_surrogates(text)], add_special_tokens=add_special_tokens)
        found = list(zip(encoding.ids, encoding.offsets, strict=True))
        if not add_special_tokens:
            return found
        around = [[(token_id, (0, 0)) for token_id in ids] for ids in (self.traits.prefix_ids, self.traits.suffix_ids)]
        return [*around[0], *found, *around[1]]

    def _with_prefix_and_suffix(self, ids: list[int]) -> list[int]:
        prefix, suffix = self.traits.prefix_ids, self.traits.suffix_ids
        return [*prefix, *ids, *suffix] if prefix or suffix else ids

    def _backend_for(self, parse_special: bool) -> tokenizers.Tokenizer:
        return self.backend if parse_special or not self._special_ids else self._literal_backend()

    def _literal_backend(self) -> tokenizers.Tokenizer:
        # A second backend rather than a flag set on the first: several threads encode concurrently.
        with self._literal_lock:
            if self._literal is None:
                literal = tokenizers.Tokenizer.from_str(self.backend.to_str())
                literal.encode_special_tokens = True
                self._literal = literal
            return self._literal

    def read_literally(self) -> None:
        """From now on, read special tokens in every text as plain characters.

        This changes the main backend instead of making a second one, which takes seconds for a large vocabulary. Only
        for a tokenizer that nothing else uses.
        """
        with self._literal_lock:
            self.backend.encode_special_tokens = True
            self._literal = self.backend

    # ── ids to text ────────────────────────────────────────────────────────────────────────────────────

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes a token adds to a text; b"" for an id beyond the vocabulary (padded embeddings)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _compute_bytes(self, token_id: int) -> bytes:
        added = self._added_text.get(token_id)
        if added is not None:
            return added.encode()
        piece = self.backend.id_to_token(token_id) if 0 <= token_id < self._vocab_size else None
        if piece is None:
            return b""
        if self.spelling is None:
            return self.backend.decode([token_id], skip_special_tokens=False).encode()
        return self.spelling.piece_bytes(piece)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self.spelling is None:
            known = [token_id for token_id in ids if 0 <= token_id < self._vocab_size]
            return self.backend.decode(known, skip_special_tokens=skip_special_tokens)
        hidden = self._special_ids if skip_special_tokens else frozenset()
        joined = b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in hidden])
        text = joined.decode("utf-8", "replace")
        return text[1:] if self.spelling.drops_first_space and text.startswith(" ") else text


def _encode_long(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Encode without holding the GIL, so that other threads can run.

    `encode` holds the GIL throughout, `encode_batch` releases it. Reading the ids and freeing the encoding still need
    it, 20 ms each for half a million tokens.
    """
    encodings = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encodings[0].ids
    time.sleep(0)  # let a waiting thread take the GIL
    encodings.clear()
    return ids


def _without_surrogates(text: str) -> str:
    """Return the text with lone surrogates (halves of truncated escapes) replaced by U+FFFD, as UTF-8 decoders do."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


BOS_ID, EOS_ID = 256, 257


def byte_tokenizer(
    control_tokens: Sequence[str] = (), added_tokens: Sequence[str] = (), *, eos_token: str | None = None
) -> Tokenizer:
    """Make a tokenizer whose vocabulary is the 256 bytes, a BOS and an EOS token.

    `control_tokens` and `added_tokens` become single tokens as well; decoded text leaves out the former and contains
    the latter. `eos_token`: another token that ends an answer, besides "</s>".
    """
    vocab = {char: byte for byte, char in byte_alphabet().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    control = dict.fromkeys(("<s>", "</s>", *control_tokens, *((eos_token,) if eos_token else ())))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    backend.add_tokens([AddedToken(text, normalized=False) for text in added_tokens if text not in control])
    ends = [token_id for text in (eos_token, "</s>") if text and (token_id := backend.token_to_id(text)) is not None]
    traits = Traits(
        bos_token_id=BOS_ID,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        prefix_ids=(BOS_ID,),
        special_tokens={"bos_token": "<s>", "eos_token": eos_token or "</s>"},
    )
    return Tokenizer(backend, BYTE_LEVEL, traits)


# ── incremental detokenization ─────────────────────────────────────────────────────────────────────────


class IncrementalDetokenizer:
    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        if tokenizer.spelling is not None:
            text: _SpelledText | _WindowedText = _SpelledText(tokenizer, tokenizer.spelling, prompt_ids, hidden)
        else:
            text = _WindowedText(tokenizer, prompt_ids, hidden)
        self.push: Callable[[Iterable[int]], str] = text.push
        """Return the text that these ids complete; may be empty."""
        self.finish: Callable[[], str] = text.finish
        """End the text: return what was held back."""


class _SpelledText:
    """Decoding of tokens that have exact bytes: a UTF-8 decoder holds back an incomplete character."""

    def __init__(
        self, tokenizer: Tokenizer, spelling: Spelling, prompt_ids: Sequence[int], hidden: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._drop_space = spelling.drops_first_space and not prompt_ids
        self._incomplete = _incomplete_character(self._joined(prompt_ids[-_MAX_CHARACTER_BYTES:]))
        self._is_from_prompt = True  # all bytes of `_incomplete` are the prompt's

    def push(self, ids: Iterable[int]) -> str:
        if joined := self._joined(ids):
            self._is_from_prompt = False
        return self._decode(self._incomplete + joined)

    def finish(self) -> str:
        return "" if self._is_from_prompt else self._decode(self._incomplete, is_final=True)

    def _decode(self, pending: bytes, is_final: bool = False) -> str:
        text, num_read = codecs.utf_8_decode(pending, "replace", is_final)
        self._incomplete = pending[num_read:]
        return self._without_first_space(text) if self._drop_space else text

    def _joined(self, ids: Iterable[int]) -> bytes:
        return b"".join([self._tokenizer.token_bytes(token_id) for token_id in ids if token_id not in self._hidden])

    def _without_first_space(self, text: str) -> str:
        self._drop_space = not text
        return text.removeprefix(" ")


def _incomplete_character(tail: bytes) -> bytes:
    """Return the bytes at the end that begin a UTF-8 character without completing it."""
    for length in range(1, min(len(tail), _MAX_CHARACTER_BYTES - 1) + 1):
        lead = tail[-length]
        if lead >= 0xC0:
            needed = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return tail[-length:] if length < needed else b""
        if lead < 0x80:
            break
    return b""


class _WindowedText:
    """Decoding by a library decoder that depends on neighbours: a few tokens of context, with and without the new ones.

    ids:   ... [context | pending]     sent text ends with the context; pending ids wait for a complete character
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._context = self._visible(prompt_ids[-_NUM_CONTEXT_TOKENS:])
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in self._visible(ids)])

    def finish(self) -> str:
        return self._send() if self._pending else ""

    def _push_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        is_incomplete = text.endswith("\ufffd") and len(self._pending) < _MAX_PENDING_TOKENS
        return "" if is_incomplete else self._send()

    def _send(self) -> str:
        before = self._decode(self._context)
        after = self._decode(self._context + self._pending)
        self._context = (self._context + self._pending)[-_NUM_CONTEXT_TOKENS:]
        self._pending = []
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _visible(self, ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in ids if token_id not in self._hidden]
