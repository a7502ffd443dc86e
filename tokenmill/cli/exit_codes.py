"""Exit codes of commands, and one line on stderr where something went wrong.

`TOKENMILL_DEBUG=1` shows the traceback behind the line. This file imports little, so that Ctrl-C while all else
is still being imported ends here too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from tokenmill.server.early_stop import is_early_stop

INTERRUPTED = 130
BROKEN_PIPE = 141


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command; its exit code, or that of what stopped it."""
    try:
        code = command()
        _flush()  # an error of the output can be reported here, but not when the interpreter ends
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `tokenmill run … | head -1`: the reader has left, which is no error
        _forget_output()
        return BROKEN_PIPE
    except OSError as problem:
        code = fail(f"{problem.strerror or problem}" + (f": {problem.filename}" if problem.filename else ""), 1)
        _forget_output()
        return code
    except Exception as problem:  # the last stop before the user: a bug is one line too
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
    """Drop output that can't be written: the interpreter would try again, and complain, when it ends."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
