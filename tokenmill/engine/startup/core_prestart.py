"""The core's process, started before the command line is read.

    main ─► prestart_core ─► flags, TOML file, environment ─► `command` ─► take_core ─► the model
               └── child: imports torch, the longest part of a start, beside all that

A verb that opens a model takes the child; where none does (a wrong flag, no prompt) it is killed unused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from tokenmill.engine.core_process import CoreProcess

VERBS = frozenset({"run", "chat", "serve", "batch", "up"})
HELP = frozenset({"-h", "--help"})
PLAN_ONLY = ("--dry-run", "--virtual")  # `up` without weights
NO_WORDS = frozenset({"0", "false", "no", "off", "n", "f"})

_waiting: ContextVar[list[CoreProcess] | None] = ContextVar("waiting", default=None)


@contextmanager
def prestart_core(verb: str, arguments: list[str], environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Inside, a verb that will need a core finds one that is starting."""
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
    """Hand over the process that was started early, which the caller must end; None where there is none, or where a
    setting that was read later (in a TOML file) has turned fast starts off."""
    waiting = _waiting.get()
    if not waiting:
        return None
    process = waiting.pop()
    if fast_start:
        return process
    process.kill()
    return None


def _is_fast(arguments: list[str], environment: Mapping[str, str]) -> bool:
    """Guess the switch from the raw arguments, before anything is parsed; the parsed setting decides."""
    given = [argument for argument in arguments if argument in ("--fast-start", "--no-fast-start")]
    if given:
        return given[-1] == "--fast-start"
    return environment.get("TOKENMILL_FAST_START", "").strip().lower() not in NO_WORDS
