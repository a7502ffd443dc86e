"""The Jinja environment that chat templates are written for, as transformers sets it up, inside our bounds.

Blocks are trimmed, loops have `break` and `continue`, `tojson` writes plain JSON, `raise_exception` and
`strftime_now` exist, and `{% generation %}` (a mark for training) is read and does nothing. `template_bounds`
explains the bounds; here they are tied into Jinja: its operators, calls, filters, and, by a rewrite of the
parsed template, its loops.

Filters that could make much of little (`indent`, `center`, `replace`, `join`, `tojson` …) are replaced by ones that
check first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

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


class Refusal(jinja2.TemplateError):
    """The template itself refused the conversation, by `raise_exception`."""


class ChatSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationMark, "jinja2.ext.loopcontrols"],
            finalize=bounds.written,
        )
        self.tick = bounds.tick
        self.concat_bounded = _concatenated
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        del self.globals["lipsum"]
        self.filters |= BOUNDED_FILTERS

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        watched: nodes.Template = _Watch().visit(tree)
        return watched

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        bounds.check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  Jinja's
        bounds.tick()
        bounds.check_method(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class GenerationMark(Extension):
    """`{% generation %} ... {% endgeneration %}`: a scope of its own that writes what is inside."""

    tags = {"generation"}  # noqa: RUF012  Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(lineno)

    def _inside(self, caller: Macro) -> str:
        return caller()


class _Watch(NodeTransformer):
    """Puts a tick at the head of every body that can run again, and `~` where its size is checked. Methods are named
    after Jinja's nodes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _environment_call("concat_bounded", node.nodes, node.lineno)

    def _ticking(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        fixed = sum(len(part.data) for statement in node.body for part in _fixed_texts(statement))
        self.generic_visit(node)
        tick = _environment_call("tick", [nodes.Const(fixed)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node


def _fixed_texts(statement: nodes.Node) -> list[nodes.TemplateData]:
    return list(statement.find_all(nodes.TemplateData))


def _environment_call(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)
    call.set_lineno(lineno)
    return call


def _concatenated(*parts: Any) -> str:
    bounds.require_chars(sum(bounds.size_of(part) for part in parts))
    return "".join([str(part) for part in parts])


# ── what templates call ────────────────────────────────────────────────────────────────────────────────


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(message)


def _strftime_now(layout: str) -> str:
    bounds.require_width(len(layout))
    return datetime.now().strftime(layout)
