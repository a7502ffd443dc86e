"""Building blocks of Lark grammars for llguidance: named rules, fixed texts with control tokens, regexes, JSON schemas.

A control token is written as its id (`<[151657]>`), because no text matches it. Rules with the same right-hand side
share one name, so that shared parts are compiled once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from tokenmill.errors import InvalidRequest

ANY_TEXT = "/(?s:.*)/"
LAYOUT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
_REGEX_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
_MAX_BITS = 64
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)
_SCHEMAS_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_WHITE = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def refuse(problem: str) -> NoReturn:
    """Refuse a tool definition that can't be enforced in the model's format."""
    raise InvalidRequest(problem, param="tools")


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def regex_of(text: str) -> str:
    """Return a regex, without its slashes, that matches exactly this text."""
    escaped = _REGEX_SPECIAL.sub(lambda found: "\\" + found.group(), text)
    return "".join(_WHITE.get(char, char) for char in escaped)


def slashed(regex: str) -> str:
    """Return a regex with its slashes escaped, to be put between slashes."""
    return re.sub(r"\\.|/", lambda found: r"\/" if found.group() == "/" else found.group(), regex, flags=re.DOTALL)


def without(texts: Iterable[str]) -> str:
    """Return a terminal for any text that contains none of these regexes."""
    inner = "|".join(texts)
    return f"{ANY_TEXT} & ~/(?s:.*)({inner})(?s:.*)/" if inner else ANY_TEXT


def json_value(schema: Any, root: Any = None) -> str:
    """Return the right-hand side for a JSON value of a schema; `root` has the definitions that it refers to."""
    written: dict[str, Any] = {"not": {}} if schema is False else {}
    if isinstance(schema, Mapping):
        written = without_annotations(schema)
    if isinstance(root, Mapping) and "$ref" in str(written):
        written |= without_annotations({key: root[key] for key in ("$defs", "definitions") if key in root})
    root_layout = root.get("x-guidance") if isinstance(root, Mapping) else None
    written["x-guidance"] = written.get("x-guidance") or root_layout or LAYOUT
    return f"%json {json.dumps(written, ensure_ascii=False)}"


Member = Callable[[str], str]  # the text before a member → its right-hand side


def without_annotations(schema: Any) -> Any:
    """Return a schema without descriptions and other annotations, which would make a grammar many times as long."""
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            kept[key] = {name: without_annotations(one) for name, one in value.items()}
        elif isinstance(value, list) and key not in ("enum", "required", "type"):
            kept[key] = [without_annotations(one) for one in value]
        elif key not in ANNOTATIONS:
            kept[key] = value if key in ("const", "x-guidance") else without_annotations(value)
    return kept


class LarkRules:
    """Collects the rules of a grammar. `control`: texts of control tokens and their ids."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        texts = sorted(control, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else None
        self._names: dict[str, str] = {}
        self._lines: list[str] = []

    def fixed(self, text: str) -> str:
        """Return the right-hand side of a fixed text; empty for an empty one."""
        return " ".join(
            f"<[{self._control[part]}]>" if part in self._control else quoted(part) for part in self.split(text)
        )

    def split(self, text: str) -> list[str]:
        """Split a text into control tokens and the texts between them."""
        return [part for part in (self._split.split(text) if self._split else [text]) if part]

    def is_control(self, part: str) -> bool:
        return part in self._control

    def add(self, prefix: str, body: str, option: str = "") -> str:
        """Return the name of a rule with this right-hand side; a prefix in capitals makes it a terminal."""
        key = f"{prefix}{option}: {body}"
        if key not in self._names:
            self._names[key] = name = f"{prefix}{len(self._names)}"
            self._lines.append(f"{name}{option}: {body}")
        return self._names[key]

    def reserve(self, prefix: str) -> str:
        """Return a name for a recursive rule, which is defined later."""
        name = f"{prefix}{len(self._names)}"
        self._names[f"{name} reserved"] = name
        return name

    def define(self, name: str, body: str) -> None:
        self._lines.append(f"{name}: {body}")

    def until(self, body: str, closer: str) -> str:
        """Return the right-hand side for text that matches the terminal `body` up to the first closer, and the
        closer."""
        parts = self.split(closer)
        before = "" if self.is_control(parts[0]) else parts[0]
        if len(parts) == 1 and before:
            if body != ANY_TEXT:  # a body that may not end yet must not continue past a closer
                body = f"{body} & ~/(?s:.*){regex_of(before)}(?s:.*)/"
            return self.add("until", f"{self.add('BODY', body)} {quoted(before)}", "[lazy]")
        text = self.add("BODY", body)
        if before:
            text = self.add("ENDED", f"{text} {quoted(before)}")
        return f"{text} {self.fixed(closer[len(before) :])}"

    def members(self, members: Sequence[Member], num_required: int, separator: str, extra: Member | None) -> str:
        """Return the right-hand side of members in any order, each at most once, the first `num_required` always.

        A member is a function of the separator text before it, which becomes part of the member's own text: two
        alternatives of which one text is a prefix of the other can't follow the same position. One bit of the rule's
        parameter records for each member that it was written. `extra`: a member that may occur any number of times.
        More than 64 members are allowed in the given order only.
        """
        if not members:
            some = f"({self.add('member', extra(''))} {self.add('member', extra(separator))}*)?" if extra else ""
            return some or '""'
        if len(members) > _MAX_BITS:
            return self._ordered(members, num_required, separator)
        first, rest = self.reserve("members"), self.reserve("members")
        end = f'"" %if is_ones([0:{num_required}])' if num_required else '""'
        for name, before in ((first, ""), (rest, separator)):
            options = [end]
            for bit, member in enumerate(members):
                options.append(f"{self.add('member', member(before))} {rest}::set_bit({bit}) %if bit_clear({bit})")
            if extra is not None:
                options.append(f"{self.add('member', extra(before))} {rest}::_")
            self._lines.append(f"{name}::_ : " + "\n  | ".join(options))
        return f"{first}::0x0"

    def _ordered(self, members: Sequence[Member], num_required: int, separator: str) -> str:
        """Return members in the given order: the required ones, then any of the others."""
        firsts = [self.add("member", member("")) for member in members]
        rest = [self.add("member", member(separator)) for member in members]
        optional = [f"{name}?" for name in rest[num_required:]]
        if num_required:
            return " ".join([firsts[0], *rest[1:num_required], *optional])
        options = [" ".join([first, *optional[index + 1 :]]) for index, first in enumerate(firsts)]
        return "(" + " | ".join(self.add("ordered", option) for option in options) + ")?"

    def text(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines]) + "\n"
