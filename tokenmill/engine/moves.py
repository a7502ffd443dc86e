"""Requests that leave a core which is to be free, while their clients notice as little as possible.

    old core   decodes ······························ fills a block ···· token │ forgotten
    new core            all full blocks ──► prepared       that block ──►      │ the last tokens ──► next token ···

A request that has given tokens is first *prepared*: the core that is to go on with it gets a request for no tokens of
all full blocks that there are, and takes them from the old core or computes them, while the old one decodes on. As soon
as another block is full it is prepared again, which takes a few steps, and the move itself follows upon the next token:
all that is left to compute are the few tokens behind that block. Where they do not become few, it moves nevertheless.
Without a preparation (n > 1, where nothing could be prepared) a request takes its blocks along when it moves.

A few are prepared together, until all are; then a few move at a time, since each that arrives lengthens a step of all
that run there. None moves while others are prepared for the first time: it would wait behind them.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Protocol

from tokenmill.engine.messages import Abort, Submit
from tokenmill.engine.replica import Preparation, Replica, RequestRun, Route
from tokenmill.engine.roles import may_be_prefilled, prepared_request
from tokenmill.types import Request, SequenceOutput

MOVE_S = 2.0  # how long a core that is about to end waits until others have its requests' blocks
MOVE_CHECK_S = 0.005
MOVED_SHARE = 16  # one of so many requests that have tokens moves at a time
PREPARED_AT_ONCE = 2  # so many times as many are prepared at a time, or move once few tokens are left
FEW_LEFT = 8  # a request moves when at most so many tokens are left to compute on the next core
JUST_FULL = 2  # a request is prepared again at most so many tokens behind its last full block
MOST_REPEATED = 4  # preparations after the first one; then the request moves, however many tokens are left
FETCHED_BLOCKS = 3  # so many unprepared blocks are fetched; fewer are computed, since a fetch takes a step

_numbers = count(1)


class RequestPlacement(Protocol):
    """What gives requests to cores."""

    def withdraw(self, run: RequestRun, replica: Replica, *, tell_core: bool) -> None: ...

    def park(self, run: RequestRun) -> None: ...

    def place_parked(self) -> None: ...

    def can_take(self, replica: Replica, request: Request) -> bool: ...

    def give(self, run: RequestRun, route: Route, num_uncached: int) -> None: ...

    def route_of_answer(self, request: Request) -> Route | None: ...

    def block_address(self, source: Replica | None, replica: Replica) -> str: ...


class Moves:
    def __init__(self, replicas: RequestPlacement) -> None:
        self._replicas = replicas

    def continue_from(self, replica: Replica) -> None:
        """Let requests leave a core, if it is to be free. Those without a token go at once."""
        if not replica.is_kept_free:
            return
        runs = list(replica.runs.values())
        room = max(1, len(runs) // MOVED_SHARE)
        may_prepare = not replica.leaving and not is_preparing(replica)
        num_prepared = 0
        for run in runs:
            if run.is_starting:
                self.move(run, replica)
            elif run is replica.probation or not self._may_be_prepared(run):
                if len(replica.leaving) < 2 * room:
                    self.move(run, replica)
            elif may_prepare and run.preparation is None and num_prepared < PREPARED_AT_ONCE * room:
                if self._prepare(run, replica):
                    num_prepared += 1
                else:
                    self.move(run, replica)
        self._replicas.place_parked()

    def stay(self, replica: Replica) -> None:
        """Let requests stay that have not left yet."""
        for run in replica.runs.values():
            self.forget(run)

    def move(self, run: RequestRun, replica: Replica) -> None:
        """Take a request from a core; it goes on with its next token wherever it is placed."""
        self._note_leaving(run, replica)
        self._replicas.withdraw(run, replica, tell_core=True)
        self._replicas.park(run)

    async def empty(self, replica: Replica) -> None:
        """Take all requests from a core that is about to end, and wait a moment until others have their blocks; not
        where no other core takes them."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + MOVE_S
        self.continue_from(replica)
        while (replica.runs or replica.leaving) and loop.time() < ends_s:
            if any(run.replica is None for run in replica.leaving):
                break
            await asyncio.sleep(MOVE_CHECK_S)
        for run in list(replica.runs.values()):
            self.move(run, replica)
        self._replicas.place_parked()

    def _note_leaving(self, run: RequestRun, replica: Replica) -> None:
        if not run.is_starting:
            run.left = replica
            replica.leaving.add(run)
        if replica.probation is run:
            replica.probation = None

    def note_moved(self, run: RequestRun) -> None:
        """Note that a moved request continues on another core or has ended, and move the next one."""
        replica, run.left = run.left, None
        if replica is not None:
            replica.leaving.discard(run)
            self.continue_from(replica)

    # ── preparations ───────────────────────────────────────────────────────────────────────────────────

    def _may_be_prepared(self, run: RequestRun) -> bool:
        """Tell whether the blocks of a request are those of one sequence."""
        params = run.request.params
        return may_be_prefilled(run.request) and params.num_sequences == 1 and params.beam is None

    def _prepare(self, run: RequestRun, replica: Replica) -> bool:
        """Begin to prepare a request on another core; False: none can take it."""
        route = self._replicas.route_of_answer(run.buffer.output_processor.resumed_request())
        if route is None:
            return False
        run.preparation = Preparation(run, route)
        self._send_blocks(run.preparation, replica)
        return True

    def _send_blocks(self, preparation: Preparation, replica: Replica) -> None:
        """Let the next core of a request get all full blocks that there are of it."""
        request = preparation.run.buffer.output_processor.resumed_request()
        target = preparation.route.replica
        preparation.core_id = core_id = f"{request.request_id}#prepared{next(_numbers)}"
        asked = prepared_request(
            request, core_id, target.info.block_size, self._replicas.block_address(replica, target)
        )
        preparation.num_tokens, preparation.is_done = len(asked.prompt_token_ids), False
        target.preparations[core_id] = preparation
        target.send(Submit(asked))

    def note_prepared(self, replica: Replica, output: SequenceOutput) -> None:
        """Take in what a core says of a preparation. One that failed has prepared nothing, and is not repeated."""
        if output.finish_reason is None:
            return
        preparation = replica.preparations.pop(output.request_id)
        preparation.is_done = True
        if output.finish_reason == "error":
            preparation.num_tokens, preparation.num_repeated = 0, MOST_REPEATED
        if preparation.run.replica is not None:
            self.continue_from(preparation.run.replica)

    def note_token(self, run: RequestRun, replica: Replica) -> None:
        """Move a request that has got a token, if all are prepared and few tokens are left to compute; or prepare it
        again."""
        preparation = run.preparation
        if preparation is None or not preparation.is_done or is_preparing(replica):
            return
        num_tokens = len(run.request.prompt_token_ids) + run.buffer.output_processor.num_completion_tokens
        num_left = num_tokens - preparation.num_tokens
        target = preparation.route.replica
        if num_left > FEW_LEFT and preparation.num_repeated < MOST_REPEATED and target.is_ready:
            if num_left >= target.info.block_size and (num_tokens - 1) % target.info.block_size <= JUST_FULL:
                preparation.num_repeated += 1
                self._send_blocks(preparation, replica)
            return
        room = max(1, len(replica.runs) // MOVED_SHARE)
        if len(replica.leaving) >= room * (PREPARED_AT_ONCE if num_left <= FEW_LEFT else 1):
            return
        self._note_leaving(run, replica)
        self._replicas.withdraw(run, replica, tell_core=True)
        if num_left < FETCHED_BLOCKS * target.info.block_size:
            run.source = None
        if self._replicas.can_take(target, run.request):
            self._replicas.give(run, preparation.route, num_left)
        else:
            self._replicas.park(run)
            self._replicas.place_parked()

    def forget(self, run: RequestRun) -> None:
        """Let go of a preparation whose request stays, has ended, or goes elsewhere."""
        preparation, run.preparation = run.preparation, None
        if preparation is None or preparation.is_done:
            return
        target = preparation.route.replica
        if target.preparations.pop(preparation.core_id, None) is not None:
            target.send(Abort(preparation.core_id))

    def forget_all(self, preparations: list[Preparation]) -> None:
        """Let go of what a dead core was preparing; prepare it elsewhere."""
        for preparation in preparations:
            run = preparation.run
            if run.preparation is preparation:
                run.preparation = None
                if run.replica is not None:
                    self.continue_from(run.replica)


def is_preparing(replica: Replica) -> bool:
    """Tell whether requests of a core are prepared elsewhere for the first time."""
    preparations = (run.preparation for run in replica.runs.values())
    return any(one is not None and not one.is_done and not one.num_repeated for one in preparations)
