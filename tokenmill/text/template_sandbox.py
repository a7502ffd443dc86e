"""The Jinja environment that chat templates run in: configured as in transformers, with limits on time, on text and on
the size of every value that a template builds.

A chat template is untrusted code. Jinja's sandbox restricts what it can access but not what it can consume:
`"a" * 10**9`, a string that doubles in a loop, or three nested loops are all allowed there. Every construct with
unbounded cost therefore passes a check:

    loops, macros, calls    `tick`: is there time left?       (a call inserted into the compiled loop body)
    text written            `written`: counted when it is produced, also inside macros
    + * ** % ~, filters     refused before they are computed if the result would be too large
    comparisons, sorting    refused for lists with too many items, shared references counted each time

Measuring a nested list stops at the limit, so shared references cannot make it exponential. `ChatSandbox` connects the
checks to Jinja: its operators, calls, filters (those that can produce large results from small inputs, `indent`,
`center`, `replace`, `join`, `tojson` …, are replaced), and, by rewriting the parsed template, its loops.

As templates expect, blocks are trimmed, loops have `break` and `continue`, `tojson` writes plain JSON,
`raise_exception` and `strftime_now` exist, and `{% generation %}` (a mark for training) is accepted and has no effect.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_ITEMS = 1_000_000  # of any list a template builds
MAX_COMPARED = 100_000  # items of lists that are compared, sorted or written as text
MAX_PRETTY = 20_000  # characters and items formatted by `pprint`, which takes 0.1 ms for each
_MAX_INTEGER_BITS = 4096
_MAX_WIDTH = 10_000  # of padding, indentation
_WIDE_FORMAT = re.compile(r"\{[^{}]*\{|:[^{}]*\d{5}|%[^a-zA-Z%]*(\d{5}|\*)")


@dataclass(frozen=True)
class Bounds:
    max_chars: int = 8 << 20  # of the rendered text
    max_s: float = 5.0


class OutOfBounds(TemplateError):
    """The template exceeded a limit and was stopped."""


class Budget:
    """The time and text that one rendering has left. `variables`: those that the template is rendered with."""

    def __init__(self, bounds: Bounds, variables: Any = None) -> None:
        self.bounds = bounds
        self._variables = variables
        self._deadline_s = time.monotonic() + bounds.max_s
        # The same text passes several stages (macro, call, output) and is counted in each.
        self._chars_left = 8 * bounds.max_chars

    def tick(self) -> None:
        if time.monotonic() > self._deadline_s:
            raise OutOfBounds(f"it ran for more than {self.bounds.max_s:g} s")

    def wrote(self, num_chars: int) -> None:
        self._chars_left -= num_chars
        if self._chars_left < 0:
            raise OutOfBounds(f"it wrote more than {self.bounds.max_chars} characters")

    @cached_property
    def input_lists(self) -> frozenset[int]:
        """The identities of all lists in the template's variables, at any depth."""
        found, waiting = set(), [self._variables]
        while waiting:
            value = waiting.pop()
            if isinstance(value, list):
                found.add(id(value))
                waiting += value
            elif isinstance(value, dict):
                waiting += value.values()
        return frozenset(found)


# Set during a rendering; None while Jinja folds constants at compile time.
current_budget: ContextVar[Budget | None] = ContextVar("template_budget", default=None)
_COMPILING = Bounds(max_chars=1 << 20)


def tick(num_chars: int = 0) -> None:
    """Check the budget; called at the beginning of each loop body and macro, with the length of its fixed text."""
    budget = current_budget.get()
    if budget is not None:
        budget.tick()
        budget.wrote(num_chars)


def is_input_list(value: list[Any]) -> bool:
    """Return whether a list belongs to the template's variables, and was not made by the template itself."""
    budget = current_budget.get()
    return budget is None or id(value) in budget.input_lists


def written(value: Any) -> Any:
    """Count a value that is printed, and return it."""
    budget = current_budget.get()
    if budget is not None:
        budget.wrote(size_of(value))
    return value


def size_of(value: Any, limit: int | None = None) -> int:
    """Return about how many characters a value has as text; refuse a value that exceeds the limit."""
    if isinstance(value, str):
        return len(value)
    total, waiting = 0, [value]
    limit = _limit() if limit is None else limit
    while waiting:
        item = waiting.pop()
        total += len(item) if isinstance(item, str) else 8
        if isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        if total > limit:
            raise OutOfBounds(f"it built a value of more than {limit} characters")
    return total


def sized(value: Any) -> Any:
    """Return a value that is compared or sorted; refuse one of nested lists with too many items. Strings may have any
    length."""
    num_items, waiting = 0, [value] if isinstance(value, list | tuple | dict) else []
    while waiting:
        item = waiting.pop()
        inside = item.values() if isinstance(item, dict) else item
        num_items += len(inside)
        if num_items > MAX_COMPARED:
            raise OutOfBounds(f"it compared a value of more than {MAX_COMPARED} items")
        waiting += [one for one in inside if isinstance(one, list | tuple | dict)]
    return value


def _limit() -> int:
    budget = current_budget.get()
    return (budget.bounds if budget is not None else _COMPILING).max_chars


def require_chars(num_chars: int) -> None:
    if num_chars > _limit():
        raise OutOfBounds(f"it would build a text of {num_chars} characters")


def require_items(num_items: int) -> None:
    if num_items > MAX_ITEMS:
        raise OutOfBounds(f"it would build a list of {num_items} items")


def require_width(width: Any) -> None:
    if isinstance(width, int) and width > _MAX_WIDTH:
        raise OutOfBounds(f"it used a width of {width}")


# ── operators ──────────────────────────────────────────────────────────────────────────────────────────


def check_operator(operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        _check_sum(left, right)
    elif operator == "*":
        _check_product(left, right)
        _check_product(right, left)
    elif operator == "**":
        _check_power(left, right)
    elif operator == "%" and isinstance(left, str):
        check_format(left, [right])


def _check_sum(left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        require_chars(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        require_items(len(left) + len(right))


def _check_product(value: Any, times: Any) -> None:
    if not isinstance(times, int):
        return
    if isinstance(value, str):
        require_chars(len(value) * times)
    elif isinstance(value, list | tuple):
        require_items(len(value) * times)
    elif isinstance(value, int) and value.bit_length() + times.bit_length() > _MAX_INTEGER_BITS:
        raise OutOfBounds("it multiplied numbers too large")


def _check_power(value: Any, exponent: Any) -> None:
    if isinstance(value, int) and isinstance(exponent, int) and value.bit_length() * exponent > _MAX_INTEGER_BITS:
        raise OutOfBounds("it raised a number too high")


# ── methods and filters ────────────────────────────────────────────────────────────────────────────────


def check_format(pattern: str, values: Iterable[Any]) -> None:
    if _WIDE_FORMAT.search(pattern):
        raise OutOfBounds("it formats with a width that is too large or not written out")
    require_chars(len(pattern) + sum(size_of(value) for value in values))


def check_replace(text: str, old: str, new: str) -> None:
    require_chars(len(text) + text.count(old) * len(new))


def joinable(items: Iterable[Any], separator: str) -> list[Any]:
    """Return the items of a join as a list, reading a possibly endless iterable only up to the limits."""
    taken = list(itertools.islice(items, MAX_ITEMS + 1))
    require_items(len(taken))
    require_chars(size_of(taken) + len(taken) * len(separator))
    return taken


def check_method(method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse calls of string methods whose results would be too large."""
    method = getattr(method, "__wrapped__", method)  # the sandbox wraps str.format
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(text, str):
        return
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        for value in (*args, *kwargs.values()):
            require_width(value)
    elif name in ("format", "format_map"):
        check_format(text, [*args, *kwargs.values()])
    elif name == "replace" and len(args) >= 2:
        check_replace(text, str(args[0]), str(args[1]))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        joinable(args[0], text)


# ── the sandbox ──────────────────────────────────────────────────────────────────────────────────────────


def _center(value: str, width: int = 80) -> Any:
    require_width(width)
    return FILTERS["center"](value, width)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    pad = width if isinstance(width, int) else len(width)
    require_width(pad)
    require_chars(len(s) + (s.count("\n") + 1) * pad)
    return FILTERS["indent"](s, width, first, blank)


def _batch(value: Any, linecount: int, fill_with: Any = None) -> Any:
    require_items(linecount)
    return FILTERS["batch"](value, linecount, fill_with)


def _slice(value: Any, slices: int, fill_with: Any = None) -> Any:
    require_items(slices)
    return FILTERS["slice"](value, slices, fill_with)


def _format(value: str, *args: Any, **kwargs: Any) -> Any:
    check_format(str(value), [*args, *kwargs.values()])
    return FILTERS["format"](value, *args, **kwargs)


def _string(value: Any) -> Any:
    size_of(value)
    return FILTERS["string"](value)


@jinja2.pass_eval_context
def _replace(context: nodes.EvalContext, s: str, old: str, new: str, count: int | None = None) -> Any:
    check_replace(str(s), str(old), str(new))
    return FILTERS["replace"](context, s, old, new, count)


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
    return FILTERS["join"](context, joinable(value, str(d)), d, attribute)


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise OutOfBounds("it sums things that are not numbers")
    return FILTERS["sum"](environment, iterable, attribute, start)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    size_of(value)
    if indent and (indent if isinstance(indent, int) else len(indent)) > 16:
        raise OutOfBounds("it indents JSON by more than 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _pprint(value: Any) -> Any:
    size_of([value], MAX_PRETTY)
    return FILTERS["pprint"](value)


BOUNDED_FILTERS: dict[str, Callable[..., Any]] = {
    "center": _center,
    "indent": _indent,
    "batch": _batch,
    "slice": _slice,
    "format": _format,
    "string": _string,
    "replace": _replace,
    "join": _join,
    "pprint": _pprint,
    "sum": _sum,
    "tojson": _tojson,
}


# Filters that compare their input or convert it to text.
DEEP_FILTERS = frozenset(
    (
        *("capitalize", "dictsort", "e", "escape", "groupby", "lower", "max", "min", "sort", "striptags", "title"),
        *("trim", "truncate", "unique", "upper", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr"),
    )
)


class Refusal(jinja2.TemplateError):
    """The template itself refused the conversation, by `raise_exception`."""


class ChatSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationMark, "jinja2.ext.loopcontrols"],
            finalize=written,
        )
        self.tick = tick
        self.sized = sized
        self.concat_bounded = _concatenated
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        del self.globals["lipsum"]
        self.filters |= BOUNDED_FILTERS

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        watched: nodes.Template = _Watch().visit(tree)
        return watched

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow `append` and `pop` on lists that the template made itself; its variables are never modified."""
        if attr in ("append", "pop") and type(obj) is list:
            return not is_input_list(obj)
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  Jinja's
        tick()
        check_method(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class GenerationMark(Extension):
    """`{% generation %} ... {% endgeneration %}`: a scope that prints its content unchanged."""

    tags = {"generation"}  # noqa: RUF012  Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(lineno)

    def _content(self, caller: Macro) -> str:
        return caller()


class _Watch(NodeTransformer):
    """Inserts `tick` at the beginning of every loop, macro and call body, and size checks around `~`, comparisons and
    filters. Methods are named after Jinja's nodes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _environment_call("concat_bounded", node.nodes, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not any(isinstance(side, nodes.Const) for side in (node.expr, *(operand.expr for operand in node.ops))):
            node.expr = _environment_call("sized", [node.expr], node.lineno)
            for operand in node.ops:
                operand.expr = _environment_call("sized", [operand.expr], node.lineno)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.name in DEEP_FILTERS and node.node is not None and not isinstance(node.node, nodes.Const):
            node.node = _environment_call("sized", [node.node], node.lineno)
        return node

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
    require_chars(sum(size_of(part) for part in parts))
    return "".join([str(part) for part in parts])


# ── functions for templates ────────────────────────────────────────────────────────────────────────────


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(message)


def _strftime_now(layout: str) -> str:
    require_width(len(layout))
    return datetime.now().strftime(layout)
