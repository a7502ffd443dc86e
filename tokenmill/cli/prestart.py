"""The core's process, started before the command line is read.

    main ─► core_ahead ─► flags, TOML file, environment ─► `command` ─► take_core ─► the model
               └── child: imports torch, the longest part of a start, beside all that

Whoever opens a model takes the child; where nobody does (a wrong flag, no prompt) it is ended unused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tokenmill.engine.core_process import CoreProcess

VERBS = frozenset({"run", "chat", "serve"})
HELP = frozenset({"-h", "--help"})

_waiting: ContextVar[list[CoreProcess] | None] = ContextVar("waiting", default=None)


@contextmanager
def prestart_core(verb: str, arguments: list[str]) -> Iterator[None]:
    """Inside, a verb that will need a core finds one under way."""
    if verb not in VERBS or HELP & set(arguments):
        yield
        return
    waiting = [CoreProcess()]
    token = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(token)
        for child in waiting:
            child.discard()


def take_core() -> CoreProcess | None:
    """The child that was started ahead, now the caller's to end; None where there is none."""
    waiting = _waiting.get()
    return waiting.pop() if waiting else None
