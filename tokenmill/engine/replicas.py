"""Assigning requests to the engine cores of one model, and reassigning them when a core dies.

`Replicas` owns every engine core of one model (`replica.py`), usually one.

Tokens depend only on the request, so any core can continue a request: the front keeps the request and the tokens
generated so far (`OutputProcessor.resumed_request`), and sends both to another core, or to the same one once it has
been restarted. The client sees a pause.

Some requests crash the core that runs them, each time at the same token. So the deaths of a request's cores without a
token in between are counted. After two of them the request is a suspect: it runs alone on a core until its next token
arrives, and fails if that core dies too. The other requests of the dead cores continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenmill.engine.core_supervisor import MakeClient
from tokenmill.engine.messages import Abort, AdapterRead, Outputs, Submit
from tokenmill.engine.moves import Moves
from tokenmill.engine.replica import COUNTERS, GAUGES, Replica, RequestRun, Route, sum_stats
from tokenmill.engine.roles import MIN_PREFILL_TOKENS, Role, may_be_prefilled
from tokenmill.engine.status import CoreInfo, EngineStats, Health
from tokenmill.errors import EngineDead, InvalidRequest, RequestFailed, TokenmillError
from tokenmill.types import Request, SequenceOutput

MAX_DEATHS = 3  # of a request's cores, without a token in between: then the request fails
ROLES: tuple[Role, ...] = ("any", "prefill", "decode")


class Router(Protocol):
    """Chooses a core for each request, if there are several."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Route:
        """Choose one of these cores; each of them can accept the request."""
        ...

    def note_outputs(self, replica: Replica, message: Outputs) -> None: ...

    def note_ready(self, replica: Replica) -> None:
        """Note that a core was started or restarted, with an empty cache."""
        ...

    def note_end(self, run: RequestRun) -> None:
        """Note that a request has ended without an error."""
        ...


class FleetKeeper(Protocol):
    """A background service of a fleet, started and closed with its cores: the autoscaler, the listener for other
    machines."""

    async def start(self, replicas: Replicas) -> None:
        """Start, before the cores are started."""
        ...

    def note_open(self) -> None:
        """Note that the first cores are ready."""
        ...

    async def stop(self) -> None:
        """Stop, before the cores are ended."""
        ...

    async def close(self) -> None:
        """Close, after the cores have ended."""
        ...

    def set_limits(self, min_replicas: int, max_replicas: int) -> bool:
        """Set the limits of the number of running cores; return False if this keeper does not control it."""
        ...


DESCRIBED_STATS = (
    *("running", "waiting", "kv_blocks_used", "kv_blocks_total", "prefix_hit_tokens", "prefix_query_tokens"),
    *("steps", "failed_steps", "step_tokens", "busy_s", "preemptions", "engine_pid", "restarts"),
)
Deliver = Callable[[RequestRun, SequenceOutput], None]
Fail = Callable[[RequestRun, TokenmillError], None]


class Replicas:
    def __init__(
        self,
        makers: Sequence[MakeClient],
        *,
        deliver: Deliver,
        fail: Fail,
        on_ready: Callable[[Replica, CoreInfo], None],
        on_adapter: Callable[[Replica, AdapterRead], None],
        on_death: Callable[[Replica, TokenmillError], None],
        router: Router | None = None,
        roles: Sequence[Role] = (),
    ) -> None:
        """`makers`: the client factory of each core. `deliver` and `fail` get a request's outputs and its failure, the
        other callbacks a core's events. `router`: None only for a single core. `roles`: the role of each core, by
        default any."""
        assert router is not None or len(makers) == 1
        labels = [f"replica {index}: " if len(makers) > 1 else "" for index in range(len(makers))]
        self.all = [Replica(index, make_client, self, labels[index]) for index, make_client in enumerate(makers)]
        for replica, role in zip(self.all, roles, strict=False):
            replica.role = role
        self._has_roles = any(replica.role != "any" for replica in self.all)
        self.num_resumed = 0
        self._deliver, self._fail = deliver, fail
        self._on_ready, self._on_adapter, self._on_death = on_ready, on_adapter, on_death
        self._router = router
        # Called when no core can accept a request now. Set by the autoscaler, which starts stopped cores.
        self.on_waiting: Callable[[], None] | None = None
        self.on_arrival: Callable[[], None] | None = None  # called with each new request
        # Maps the addresses of two cores to the address at which the first can fetch blocks of the second. Set by the
        # listener for other machines.
        self.block_route: Callable[[str, str], str] = lambda asking, source: source
        self._parked: list[RequestRun] = []  # requests without a core, in the order in which they will be assigned
        self._is_draining = False
        self._moves = Moves(self)

    async def open(self, num_replicas: int) -> None:
        """Start the first cores and wait until they are ready; raise the error of one that can't start."""
        await asyncio.gather(*(replica.supervisor.open() for replica in self.all[:num_replicas]))

    @property
    def num_parked(self) -> int:
        """The number of requests that wait for a core."""
        return len(self._parked)

    async def start(self, replica: Replica) -> None:
        """Start a stopped core; raise the error if it can't start. Once it is ready, requests that other cores have
        not started are assigned anew, with this core among the candidates."""
        try:
            await replica.supervisor.open()
        except (TokenmillError, OSError) as problem:
            await replica.supervisor.stop(f"it could not be started: {problem}")
            raise
        self._spread()

    async def stop(self, replica: Replica, why: str = "") -> None:
        """End a core. Its requests continue on other cores, or wait for one."""
        was_drained, replica.is_drained = replica.is_drained, True
        try:
            await self._moves.empty(replica)
            await replica.supervisor.stop(why)
        finally:
            replica.is_drained = was_drained

    def _spread(self) -> None:
        """Reassign the requests that wait behind others on their cores."""
        waiting = []
        for replica in self.all:
            starting = sorted((run for run in replica.runs.values() if run.is_starting), key=lambda run: run.placed_s)
            waiting += [(run.placed_s, replica, run) for run in starting[1:] if run is not replica.probation]
        for _, replica, run in sorted(waiting, key=lambda one: one[0]):
            self.withdraw(run, replica, tell_core=True)
            self._parked.append(run)
        self.place_parked()

    async def close(self) -> None:
        await asyncio.gather(*(replica.supervisor.close() for replica in self.all))

    def drain(self) -> None:
        self._is_draining = True

    def set_drained(self, replica: Replica, is_drained: bool) -> None:
        """Assign no more requests to a core and move its requests to other cores; or put it back into use. The last
        core in use can't be drained."""
        if is_drained and not any(one.is_ready and not one.is_drained for one in self.all if one is not replica):
            raise InvalidRequest("no other engine process can take over its requests", param="replica")
        replica.is_drained = is_drained
        if is_drained:
            self._moves.continue_from(replica)
        else:
            self._moves.stay(replica)
        self.place_parked()

    async def restart(self, replica: Replica) -> None:
        """Replace a running core by a new one; return once it is ready. Its requests continue on other cores, or wait
        for the new one if it is the only one."""
        was_drained, replica.is_drained = replica.is_drained, True
        try:
            await self._moves.empty(replica)
            await replica.supervisor.restart()
        finally:
            replica.is_drained = was_drained
            self.place_parked()

    @property
    def health(self) -> Health:
        """The best state among the cores: ready if one is ready."""
        if self._is_draining and not all(replica.supervisor.is_given_up for replica in self.all):
            return Health("draining", "finishing running requests")
        order = ("ready", "stalled", "loading", "draining", "stopped", "dead")
        best = min((replica.health for replica in self.all), key=lambda health: order.index(health.state))
        if self.on_waiting is not None and best.state in ("loading", "stopped"):
            return Health("ready", "requests wait for an engine process to start")
        return best

    def stats(self) -> EngineStats:
        """Return the statistics of all cores together."""
        each = [replica.totals() for replica in self.all]
        sums = sum_stats(each, (*GAUGES, *COUNTERS, "restarts"))
        return EngineStats(engine_pid=each[0].engine_pid, resumed=self.num_resumed, **sums)

    def describe(self) -> list[dict[str, Any]]:
        """Return a description of each core's state, for monitoring."""
        totals = {replica.index: replica.totals() for replica in self.all}
        return [
            {
                "replica": replica.index,
                "state": replica.health.state,
                "detail": replica.health.detail,
                "is_drained": replica.is_drained,
                "role": replica.role,
                "place": replica.place,
                "requests": len(replica.runs),
                "prefill_tokens": replica.num_prefilling,
                "num_placed": replica.num_placed,
                **{name: getattr(totals[replica.index], name) for name in DESCRIBED_STATS},
            }
            for replica in self.all
        ]

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────

    def submit(self, run: RequestRun) -> None:
        """Assign a request to a core, or let it wait for one."""
        if self.on_arrival is not None:
            self.on_arrival()
        if not self._place(run):
            self._parked.append(run)
            if self.on_waiting is not None:
                self.on_waiting()

    def forget(self, run: RequestRun, *, tell_core: bool) -> None:
        """Remove a request that has ended."""
        self._moves.note_moved(run)
        replica = run.replica
        if replica is None:
            if run in self._parked:
                self._parked.remove(run)
                self.place_parked()  # a core may have been reserved for it
            return
        if self._router is not None and not tell_core:
            self._router.note_end(run)
        self.withdraw(run, replica, tell_core=tell_core)
        if replica.probation is run:
            replica.probation = None
        self._moves.continue_from(replica)
        if self._parked:
            self.place_parked()

    def withdraw(self, run: RequestRun, replica: Replica, *, tell_core: bool) -> None:
        """Remove a request from its core. Later outputs of that core for it are ignored."""
        self._moves.forget(run)
        replica.runs.pop(run.core_id, None)
        replica.num_sequences -= run.request.params.num_sequences
        if tell_core:
            replica.send(Abort(run.core_id))
        if run.is_starting:
            replica.num_prefilling -= run.num_uncached
        run.replica, run.source, run.is_starting, run.is_prefilling = None, replica, False, False

    def place_parked(self) -> None:
        """Assign waiting requests to cores that can accept them, suspects first."""
        for run in [run for run in self._parked if run.is_suspect]:
            self._place(run)
        if not any(run.is_suspect for run in self._parked if run.replica is None):
            for replica in self.all:
                replica.is_reserved = False
        for run in [run for run in self._parked if run.replica is None and not run.is_suspect]:
            self._place(run)
        self._parked = [run for run in self._parked if run.replica is None]
        if all(replica.supervisor.is_given_up for replica in self.all):
            parked, self._parked = self._parked, []
            for run in parked:
                self._fail(run, EngineDead(self.health.detail or "the engine is dead"))

    def fail_parked(self, is_hopeless: Callable[[RequestRun], bool], error: TokenmillError) -> None:
        """Fail waiting requests that no core will ever accept."""
        for run in [run for run in self._parked if is_hopeless(run)]:
            self._parked.remove(run)
            self._fail(run, error)

    def _place(self, run: RequestRun) -> bool:
        """Assign a request to a core; return False if none can accept it now."""
        route = self._route_of_suspect(run) if run.is_suspect else self._route_by_role(run)
        if route is None:
            return False
        if run.is_suspect:
            route.replica.probation, route.replica.is_reserved = run, False
        self.assign(run, route, route.num_uncached + run.buffer.output_processor.num_completion_tokens)
        return True

    def assign(self, run: RequestRun, route: Route, num_uncached: int) -> None:
        """Assign a request to a core that can accept it. `num_uncached`: tokens to be computed there first."""
        replica = route.replica
        run.replica, run.why, run.is_starting, run.num_uncached = replica, route.why, True, num_uncached
        run.num_placed, run.placed_s = run.num_placed + 1, asyncio.get_running_loop().time()
        replica.num_placed[route.why] += 1
        replica.num_sequences += run.request.params.num_sequences
        replica.num_prefilling += run.num_uncached
        replica.runs[run.core_id] = run
        self.num_resumed += run.num_placed > 1 + run.was_prefilled
        replica.send(Submit(run.for_core(self.block_address(run.source or route.source, replica))))

    def park(self, run: RequestRun) -> None:
        """Queue a request for `place_parked`."""
        self._parked.append(run)

    def block_address(self, source: Replica | None, replica: Replica) -> str:
        """Return the address at which a core can fetch blocks of another core; empty if it can't."""
        if source is None or source is replica or not source.is_ready:
            return ""
        return self.block_route(replica.info.block_address, source.info.block_address)

    def _route_by_role(self, run: RequestRun) -> Route | None:
        """Choose a core for a request, or for its prompt only if that is too long for a core that decodes."""
        if not self._has_roles:
            return self._route(run.request)
        route = self.route_of_answer(run.request)
        if route is None or route.replica.role != "decode" or route.num_uncached < MIN_PREFILL_TOKENS:
            return route
        if run.was_prefilled or not may_be_prefilled(run.request):
            return route
        prefilling = self._route(run.request, ("any", "prefill"))
        if prefilling is None:
            return route
        run.is_prefilling = True
        return prefilling._replace(why="prefill")

    def route_of_answer(self, request: Request) -> Route | None:
        """Choose a core for a request whose prompt is already computed, or will be computed there."""
        return self._route(request, ("any", "decode")) or self._route(request)

    def _route(self, request: Request, roles: tuple[Role, ...] = ROLES) -> Route | None:
        if self._router is None:
            only = self.all[0]
            return Route(only, "only") if self.can_take(only, request) else None
        able = [one for one in self.all if one.role in roles and self.can_take(one, request)]
        return self._router.choose(request, able) if able else None

    def can_take(self, replica: Replica, request: Request) -> bool:
        if not replica.is_ready or replica.probation is not None or replica.is_reserved or replica.is_drained:
            return False
        return not request.adapter or request.adapter in replica.adapters.values()

    def _route_of_suspect(self, run: RequestRun) -> Route | None:
        """Choose a core without requests; if there is none and none is starting, reserve one for the suspect."""
        able = [one for one in self.all if one.is_ready and one.probation is None and not one.is_drained]
        if run.request.adapter:
            able = [replica for replica in able if run.request.adapter in replica.adapters.values()]
        is_coming = any(not one.is_ready and not one.supervisor.is_given_up for one in self.all)
        others_wait = any(one.replica is None and not one.is_suspect for one in self._parked)
        if is_coming and len(able) == 1 and others_wait:
            return None  # the only core is theirs until another one is there
        for replica in able:
            if not replica.runs:
                return Route(replica, "suspect", len(run.request.prompt_token_ids))
        if able and not is_coming and not any(replica.is_reserved for replica in self.all):
            min(able, key=lambda replica: len(replica.runs)).is_reserved = True
        return None

    # ── events of the cores ────────────────────────────────────────────────────────────────────────────

    def note_ready(self, replica: Replica, info: CoreInfo) -> None:
        if self._router is not None:
            self._router.note_ready(replica)
        self._on_ready(replica, info)
        self.place_parked()

    def note_message(self, replica: Replica, message: Outputs | AdapterRead) -> None:
        if isinstance(message, AdapterRead):
            self._on_adapter(replica, message)
            self.place_parked()
            return
        replica.stats = message.stats
        if self._router is not None:
            self._router.note_outputs(replica, message)
        runs, deliver = replica.runs, self._deliver
        for output in message.outputs:
            run = runs.get(output.request_id)
            if run is None:
                if output.request_id in replica.preparations:
                    self._moves.note_prepared(replica, output)
                continue  # otherwise it was aborted in the meantime
            if run.is_prefilling:
                self._note_prefilled(run, replica, output)
                continue
            deliver(run, output)
            if run.is_starting:
                self._note_started(run, replica)
            elif run.preparation is not None:
                self._moves.note_token(run, replica)

    def _note_prefilled(self, run: RequestRun, replica: Replica, output: SequenceOutput) -> None:
        """Move a request whose prefill core is done, or has failed, to a core that decodes."""
        if output.finish_reason is None:
            return
        self.withdraw(run, replica, tell_core=False)
        run.was_prefilled = True
        if not self._place(run):
            self._parked.append(run)

    def _note_started(self, run: RequestRun, replica: Replica) -> None:
        """Note a request's first output from a core: it is no longer a suspect, and the next suspect may start."""
        run.is_starting = False
        replica.num_prefilling -= run.num_uncached
        self._moves.note_moved(run)
        if replica.probation is not run:
            return
        replica.probation, run.num_deaths = None, 1
        if any(other.is_suspect for other in self._parked):
            self.withdraw(run, replica, tell_core=True)
            self._parked.append(run)
        self.place_parked()

    def note_stall(self, replica: Replica) -> None:
        """Move the requests of a core that gives no sign of life to others that can take them. A stall counts like a
        death: a request that makes cores hang is found in the same way. What the core still computes of them, if it
        comes back, is aborted."""
        probation, replica.probation = replica.probation, None
        for run in list(replica.runs.values()):
            if run is probation or any(self.can_take(other, run.request) for other in self.all):
                self.withdraw(run, replica, tell_core=True)
                self._resume(run, replica.health.detail)
        self.place_parked()

    def note_death(self, replica: Replica, error: TokenmillError) -> None:
        self._on_death(replica, error)
        preparations, runs = list(replica.preparations.values()), replica.forget_core()
        for run in runs:
            self._moves.forget(run)
            if replica.supervisor.is_closed:
                self._fail(run, error)
            else:
                self._resume(run, error.message)
        self._moves.forget_all(preparations)
        self.place_parked()

    def _resume(self, run: RequestRun, why: str) -> None:
        """Let a request wait for another core after its core has died or stalled, or fail it after `MAX_DEATHS`."""
        run.note_death()
        self._moves.note_moved(run)
        if run.num_deaths >= MAX_DEATHS:
            deaths = f"{run.num_deaths} engine processes died while computing this request"
            self._fail(run, RequestFailed(f"{deaths}, the last of them running nothing else: {why}"))
        else:
            self._parked.append(run)
