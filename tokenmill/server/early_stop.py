"""A SIGTERM that comes before the server listens for it.

A service manager may stop what it has just started, and should see no failure then. Until the server's event loop has a
handler of its own, one that raises SystemExit(0) ends the process in an orderly way. Python drops an exception that is
raised within a destructor or another callback, such as those of the import system ("Exception ignored in …"), and the
stop with it; so it is noted too, and the server looks for that note once it listens itself.
"""

from __future__ import annotations

import signal
import sys
import threading


class StoppedEarly(SystemExit):
    """Ends the process on an early SIGTERM. A class of its own, so that it can be ignored where Python reports dropped
    exceptions."""


class EarlyStop:
    """Ends the process on SIGTERM, and remembers that it was told to."""

    def __init__(self) -> None:
        self.was_asked = False

    def install(self) -> None:
        """Handle SIGTERM from now on; Python lets only the main thread do so."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._stop)
            report = sys.unraisablehook
            sys.unraisablehook = lambda dropped: None if dropped.exc_type is StoppedEarly else report(dropped)

    def _stop(self, number: int, frame: object) -> None:
        self.was_asked = True
        raise StoppedEarly(0)


def is_early_stop(problem: BaseException | None) -> bool:
    """Tell whether an exception comes from such a stop: Python wraps what is raised while a class is being made."""
    while problem is not None and not isinstance(problem, StoppedEarly):
        problem = problem.__cause__ or problem.__context__
    return problem is not None


EARLY_STOP = EarlyStop()  # a process has one handler of a signal
