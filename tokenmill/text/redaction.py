"""Redaction of personal data and secrets: each value is replaced by its kind, `Write to <EMAIL_1> or <PHONE_1>`.

The same value gets the same number within one redactor, so that a conversation stays readable. Values with a checksum
are verified (cards by Luhn, IBANs by their remainder of 97), so that other numbers stay. Names and street addresses are
not found: redaction reduces what a log can reveal, but does not make it safe to publish.

Patterns begin only at the beginning of a word and do not backtrack, so time is linear in the length of the text.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

Check = Callable[[str], bool]


def _is_card(text: str) -> bool:
    digits = [int(sign) for sign in text if sign.isdigit()]
    if not 12 <= len(digits) <= 19:
        return False
    doubled = [digit if place % 2 == 0 else sum(divmod(2 * digit, 10)) for place, digit in enumerate(digits[::-1])]
    return sum(doubled) % 10 == 0 and len(set(digits)) > 1


def _is_iban(text: str) -> bool:
    plain = re.sub(r"[\s-]", "", text).upper()
    if not 15 <= len(plain) <= 34:
        return False
    return int("".join(str(int(sign, 36)) for sign in plain[4:] + plain[:4])) % 97 == 1


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_phone(text: str) -> bool:
    num_digits = sum(sign.isdigit() for sign in text)
    return 7 <= num_digits <= 15 and (text.startswith(("+", "(", "00")) or bool(re.search(r"\d[\s./-]\d", text)))


def _always(text: str) -> bool:
    return True


PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^-]{0,16384}+-----END [A-Z ]{0,30}-----")
# The first kind that matches a piece of text replaces it: longer and stricter ones come first.
KINDS: tuple[tuple[str, re.Pattern[str], Check], ...] = (
    ("TOKEN", re.compile(r"(?<![\w-])eyJ[\w-]{8,}+\.[\w-]{8,}+\.[\w-]{8,}+"), _always),
    (
        "KEY",
        re.compile(
            r"(?<![\w-])(?:sk-[\w-]{16,}+|tm-[\w-]{32,}+|gh[pousr]_\w{20,}+|xox[abprs]-[\w-]{10,}+"
            r"|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{35}|hf_\w{20,}+|glpat-[\w-]{20,}+)"
        ),
        _always,
    ),
    ("EMAIL", re.compile(r"(?<![\w.+'-])[\w.+'-]++@(?:[\w-]{1,63}\.){1,8}[A-Za-z]{2,24}"), _always),
    ("IBAN", re.compile(r"\b[A-Za-z]{2}\d{2}(?:[ -]?[A-Za-z0-9]{4}){2,7}(?:[ -]?[A-Za-z0-9]{1,3})?\b"), _is_iban),
    (
        "CARD",
        re.compile(
            r"\b(?:\d{12,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{1,7}|\d{4}([ -])\d{6}\2\d{5})\b"
        ),  # solid, or in groups
        _is_card,
    ),
    ("IP", re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"), _is_address),
    ("IP", re.compile(r"(?<![\w:])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])"), _is_address),
    ("PHONE", re.compile(r"(?<![\w.])(?:\+|00)?\(?\d{1,5}\)?(?:[ ./-]{1,2}\(?\d{1,8}\)?){1,6}(?!\w)"), _is_phone),
    ("PHONE", re.compile(r"(?<![\w.+])(?:\+|00)\d{7,15}(?!\w)"), _is_phone),
)
PIECE = 32 << 10  # characters that a pattern is matched on at a time: other threads wait meanwhile


class Redactor:
    """Replaces personal data in the texts of one request."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}

    def redact(self, text: str) -> str:
        text = PRIVATE_KEY.sub(lambda found: self._replacement(found, "PRIVATE_KEY", _always), text)
        return "".join(self._redact_piece(piece) for piece in pieces(text))

    def _redact_piece(self, text: str) -> str:
        for kind, pattern, check in KINDS:
            text = pattern.sub(partial(self._replacement, kind=kind, check=check), text)
        return text

    def redact_all(self, value: Any) -> Any:
        """Return a JSON value with all of its strings redacted; object keys stay."""
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, list):
            return [self.redact_all(one) for one in value]
        return {name: self.redact_all(one) for name, one in value.items()} if isinstance(value, dict) else value

    def _replacement(self, found: re.Match[str], kind: str, check: Check) -> str:
        value = found[0]
        if not check(value):
            return value
        known = self._numbers.setdefault((kind, value), 1 + sum(one == kind for one, _ in self._numbers))
        return f"<{kind}_{known}>"


def pieces(text: str) -> Iterator[str]:
    """Split a text into pieces that end at a line break, or else at a space."""
    start = 0
    while len(text) - start > PIECE:
        cut = text.rfind("\n", start, start + PIECE)
        cut = text.rfind(" ", start, start + PIECE) if cut < 0 else cut
        end = start + PIECE if cut < 0 else cut + 1
        yield text[start:end]
        start = end
    yield text[start:]
