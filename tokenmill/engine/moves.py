"""Moving requests off a core that is being drained, with the shortest possible pause for their clients.

    old core   decodes ······························ fills a block ···· token │ aborted
    new core            all full blocks ──► prepared       that block ──►      │ the last tokens ──► next token ···

A request that has generated tokens is first *prepared*: its next core gets a request for no tokens over all full
blocks, and fetches them from the old core or computes them, while the old core continues decoding. When another block
is full, the request is prepared again, which takes a few steps, and moves after its next token: only the few tokens
after that block are left to compute. If they do not become few, the request moves nevertheless. A request that can't be
prepared (n > 1) moves without, and its new core fetches its blocks then.

Requests are prepared a few at a time, until all are; then they move a few at a time, because each arrival lengthens a
step of all requests on the new core. No request moves while others are prepared for the first time: it would wait for
them.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Protocol

from tokenmill.engine.messages import Abort, Submit
from tokenmill.engine.replica import Preparation, Replica, RequestRun, Route
from tokenmill.engine.roles import may_be_prefilled, prepared_request
from tokenmill.types import Request, SequenceOutput

EMPTY_TIMEOUT_S = 2.0  # how long a core that is about to end waits until other cores have its requests' blocks
EMPTY_CHECK_S = 0.005
MOVE_DIVISOR = 16  # at most 1/16 of a core's requests move at the same time (but at least one)
PREPARED_PER_MOVE = 2  # this many times as many are prepared at the same time, or move once few tokens are left
MAX_TOKENS_LEFT = 8  # a request moves when at most this many tokens are left to compute on the next core
MAX_TOKENS_PAST_BLOCK = 2  # a request is prepared again at most this many tokens after a full block
MAX_REPEATED = 4  # preparations after the first one; then the request moves, however many tokens are left
MIN_FETCHED_BLOCKS = 3  # fewer unprepared blocks than this are computed rather than fetched: a fetch takes a step

_preparation_numbers = count(1)


class RequestPlacement(Protocol):
    """The part of `Replicas` that assigns requests to cores."""

    def withdraw(self, run: RequestRun, replica: Replica, *, tell_core: bool) -> None: ...

    def park(self, run: RequestRun) -> None: ...

    def place_parked(self) -> None: ...

    def can_take(self, replica: Replica, request: Request) -> bool: ...

    def assign(self, run: RequestRun, route: Route, num_uncached: int) -> None: ...

    def route_of_answer(self, request: Request) -> Route | None: ...

    def block_address(self, source: Replica | None, replica: Replica) -> str: ...


class Moves:
    def __init__(self, replicas: RequestPlacement) -> None:
        self._replicas = replicas

    def continue_from(self, replica: Replica) -> None:
        """Move or prepare the next requests of a core, if it is being drained. Those without a token move at once."""
        if not replica.is_drained:
            return
        runs = list(replica.runs.values())
        max_moving = max(1, len(runs) // MOVE_DIVISOR)
        may_prepare = not replica.departing and not is_preparing(replica)
        num_prepared = 0
        for run in runs:
            if run.is_starting:
                self.move(run, replica)
            elif run is replica.probation or not self._may_be_prepared(run):
                if len(replica.departing) < 2 * max_moving:
                    self.move(run, replica)
            elif may_prepare and run.preparation is None and num_prepared < PREPARED_PER_MOVE * max_moving:
                if self._prepare(run, replica):
                    num_prepared += 1
                else:
                    self.move(run, replica)
        self._replicas.place_parked()

    def stay(self, replica: Replica) -> None:
        """Cancel the preparations of the requests that have not left yet: the core is in use again."""
        for run in replica.runs.values():
            self.forget(run)

    def move(self, run: RequestRun, replica: Replica) -> None:
        """Remove a request from its core; it continues on whichever core it is assigned to."""
        self._note_departure(run, replica)
        self._replicas.withdraw(run, replica, tell_core=True)
        self._replicas.park(run)

    async def empty(self, replica: Replica) -> None:
        """Remove all requests from a core that is about to end. Wait up to `EMPTY_TIMEOUT_S` until other cores have
        their blocks, unless no other core can accept them."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + EMPTY_TIMEOUT_S
        self.continue_from(replica)
        while (replica.runs or replica.departing) and loop.time() < ends_s:
            if any(run.replica is None for run in replica.departing):
                break
            await asyncio.sleep(EMPTY_CHECK_S)
        for run in list(replica.runs.values()):
            self.move(run, replica)
        self._replicas.place_parked()

    def _note_departure(self, run: RequestRun, replica: Replica) -> None:
        if not run.is_starting:
            run.moved_from = replica
            replica.departing.add(run)
        if replica.probation is run:
            replica.probation = None

    def note_moved(self, run: RequestRun) -> None:
        """Note that a moved request continues on another core or has ended, and move the next one."""
        replica, run.moved_from = run.moved_from, None
        if replica is not None:
            replica.departing.discard(run)
            self.continue_from(replica)

    # ── preparations ───────────────────────────────────────────────────────────────────────────────────

    def _may_be_prepared(self, run: RequestRun) -> bool:
        """Tell whether a request can be prepared: it has a single sequence, whose blocks another core can compute."""
        params = run.request.params
        return may_be_prefilled(run.request) and params.num_sequences == 1 and params.beam is None

    def _prepare(self, run: RequestRun, replica: Replica) -> bool:
        """Start preparing a request on another core; return False if none can accept it."""
        route = self._replicas.route_of_answer(run.buffer.output_processor.resumed_request())
        if route is None:
            return False
        run.preparation = Preparation(run, route)
        self._send_blocks(run.preparation, replica)
        return True

    def _send_blocks(self, preparation: Preparation, replica: Replica) -> None:
        """Let the next core of a request fetch or compute all its full blocks."""
        request = preparation.run.buffer.output_processor.resumed_request()
        target = preparation.route.replica
        preparation.core_id = core_id = f"{request.request_id}#prepared{next(_preparation_numbers)}"
        fetch_from = self._replicas.block_address(replica, target)
        prefill = prepared_request(request, core_id, target.info.block_size, fetch_from)
        preparation.num_tokens, preparation.is_done = len(prefill.prompt_token_ids), False
        target.preparations[core_id] = preparation
        target.send(Submit(prefill))

    def note_prepared(self, replica: Replica, output: SequenceOutput) -> None:
        """Process the output of a preparation. One that failed has prepared nothing and is not repeated."""
        if output.finish_reason is None:
            return
        preparation = replica.preparations.pop(output.request_id)
        preparation.is_done = True
        if output.finish_reason == "error":
            preparation.num_tokens, preparation.num_repeated = 0, MAX_REPEATED
        if preparation.run.replica is not None:
            self.continue_from(preparation.run.replica)

    def note_token(self, run: RequestRun, replica: Replica) -> None:
        """Move a request that has a new token, if all are prepared and few tokens are left to compute; or prepare it
        again."""
        preparation = run.preparation
        if preparation is None or not preparation.is_done or is_preparing(replica):
            return
        num_tokens = len(run.request.prompt_token_ids) + run.buffer.output_processor.num_completion_tokens
        num_left = num_tokens - preparation.num_tokens
        target = preparation.route.replica
        if num_left > MAX_TOKENS_LEFT and preparation.num_repeated < MAX_REPEATED and target.is_ready:
            num_past_block = (num_tokens - 1) % target.info.block_size
            if num_left >= target.info.block_size and num_past_block <= MAX_TOKENS_PAST_BLOCK:
                preparation.num_repeated += 1
                self._send_blocks(preparation, replica)
            return
        max_moving = max(1, len(replica.runs) // MOVE_DIVISOR)
        if len(replica.departing) >= max_moving * (PREPARED_PER_MOVE if num_left <= MAX_TOKENS_LEFT else 1):
            return
        self._note_departure(run, replica)
        self._replicas.withdraw(run, replica, tell_core=True)
        if num_left < MIN_FETCHED_BLOCKS * target.info.block_size:
            run.source = None
        if self._replicas.can_take(target, run.request):
            self._replicas.assign(run, preparation.route, num_left)
        else:
            self._replicas.park(run)
            self._replicas.place_parked()

    def forget(self, run: RequestRun) -> None:
        """Cancel the preparation of a request that stays, has ended, or moves to another core."""
        preparation, run.preparation = run.preparation, None
        if preparation is None or preparation.is_done:
            return
        target = preparation.route.replica
        if target.preparations.pop(preparation.core_id, None) is not None:
            target.send(Abort(preparation.core_id))

    def forget_all(self, preparations: list[Preparation]) -> None:
        """Discard the preparations of a dead core, and prepare their requests on other cores."""
        for preparation in preparations:
            run = preparation.run
            if run.preparation is preparation:
                run.preparation = None
                if run.replica is not None:
                    self.continue_from(run.replica)


def is_preparing(replica: Replica) -> bool:
    """Tell whether requests of a core are being prepared on other cores for the first time."""
    preparations = (run.preparation for run in replica.runs.values())
    return any(one is not None and not one.is_done and not one.num_repeated for one in preparations)
