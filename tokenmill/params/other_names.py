"""Other engines' names and value conventions of sampling parameters: accepted if they have an equivalent, otherwise
refused with the name to use instead."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.errors import InvalidRequest
from tokenmill.params.checks import refuse
from tokenmill.params.guided import Guided

OTHER_CONVENTIONS: dict[str, Any] = {  # parameter → conversion of other engines' values
    "top_k": lambda value: 0 if value == -1 else value,
    "stop": lambda value: [] if value is None else [value] if isinstance(value, str) else value,
    "stop_token_ids": lambda value: [] if value is None else value,
    "logits_processors": lambda value: [] if value is None else value,
}
SAME_MEANING = {"include_stop_str_in_output": "include_stop"}
GUIDED_NAMES = ("guided_decoding", "structured_outputs")
NO_EFFECT: dict[str, tuple[Any, ...]] = {  # parameters of other engines that are accepted with these default values
    "bad_words": (None, [], ()),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (False,),
}
INSTEAD = {
    "bad_words": "use banned_token_ids for single tokens, logits_processors for anything else",
    "detokenize": "answers always have token_ids and text",
    "do_sample": "temperature=0 is greedy",
    "early_stopping": "use beam=BeamParams(width, early_stopping=True)",
    "length_penalty": "use beam=BeamParams(width, length_penalty=1.0)",
    "max_new_tokens": "use max_tokens",
    "n_predict": "use max_tokens",
    "num_beams": "use beam=BeamParams(width)",
    "num_predict": "use max_tokens",
    "output_kind": "use LLM.stream for pieces as they are generated",
    "repeat_penalty": "use repetition_penalty",
    "spaces_between_special_tokens": "skip_special_tokens=False shows special tokens",
    "truncate_prompt_tokens": "shorten the prompt",
    "use_beam_search": "use beam=BeamParams(width)",
}


class ParamsMeta(msgspec.StructMeta):
    """Metaclass that creates params from keywords: accepts other engines' names, and suggests the right name for an
    unknown one.

    Messages from another process are decoded without this.
    """

    def make(cls, *args: Any, **keywords: Any) -> Any:  # noqa: N805  # self is a class here
        known = cls.__struct_fields__
        fields = {name: value for name, value in keywords.items() if name in known}
        for name in keywords.keys() - fields.keys():
            ours, value = _by_other_name(name, keywords[name], known)
            if ours in fields:
                refuse(name, f"means the same as {ours}; give only one of them")
            if ours is not None:
                fields[ours] = value
        for name, convert in OTHER_CONVENTIONS.items():
            if name in fields:
                fields[name] = convert(fields[name])
        return super().__call__(*args, **fields)

    if not TYPE_CHECKING:  # type checkers must see the fields as parameters
        __call__ = make


def _by_other_name(name: str, value: Any, known: tuple[str, ...]) -> tuple[str | None, Any]:
    """Return the parameter that corresponds to another engine's name, with its value; None if the value has no
    effect."""
    if name in SAME_MEANING:
        return SAME_MEANING[name], value
    if name in GUIDED_NAMES:
        return "guided", guided_from(name, value)
    if name in NO_EFFECT and any(value is none or value == none for none in NO_EFFECT[name]):
        return None, value
    near = difflib.get_close_matches(name, known, n=1)
    hint = INSTEAD.get(name) or (f"did you mean {near[0]}?" if near else None)
    raise InvalidRequest(f"there is no sampling parameter {name!r}", param=name, hint=hint)


GUIDED_MAKERS: dict[str, Any] = {
    "json": Guided.json,
    "regex": Guided.regex,
    "choice": Guided.choice,
    "grammar": Guided.grammar,
}


def guided_from(name: str, constraint: Any) -> Guided | None:
    """Convert vLLM's form of a constraint: a dict or an object with one of json, regex, choice, grammar and
    json_object."""
    if constraint is None or isinstance(constraint, Guided):
        return constraint
    kinds = (*GUIDED_MAKERS, "json_object")
    is_mapping = isinstance(constraint, Mapping)
    values = constraint if is_mapping else {kind: getattr(constraint, kind, None) for kind in kinds}
    used = {key: value for key, value in values.items() if value not in (None, False)}
    if len(used) != 1 or not used.keys() <= set(kinds):
        refuse(name, f"must have exactly one of {', '.join(GUIDED_MAKERS)} and json_object")
    ((kind, value),) = used.items()
    return Guided.json() if kind == "json_object" else GUIDED_MAKERS[kind](value)
