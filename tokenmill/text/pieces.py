"""What a token spells: from the string a vocabulary stores to the exact bytes the token adds to a text.

Vocabularies store bytes in disguise, each family in its own way:

    byte-level BPE   "Ġcafé" is written with 256 printable stand-ins, one per byte  → b" caf\\xc3\\xa9"
    SentencePiece    "▁caf" marks a space with U+2581, "<0xC3>" is one raw byte      → b" caf", b"\\xc3"
    WordPiece        "cafe" opens a word, "##s" goes on with it                      → b" cafe", b"s"

A `Spelling` names the family, and whether a text begins with a space that nobody wrote (`drops_first_space`).
Special and added tokens spell their own text; the tokenizer knows which those are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[int, str]:
    """The printable stand-in of each byte, as GPT-2 chose them: printable Latin-1 stays, the rest moves to U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(moved)}


# From stand-in to a Latin-1 character of the byte's value. Latin-1 characters that stand for nothing are
# mapped out of Latin-1, so that encoding such a token fails instead of passing for a byte.
_STAND_INS = {code: "\ufffe" for code in range(256)} | {ord(char): chr(byte) for byte, char in byte_alphabet().items()}


def byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_STAND_INS).encode("latin-1")
    except UnicodeEncodeError:  # not written in the alphabet at all: it is plain text
        return piece.encode("utf-8", "surrogatepass")


def sentencepiece_bytes(piece: str) -> bytes:
    if piece.startswith("<0x") and (byte := _BYTE_TOKEN.fullmatch(piece)):
        return bytes([int(byte.group(1), 16)])
    return piece.replace(SPACE_MARK, " ").encode("utf-8", "surrogatepass")


def wordpiece_bytes(piece: str) -> bytes:
    return (piece[2:] if piece.startswith("##") else " " + piece).encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Spelling:
    """How pieces become bytes. `drops_first_space`: the first space of a whole text is not part of it."""

    piece_bytes: Callable[[str], bytes]
    drops_first_space: bool = False


BYTE_LEVEL = Spelling(byte_level_bytes)
WORDPIECE = Spelling(wordpiece_bytes, drops_first_space=True)


def sentencepiece(drops_first_space: bool) -> Spelling:
    return Spelling(sentencepiece_bytes, drops_first_space)


def spelling_of_decoder(decoder: dict[str, Any] | None) -> Spelling | None:
    """The spelling that a tokenizer.json decoder describes; None where it is not a matter of bytes per token."""
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
