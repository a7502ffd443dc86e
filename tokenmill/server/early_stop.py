"""Handles a SIGTERM that arrives before the server's event loop handles it.

A service manager may stop a server that it has just started, and should see exit code 0. So until the event loop has
its own handler, SIGTERM raises SystemExit(0). Python drops an exception that is raised in a destructor or another
callback, such as those of the import system ("Exception ignored in …"); therefore the request is also remembered, and
the server checks for it once its event loop runs.
"""

from __future__ import annotations

import signal
import sys
import threading


class StoppedEarly(SystemExit):
    """Ends the process on an early SIGTERM. It is a class of its own so that `sys.unraisablehook` can ignore it."""


class EarlyStop:
    """Ends the process on SIGTERM, and remembers the request."""

    def __init__(self) -> None:
        self.is_requested = False

    def install(self) -> None:
        """Handle SIGTERM from now on, if this is the main thread: Python allows only that to set signal handlers."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._stop)
            report = sys.unraisablehook
            sys.unraisablehook = lambda dropped: None if dropped.exc_type is StoppedEarly else report(dropped)

    def _stop(self, number: int, frame: object) -> None:
        self.is_requested = True
        raise StoppedEarly(0)


def is_early_stop(problem: BaseException | None) -> bool:
    """Return whether an exception was caused by a StoppedEarly: Python wraps exceptions raised while a class is being
    created."""
    while problem is not None and not isinstance(problem, StoppedEarly):
        problem = problem.__cause__ or problem.__context__
    return problem is not None


EARLY_STOP = EarlyStop()  # global, like signal handlers
