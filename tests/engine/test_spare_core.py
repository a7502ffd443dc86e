"""The process that waits for the next model of a server: taken once, replaced, never left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tokenmill.engine.core_process import CoreProcess
from tokenmill.engine.startup import spare_core
from tokenmill.engine.startup.spare_core import SpareCore


def waiting() -> CoreProcess:
    return CoreProcess(["-c", "import time; time.sleep(600)"])


def test_each_process_is_taken_once_and_replaced_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_core, "CoreProcess", waiting)
    first = waiting()
    for spare, refills in ((SpareCore(first, is_refilled=True), True), (SpareCore(waiting()), False)):
        taken = spare.take(fast_start=True)
        assert taken is not None and spare.take(fast_start=True) is None
        spare.refill()
        assert spare.take(fast_start=False) is None  # one that shall not start fast takes none
        second = spare.take(fast_start=True)
        assert (second is not None) is refills
        spare.refill()
        spare.discard()
        spare.refill()  # a load that ends after the server
        assert spare.take(fast_start=True) is None
        for process in (taken, second):
            if process is not None:
                process.kill()
                assert not Path(process.folder).exists()


def test_a_process_that_was_killed_while_it_waited_is_not_taken() -> None:
    dead = CoreProcess(["-c", "pass"])
    dead.wait()
    assert SpareCore(dead).take(fast_start=True) is None and not Path(dead.folder).exists()


def test_a_process_that_was_stopped_while_it_waited_is_not_taken() -> None:
    stopped = waiting()
    assert not stopped.is_stopped()
    os.kill(stopped.process_id, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.process_id, os.WSTOPPED | os.WNOWAIT)
    assert SpareCore(stopped).take(fast_start=True) is None and not Path(stopped.folder).exists()
    assert stopped.has_ended()
