"""The Jinja environment that chat templates are written for, as transformers sets it up, inside our bounds.

Blocks are trimmed, loops have `break` and `continue`, `tojson` writes plain JSON, `raise_exception` and
`strftime_now` exist, and `{% generation %}` (a mark for training) is read and does nothing. How the bounds work
is told in `template_bounds`; here they are tied into Jinja: its operators, calls, filters, and, by a rewrite of the
parsed template, its loops.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from tokenmill.text import template_bounds as bounds
from tokenmill.text.template_filters import BOUNDED_FILTERS


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
