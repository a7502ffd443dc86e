"""Rewriting of a Lark grammar so that it describes the same texts inside a JSON string.

A model that writes tool calls as JSON writes the input of a custom tool as {"input": "…"}, where quotes, backslashes
and line breaks are escaped. So every character is rewritten, while the structure stays the same:

    "a\\n"          "a\\\\n"                                            the escape instead of the character
    /[^x]+/        (/[[^x]&&[^"\\\\\\x00-\\x1f]]/ | "\\\\n" | …)+           a class, and escapes of its other characters
    LF: /\\n/       t_lf: "\\\\n"                                       a terminal becomes a rule
    %import        the definition of the terminal that it names

Terminals become rules of single characters because an escape has two: the grammar engine's lexer looks only one
character ahead, so after a backslash it could not decide which of two terminals continues.
"""

from __future__ import annotations

import json
import re

from tokenmill.errors import InvalidRequest

ESCAPED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
MAX_CHARACTERS = 20_000
_DECIMAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_FLOAT = rf"(?:[0-9]+[eE][+-]?[0-9]+|{_DECIMAL}(?:[eE][+-]?[0-9]+)?)"
COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": _DECIMAL,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"(?:{_FLOAT}|[0-9]+)",
    "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|[0-9]+)",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
}
"""The terminals of Lark's module `common`, which grammars can import."""
_IMPORT = re.compile(r"%import\s+common(?:\.(\w+)(?:\s*->\s*(\w+))?|\s*\(([^)]*)\))")
_PLAIN = r'[^"\\\x00-\x1f]'  # characters that JSON strings contain unescaped
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*)
      | (?P<range>"(?:\\.|[^"\\\n])"\s*\.\.\s*"(?:\\.|[^"\\\n])")
      | (?P<string>"(?:\\.|[^"\\\n])*"i?)
      | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)
      | (?P<directive>%\w+|@\w*|\[[^\]]*\]\s*:)
      | (?P<alias>->\s*\w+)
      | (?P<terminal>\b_?[A-Z][A-Z0-9_]*\b(?:\.-?\d+)?)""",
    re.VERBOSE,
)
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})\??")
_GROUP = re.compile(r"\((?:\?(?:[a-z]*:|P?<\w+>))?")
_ATOM = re.compile(r"\\(?:x\{[0-9A-Fa-f]+\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[pP]\{[^}]*\}|.)|.", re.DOTALL)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "0": "\0", "a": "\a", "v": "\v"}


def json_escaped_lark(grammar: str) -> str:
    """Return a grammar of the same texts with JSON escapes; raise InvalidRequest if it can't be rewritten."""
    if len(grammar) > MAX_CHARACTERS:
        raise _unfit(f"more than {MAX_CHARACTERS} characters")
    return _TOKEN.sub(_rewrite, _IMPORT.sub(_definitions, grammar))


def _definitions(found: re.Match[str]) -> str:
    """Return the definitions of imported terminals: `%import common.LF -> NL`, `%import common (LF, INT)`."""
    one, alias, several = found.groups()
    names = [(one, alias or one)] if one else [(name, name) for name in re.findall(r"\w+", several)]
    unknown = [name for name, _ in names if name not in COMMON]
    if unknown:
        raise _unfit(f"%import common.{unknown[0]}")
    return "\n".join(f"{alias}: /{COMMON[name]}/" for name, alias in names)


def _rewrite(found: re.Match[str]) -> str:
    text = found.group()
    match found.lastgroup:
        case "string":
            return text if text.endswith("i") and not set(text[1:-2]) & set(ESCAPED) else _string(text)
        case "range":
            first, last = re.findall(r'"((?:\\.|[^"\\]))"', text)
            return _character(f"[{first}-{last}]", dot_matches_newline=False)
        case "regex":
            return "(" + RegexRules(text[1 : text.rindex("/")], text[text.rindex("/") + 1 :]).expression() + ")"
        case "terminal":
            return "t_" + text.partition(".")[0].lower()
        case "directive":
            raise _unfit(text)
        case "alias":
            return ""
        case _:
            return text


def _string(text: str) -> str:
    try:
        value = str(json.loads(text))
    except ValueError:
        raise _unfit(f"the string {text}") from None
    return _literal(value)


def _literal(value: str) -> str:
    return json.dumps("".join(ESCAPED.get(char, char) for char in value), ensure_ascii=False)


class RegexRules:
    """Translation of a regular expression to a Lark expression over characters with JSON escapes."""

    def __init__(self, pattern: str, flags: str) -> None:
        self._pattern = pattern
        self._position = 0
        self._dot_matches_newline = "s" in flags
        if set(flags) - {"s"}:
            raise _unfit(f"the flag {flags}")

    def expression(self) -> str:
        text = self._alternatives()
        if self._position < len(self._pattern):
            raise _unfit(f"the regex {self._pattern}")
        return text

    def _alternatives(self) -> str:
        parts = [self._sequence()]
        while self._pattern.startswith("|", self._position):
            self._position += 1
            parts.append(self._sequence())
        return " | ".join(parts)

    def _sequence(self) -> str:
        parts: list[str] = []
        while self._position < len(self._pattern) and self._pattern[self._position] not in "|)":
            part = self._atom()
            quantifier = _QUANTIFIER.match(self._pattern, self._position)
            if quantifier:
                self._position = quantifier.end()
                part = f"({part}){quantifier.group().rstrip('?') or '?'}"
            parts.append(part)
        return " ".join(parts) or '""'

    def _atom(self) -> str:
        group = _GROUP.match(self._pattern, self._position)
        if group:
            return self._group(group)
        if self._pattern[self._position] in "^$":  # a terminal always matches its whole text
            self._position += 1
            return '""'
        if self._pattern[self._position] == "[":
            text = _class(self._pattern, self._position)
        else:
            text = _ATOM.match(self._pattern, self._position).group()  # type: ignore[union-attr]  # any character
        self._position += len(text)
        return _character(text, dot_matches_newline=self._dot_matches_newline)

    def _group(self, opening: re.Match[str]) -> str:
        if self._pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), self._position):
            raise _unfit("a lookaround")
        flags = re.match(r"\(\?([a-z]*):", opening.group())
        before = self._dot_matches_newline
        if flags:
            self._dot_matches_newline = before or "s" in flags.group(1)
            if set(flags.group(1)) - {"s"}:
                raise _unfit(f"the flag {flags.group(1)}")
        self._position = opening.end()
        inner = self._alternatives()
        if not self._pattern.startswith(")", self._position):
            raise _unfit(f"the regex {self._pattern}")
        self._position += 1
        self._dot_matches_newline = before
        return f"({inner})"


def _class(pattern: str, start: int) -> str:
    """Return the character class that begins at `start`, with its brackets; classes may be nested."""
    depth, position = 0, start
    while position < len(pattern):
        char = pattern[position]
        if char == "[":
            depth += 1
            position += 1 + (pattern[position + 1 : position + 2] == "^")
            position += pattern[position : position + 1] == "]"  # a bracket in the first position is a literal
            continue
        position += 2 if char == "\\" else 1
        if char == "]":
            depth -= 1
            if depth == 0:
                return pattern[start:position]
    raise _unfit(f"the class {pattern[start:]}")


def _character(atom: str, *, dot_matches_newline: bool) -> str:
    """Return the expression for one character of a regex: a literal, or a class plus the JSON escapes of its characters
    that need escaping."""
    if re.fullmatch(r"\\[bBAzZG]", atom):
        raise _unfit(f"the boundary {atom}")
    if len(atom) == 1 and atom != ".":
        return _literal(atom)
    if re.fullmatch(r"\\[^\w\s]", atom):
        return _literal(atom[1])
    if len(atom) == 2 and atom[1] in _CONTROLS:
        return _literal(_CONTROLS[atom[1]])
    if atom == ".":
        atom = r"[\s\S]" if dot_matches_newline else r"[^\n]"
    try:
        escapes = [json.dumps(escape) for char, escape in ESCAPED.items() if re.fullmatch(atom, char)]
    except re.error:
        raise _unfit(f"the class {atom}") from None
    inner = atom if atom.startswith("[") else f"[{atom}]"
    return f"({' | '.join([f'/[{inner}&&{_PLAIN}]/', *escapes])})"


def _unfit(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model writes tool calls as JSON, and a Lark grammar with {what[:80]} can't be enforced in that",
        param="tools",
    )
