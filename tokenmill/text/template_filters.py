"""Jinja's filters that can make much out of little, each behind its check, and `tojson` as chat templates know it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.filters import FILTERS

from tokenmill.text import template_bounds as bounds


def _center(value: str, width: int = 80) -> Any:
    bounds.require_width(width)
    return FILTERS["center"](value, width)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    pad = width if isinstance(width, int) else len(width)
    bounds.require_width(pad)
    bounds.require_chars(len(s) + (s.count("\n") + 1) * pad)
    return FILTERS["indent"](s, width, first, blank)


def _batch(value: Any, linecount: int, fill_with: Any = None) -> Any:
    bounds.require_items(linecount)
    return FILTERS["batch"](value, linecount, fill_with)


def _slice(value: Any, slices: int, fill_with: Any = None) -> Any:
    bounds.require_items(slices)
    return FILTERS["slice"](value, slices, fill_with)


def _format(value: str, *args: Any, **kwargs: Any) -> Any:
    bounds.check_format(str(value), [*args, *kwargs.values()])
    return FILTERS["format"](value, *args, **kwargs)


def _string(value: Any) -> Any:
    bounds.size_of(value)
    return FILTERS["string"](value)


@jinja2.pass_eval_context
def _replace(context: nodes.EvalContext, s: str, old: str, new: str, count: int | None = None) -> Any:
    bounds.check_replace(str(s), str(old), str(new))
    return FILTERS["replace"](context, s, old, new, count)


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
    return FILTERS["join"](context, bounds.joinable(value, str(d)), d, attribute)


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise bounds.OutOfBounds("it sums things that are not numbers")
    return FILTERS["sum"](environment, iterable, attribute, start)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    bounds.size_of(value)
    if indent and (indent if isinstance(indent, int) else len(indent)) > 16:
        raise bounds.OutOfBounds("it indents JSON by more than 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


BOUNDED_FILTERS: dict[str, Callable[..., Any]] = {
    "center": _center,
    "indent": _indent,
    "batch": _batch,
    "slice": _slice,
    "format": _format,
    "string": _string,
    "replace": _replace,
    "join": _join,
    "sum": _sum,
    "tojson": _tojson,
}
