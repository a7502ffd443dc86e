"""Cores in threads that die when a test wants it: after so many outputs, or when they are given a certain request."""

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


class MortalMailbox(QueueMailbox):
    """The mailbox of a core that dies in the middle of a step: what the step brought is lost."""

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


class MortalCoreClient(ThreadCoreClient):
    def __init__(self, build: Callable[[], EngineCore], num_outputs: int, kills: Kills = lambda _: False) -> None:
        """`num_outputs`: how many outputs it lives for. `kills`: whether an output is one that it dies of."""
        super().__init__(build)
        self._num_outputs = num_outputs
        self._kills = kills

    def _run(self, deliver: Receive) -> None:
        run_loop(self._build(), MortalMailbox(self._inbox, deliver, self._num_outputs, self._kills))


def lives_of(
    build: Callable[[], EngineCore], lives: Iterator[int], kills: Kills = lambda _: False
) -> Callable[[], MortalCoreClient]:
    """Make clients whose cores live for so many outputs each; after the last of `lives` they do not die of age."""
    return lambda: MortalCoreClient(build, next(lives, IMMORTAL), kills)
