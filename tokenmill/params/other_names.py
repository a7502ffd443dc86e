"""Names and spellings of other engines for sampling parameters: taken where they mean the same, else refused with the
name to use here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.errors import InvalidRequest
from tokenmill.params.checks import refuse
from tokenmill.params.guided import Guided

OTHER_SPELLINGS: dict[str, Any] = {
    "top_k": lambda value: 0 if value == -1 else value,
    "stop": lambda value: [] if value is None else [value] if isinstance(value, str) else value,
    "stop_token_ids": lambda value: [] if value is None else value,
    "logits_processors": lambda value: [] if value is None else value,
}
SAME_MEANING = {"include_stop_str_in_output": "include_stop"}
GUIDED_NAMES = ("guided_decoding", "structured_outputs")
NO_EFFECT: dict[str, tuple[Any, ...]] = {  # values with which nothing is asked for
    "bad_words": (None, [], ()),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (False,),
}
INSTEAD = {
    "bad_words": "use banned_token_ids for single tokens, logits_processors for anything else",
    "detokenize": "answers have token_ids beside their text",
    "do_sample": "temperature=0 is greedy",
    "early_stopping": "use beam=BeamParams(width, early_stopping=True)",
    "length_penalty": "use beam=BeamParams(width, length_penalty=1.0)",
    "max_new_tokens": "use max_tokens",
    "n_predict": "use max_tokens",
    "num_beams": "use beam=BeamParams(width)",
    "num_predict": "use max_tokens",
    "output_kind": "LLM.stream gives pieces as they come",
    "repeat_penalty": "use repetition_penalty",
    "spaces_between_special_tokens": "skip_special_tokens=False shows special tokens",
    "truncate_prompt_tokens": "shorten the prompt",
    "use_beam_search": "use beam=BeamParams(width)",
}


class ParamsMeta(msgspec.StructMeta):
    """Makes params from keywords: other engines' spellings are taken, and a wrong name is answered with the right one.

    Messages from another process are decoded without this.
    """

    def make(cls, *args: Any, **given: Any) -> Any:  # noqa: N805  # self is a class here
        known = cls.__struct_fields__
        named = {name: value for name, value in given.items() if name in known}
        for name in given.keys() - named.keys():
            ours, value = _by_other_name(name, given[name], known)
            if ours in named:
                refuse(name, f"says the same as {ours}; give one of them")
            if ours is not None:
                named[ours] = value
        for name, respell in OTHER_SPELLINGS.items():
            if name in named:
                named[name] = respell(named[name])
        return super().__call__(*args, **named)

    if not TYPE_CHECKING:  # for which params are made from their fields
        __call__ = make


def _by_other_name(name: str, value: Any, known: tuple[str, ...]) -> tuple[str | None, Any]:
    """The parameter that another engine's name stands for, with its value; None: the value asks for nothing."""
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


def guided_from(name: str, given: Any) -> Guided | None:
    """A constraint in vLLM's form: a dict or an object with one of json, regex, choice, grammar and json_object."""
    if given is None or isinstance(given, Guided):
        return given
    kinds = (*GUIDED_MAKERS, "json_object")
    values = given if isinstance(given, Mapping) else {kind: getattr(given, kind, None) for kind in kinds}
    asked = {key: value for key, value in values.items() if value not in (None, False)}
    if len(asked) != 1 or not asked.keys() <= set(kinds):
        refuse(name, f"must hold exactly one of {', '.join(GUIDED_MAKERS)} and json_object")
    ((kind, value),) = asked.items()
    return Guided.json() if kind == "json_object" else GUIDED_MAKERS[kind](value)
