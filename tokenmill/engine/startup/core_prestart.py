"""Starting the core process before the command line is parsed.

    main ─► prestart_core ─► flags, TOML file, environment ─► `command` ─► take_core ─► the model
               └── child: imports torch, the longest part of a start, at the same time

A command that opens a model takes the child; if it ends before that (an invalid flag, no prompt), the child is killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from tokenmill.engine.core_process import CoreProcess

VERBS = frozenset({"run", "chat", "serve", "batch", "up"})
HELP = frozenset({"-h", "--help"})
PLAN_ONLY = ("--dry-run", "--virtual")  # `up` without loading a model
FALSE_VALUES = frozenset({"0", "false", "no", "off", "n", "f"})

_waiting: ContextVar[list[CoreProcess] | None] = ContextVar("waiting", default=None)


@contextmanager
def prestart_core(verb: str, arguments: list[str], environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Start a core process if the command will need one; inside, `take_core` returns it."""
    opens_nothing = HELP & set(arguments) or any(argument.startswith(PLAN_ONLY) for argument in arguments)
    if verb not in VERBS or opens_nothing or not _is_fast(arguments, environment):
        yield
        return
    waiting = [CoreProcess()]
    token = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(token)
        for process in waiting:
            process.kill()


def take_core(*, fast_start: bool) -> CoreProcess | None:
    """Return the process that was started early, which the caller must end; None if there is none, or if a setting read
    later (in a TOML file) has turned fast starts off."""
    waiting = _waiting.get()
    if not waiting:
        return None
    process = waiting.pop()
    if fast_start:
        return process
    process.kill()
    return None


def _is_fast(arguments: list[str], environment: Mapping[str, str]) -> bool:
    """Guess the setting `fast_start` from the raw arguments, before they are parsed; the parsed setting decides."""
    flags = [argument for argument in arguments if argument in ("--fast-start", "--no-fast-start")]
    if flags:
        return flags[-1] == "--fast-start"
    return environment.get("TOKENMILL_FAST_START", "").strip().lower() not in FALSE_VALUES
