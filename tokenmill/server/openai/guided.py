"""What an answer must follow, as OpenAI's `response_format` and vLLM's `guided_...` fields say it.

`strict` makes no difference here: a schema is always followed to the letter, or refused. Whether a schema or a grammar
can be followed at all the engine finds out, before the first byte of the answer.
"""

from __future__ import annotations

from collections.abc import Callable

import orjson

from tokenmill.guided.grammar import is_gbnf
from tokenmill.params import MAX_GUIDED_CHOICES, Guided
from tokenmill.server.fields import BodyFields, refuse, shown


def parse_guided(fields: BodyFields) -> Guided | None:
    given = {key: guided for key, read in READERS.items() if (guided := read(fields, key)) is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        refuse(second, f"does not combine with {first}: an answer follows one of them")
    return next(iter(given.values()), None)


def _response_format(fields: BodyFields, key: str) -> Guided | None:
    wanted = fields.object(key)
    if wanted is None:
        return None
    kind = wanted.required_text("type")
    if kind == "json_schema":
        return _named_schema(wanted)
    if kind not in ("text", "json_object"):
        refuse(f"{key}.type", f"must be text, json_object or json_schema, got {shown(kind)}")
    return Guided("json_object") if kind == "json_object" else None


def _named_schema(wanted: BodyFields) -> Guided:
    named = wanted.object("json_schema")
    if named is None:
        refuse(wanted.name("json_schema"), "is required")
    named.text("name")
    named.text("description")
    named.boolean("strict")
    schema = named.object("schema")
    if schema is None:
        refuse(named.name("schema"), "is required")
    return Guided.schema(schema.values)


def _json(fields: BodyFields, key: str) -> Guided | None:
    """A schema as an object, or as the text of one."""
    if not isinstance(fields.get(key), str):
        schema = fields.object(key)
        return None if schema is None else Guided.schema(schema.values)
    text = _text(fields, key)
    try:
        orjson.loads(text or "")
    except orjson.JSONDecodeError as error:
        refuse(fields.name(key), f"is not valid JSON: {error}")
    return Guided("json_schema", text or "")


def _regex(fields: BodyFields, key: str) -> Guided | None:
    text = _text(fields, key)
    return None if text is None else Guided("regex", text)


def _choice(fields: BodyFields, key: str) -> Guided | None:
    texts = fields.items(key, MAX_GUIDED_CHOICES)
    if texts is None:
        return None
    if not texts or not all(isinstance(text, str) and text for text in texts):
        refuse(fields.name(key), "must be a list of strings, none of them empty")
    return Guided.choice(texts)


def _grammar(fields: BodyFields, key: str) -> Guided | None:
    text = _text(fields, key)
    return None if text is None else Guided("gbnf" if is_gbnf(text) else "lark", text)


def _structured_outputs(fields: BodyFields, key: str) -> Guided | None:
    """vLLM's newer field: one object with exactly one constraint."""
    wanted = fields.object(key)
    if wanted is None:
        return None
    unknown = [name for name, value in wanted.values.items() if name not in STRUCTURED and value not in (None, False)]
    if unknown:
        refuse(wanted.name(unknown[0]), f"is not supported; {key} takes one of {', '.join(STRUCTURED)}")
    given = [guided for name, read in STRUCTURED.items() if (guided := read(wanted, name)) is not None]
    if len(given) != 1:
        refuse(key, f"must hold exactly one of {', '.join(STRUCTURED)}")
    return given[0]


def _any_object(fields: BodyFields, key: str) -> Guided | None:
    return Guided("json_object") if fields.boolean(key) else None


def _text(fields: BodyFields, key: str) -> str | None:
    text = fields.text(key)
    if text == "":
        refuse(fields.name(key), "must not be empty")
    return text


STRUCTURED: dict[str, Callable[[BodyFields, str], Guided | None]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _any_object,
}
READERS: dict[str, Callable[[BodyFields, str], Guided | None]] = {
    "response_format": _response_format,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "structured_outputs": _structured_outputs,
}
