"""Bounds on what a chat template may do: time, text, and the size of anything it builds.

A template is a program from a stranger. Jinja's sandbox keeps it from the machine, not from spending it:
`"a" * 10**9`, a string that doubles in a loop, or three nested loops are all allowed there. So every place where
a template can do work without end is made to pass here:

    loops, macros, calls    `tick`: is there time left?       (a call put into the compiled loop body)
    text written            `wrote`: counted as it is made, also inside macros
    + * ** % ~, filters     refused when the result would be too large, before it is computed

Where a size is asked of nested lists, counting stops at the bound, so shared references can't explode it.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

MAX_ITEMS = 1_000_000  # of any list a template builds
_MAX_INTEGER_BITS = 4096
_MAX_WIDTH = 10_000  # of padding, indentation
_WIDE_FORMAT = re.compile(r"\{[^{}]*\{|:[^{}]*\d{5}|%[^a-zA-Z%]*(\d{5}|\*)")


@dataclass(frozen=True)
class Bounds:
    max_chars: int = 8 << 20  # of the rendered text
    max_s: float = 5.0


class OutOfBounds(TemplateError):
    """The template was stopped."""


class Budget:
    """What one rendering has left."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._deadline_s = time.monotonic() + bounds.max_s
        # Text passes through several hands on its way out (macro, call, output) and is counted in each.
        self._chars_left = 8 * bounds.max_chars

    def tick(self) -> None:
        if time.monotonic() > self._deadline_s:
            raise OutOfBounds(f"it ran for more than {self.bounds.max_s:g} s")

    def wrote(self, num_chars: int) -> None:
        self._chars_left -= num_chars
        if self._chars_left < 0:
            raise OutOfBounds(f"it wrote more than {self.bounds.max_chars} characters")


# Set around a rendering; absent while constants are folded at compile time.
current_budget: ContextVar[Budget | None] = ContextVar("template_budget", default=None)
_COMPILING = Bounds(max_chars=1 << 20)


def tick(num_chars: int = 0) -> None:
    """Called at the head of each loop body and macro, with the length of the fixed text inside."""
    budget = current_budget.get()
    if budget is not None:
        budget.tick()
        budget.wrote(num_chars)


def written(value: Any) -> Any:
    """Passes every printed value through, counted."""
    budget = current_budget.get()
    if budget is not None:
        budget.wrote(size_of(value))
    return value


def size_of(value: Any) -> int:
    """About how many characters a value has when written out; refused once that is over the bound."""
    if isinstance(value, str):
        return len(value)
    limit, total, waiting = _limit(), 0, [value]
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


def _limit() -> int:
    budget = current_budget.get()
    return (budget.bounds if budget is not None else _COMPILING).max_chars


def require_chars(num_chars: int) -> None:
    if num_chars > _limit():
        raise OutOfBounds(f"it asked for a text of {num_chars} characters")


def require_items(num_items: int) -> None:
    if num_items > MAX_ITEMS:
        raise OutOfBounds(f"it asked for a list of {num_items} items")


def require_width(width: Any) -> None:
    if isinstance(width, int) and width > _MAX_WIDTH:
        raise OutOfBounds(f"it asked for a width of {width}")


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
    """The items of a join, taken out of a possibly endless iterable, once they are known to fit."""
    taken = list(itertools.islice(items, MAX_ITEMS + 1))
    require_items(len(taken))
    require_chars(size_of(taken) + len(taken) * len(separator))
    return taken


def check_method(method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Methods of strings that can make much out of little."""
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
