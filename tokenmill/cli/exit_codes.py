"""Exit codes of commands, and one line on stderr for failures.

`TOKENMILL_DEBUG=1` shows the traceback as well. This file imports little, so that it also handles Ctrl-C while other
modules are still being imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from tokenmill.server.early_stop import is_early_stop

INTERRUPTED = 130
BROKEN_PIPE = 141


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command and return its exit code, or that of the error or signal that stopped it."""
    try:
        code = command()
        _flush()  # here an error of the output can still be reported
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `tokenmill run … | head -1`: the reader has closed the pipe, which is not an error
        _forget_output()
        return BROKEN_PIPE
    except OSError as problem:
        code = fail(f"{problem.strerror or problem}" + (f": {problem.filename}" if problem.filename else ""), 1)
        _forget_output()
        return code
    except Exception as problem:  # the outermost handler: a bug is reported on one line too
        if is_early_stop(problem):
            return 0
        return fail(f"internal error: {type(problem).__name__}: {problem}", 1)


def fail(text: str, code: int) -> int:
    if os.environ.get("TOKENMILL_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exc()
    print(f"tokenmill: {' '.join(text.split())}", file=sys.stderr)
    return code


def _flush() -> None:
    if sys.stdout is not None:  # the parent may have closed it
        sys.stdout.flush()


def _forget_output() -> None:
    """Discard output that can't be written; otherwise the interpreter would try again at exit and print an error."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
