"""Translation of every kind of constraint into the grammar engine's format.

JSON is written on one line as by Python's `json.dumps`: ", " and ": " as separators, no other white space. So the text
between values is forced and need not be sampled, and an answer can't use up its length with white space.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NoReturn

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from tokenmill.errors import InvalidRequest
from tokenmill.guided import schema as json_schema
from tokenmill.guided.matcher import first_line
from tokenmill.guided.schema import MAX_EXPANDED, expanded_size
from tokenmill.params import MAX_GUIDED_CHOICES, Guided

LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
STRICT: Any = {"lenient": False, "coerce_one_of": False}
ANY_OBJECT = {"type": "object"}
MAX_NESTING = 100
_REGEX_TERMINAL = re.compile(r"/((?:\\.|[^/\\\n])+)/")


def grammar_text(guided: Guided) -> str:
    """Return a constraint as a grammar for `LLMatcher`; raise InvalidRequest for errors found before compiling."""
    match guided.kind:
        case "json_schema":
            return _schema_grammar(read_schema(guided.text))
        case "json_object":
            return _schema_grammar(ANY_OBJECT)
        case "regex":
            _require_small_regex(guided.text)
            return str(LLMatcher.grammar_from_regex(guided.text))
        case "choice":
            return str(LLMatcher.grammar_from_lark(_choice_lark(guided.text)))
        case "lark":
            return _lark_grammar(guided.text)
        case "gbnf":
            return _lark_grammar(_lark_of_gbnf(guided.text))


def lark_rule(guided: Guided) -> str:
    """Return a constraint as the right-hand side of a Lark rule, for use in a larger grammar."""
    match guided.kind:
        case "json_schema" | "json_object":
            schema = read_schema(guided.text) if guided.kind == "json_schema" else ANY_OBJECT
            json_schema.check(schema)
            return "%json " + msgspec.json.encode({"x-guidance": {**LAYOUT, **STRICT}, **schema}).decode()
        case "regex":
            _require_small_regex(guided.text)
            return f"%lark {{\nstart: TEXT\nTEXT: /{_with_escaped_slashes(guided.text)}/\n}}"
        case "choice":
            return f"%lark {{\n{_choice_lark(guided.text)}\n}}"
        case "lark":
            return f"%lark {{\n{guided.text}\n}}"
        case "gbnf":
            return f"%lark {{\n{_lark_of_gbnf(guided.text)}\n}}"


def _with_escaped_slashes(regex: str) -> str:
    return re.sub(r"\\.|/", lambda found: "\\/" if found.group() == "/" else found.group(), regex, flags=re.DOTALL)


def schema_problem(schema: dict[str, Any]) -> str | None:
    """Return the reason why a JSON schema can't be enforced; None if it can."""
    try:
        return _schema_problem(msgspec.json.encode(schema).decode())
    except (TypeError, ValueError, RecursionError) as error:
        return f"it is not valid JSON: {error}"


@lru_cache(maxsize=1024)
def _schema_problem(text: str) -> str | None:
    try:
        grammar = _schema_grammar(read_schema(text))
        if message := LLMatcher.validate_grammar(grammar):
            json_schema.explain(read_schema(text), message)
    except InvalidRequest as problem:
        return problem.message.removeprefix("the schema can't be enforced: ")
    return None


def explain(guided: Guided, message: str) -> NoReturn:
    """Raise InvalidRequest for an error of the grammar engine; for a schema, with its keyword and path."""
    if guided.kind == "json_schema":
        json_schema.explain(read_schema(guided.text), message)
    _refuse(guided.kind, _regex_error(message) if guided.kind == "regex" else first_line(message))


def read_schema(text: str) -> dict[str, Any]:
    """Parse a JSON schema; raise InvalidRequest if it is not one."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the schema is not valid JSON: {error}", param="guided") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest("the schema must be an object (or true), at #", param="guided")
    return schema


def _refuse(kind: str, problem: str) -> NoReturn:
    raise InvalidRequest(f"the {kind} can't be enforced: {problem}", param="guided")


# ── JSON ───────────────────────────────────────────────────────────────────────────────────────────────


def _schema_grammar(schema: dict[str, Any]) -> str:
    json_schema.check(schema)
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, defaults=LAYOUT, overrides=STRICT))
    except (ValueError, RecursionError) as error:
        json_schema.refuse(first_line(str(error)), "#")


# ── regex and choice ───────────────────────────────────────────────────────────────────────────────────


def _require_small_regex(regex: str) -> None:
    if expanded_size(regex) > MAX_EXPANDED:
        _refuse("regex", f"it has more than {MAX_EXPANDED} characters with its repeats expanded")


def _regex_error(message: str) -> str:
    """Return the line of a message that states the error, without excerpts of the regex."""
    lines = [line.strip() for line in message.splitlines()]
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), first_line(message))


def _choice_lark(text: str) -> str:
    """Return a grammar with all texts in one terminal, so that thousands of texts are as fast as one rule."""
    try:
        texts = msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the choice is not a list of strings: {error}", param="guided") from None
    if not texts or "" in texts or len(texts) > MAX_GUIDED_CHOICES:
        _refuse("choice", f"it must have 1 to {MAX_GUIDED_CHOICES} texts, none of them empty")
    quoted = " | ".join(msgspec.json.encode(one).decode() for one in dict.fromkeys(texts))
    return f"start: CHOICE\nCHOICE: {quoted}"


# ── grammars ───────────────────────────────────────────────────────────────────────────────────────────


def _lark_grammar(text: str) -> str:
    for regex in _REGEX_TERMINAL.findall(text):
        _require_small_regex(regex)
    return str(LLMatcher.grammar_from_lark(text))


def _lark_of_gbnf(text: str) -> str:
    if _nesting(text) > MAX_NESTING:
        _refuse("gbnf", f"parentheses are nested deeper than {MAX_NESTING}")
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the translator raises bare Exception
        raise InvalidRequest(f"the gbnf can't be enforced: {first_line(str(error))}", param="guided") from None


def _nesting(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        deepest = max(deepest, depth)
    return deepest
