"""Cores in threads that die when a test wants them to: after a number of outputs, or when they produce a certain
output."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from tokenmill.engine.core import EngineCore
from tokenmill.engine.core_client import QueueMailbox, Receive, ThreadCoreClient
from tokenmill.engine.loop import run_loop
from tokenmill.engine.messages import FromCore, Outputs, ToCore
from tokenmill.types import SequenceOutput

Kills = Callable[[SequenceOutput], bool]
IMMORTAL = 1 << 60


class CrashingMailbox(QueueMailbox):
    """The mailbox of a core that dies in the middle of a step; the step's outputs are lost."""

    def __init__(self, inbox: queue.SimpleQueue[ToCore], deliver: Receive, num_outputs: int, kills: Kills) -> None:
        super().__init__(inbox, deliver)
        self._left = num_outputs
        self._deliver = deliver
        self._kills = kills
        self.send = self._send

    def _send(self, message: FromCore) -> None:
        if isinstance(message, Outputs):
            self._left -= len(message.outputs)
            if self._left < 0 or any(map(self._kills, message.outputs)):
                raise RuntimeError("killed by the test")
        self._deliver(message)


class CrashingCoreClient(ThreadCoreClient):
    def __init__(self, build: Callable[[], EngineCore], num_outputs: int, kills: Kills = lambda _: False) -> None:
        """`num_outputs`: the core dies after so many outputs. `kills`: tells whether an output makes the core die."""
        super().__init__(build)
        self._num_outputs = num_outputs
        self._kills = kills

    def _run(self, deliver: Receive) -> None:
        run_loop(self._build(), CrashingMailbox(self._inbox, deliver, self._num_outputs, self._kills))


def crashing_clients(
    build: Callable[[], EngineCore], lives: Iterator[int], kills: Kills = lambda _: False
) -> Callable[[], CrashingCoreClient]:
    """Make clients whose cores die after the given numbers of outputs; once `lives` is exhausted, only `kills` ends
    a core."""
    return lambda: CrashingCoreClient(build, next(lives, IMMORTAL), kills)
