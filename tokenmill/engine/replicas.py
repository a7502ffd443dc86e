"""The cores of one model behind one front: which core works on which request, and what becomes of a request when its
core dies.

`Replicas` has all cores of a model (`replica.py`), mostly one: it places requests, and places them again after a death.

Tokens depend on nothing but the request, so a core can go on where another has ended: the front keeps the whole
request and all that was given of it (`OutputProcessor.resumed_request`), and sends both to another core, or to the same
one once it is back. Its client sees a pause.

A request can be what kills cores. It then dies at the same place again and again, so deaths without a token in between
are counted for each request. After two of them it is a suspect: it runs on a core of its own until its next token has
come, or fails when it kills that one too. All others that shared its cores go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenmill.engine.core_supervisor import MakeClient
from tokenmill.engine.messages import Abort, AdapterRead, Outputs, Submit
from tokenmill.engine.moves import Moves
from tokenmill.engine.replica import NOW, TOTALS, Replica, RequestRun, Route, added
from tokenmill.engine.roles import LEAST_PREFILLED, Role, may_be_prefilled
from tokenmill.engine.status import CoreInfo, EngineStats, Health
from tokenmill.errors import EngineDead, InvalidRequest, RequestFailed, TokenmillError
from tokenmill.types import Request, SequenceOutput

MOST_DEATHS = 3
ROLES: tuple[Role, ...] = ("any", "prefill", "decode")


class Router(Protocol):
    """The rule by which requests are given to cores, where there are several."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Route:
        """Choose one of these cores, each of which could take the request."""
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

    def allow(self, least: int, most: int) -> bool:
        """Let there be so many cores; False: that is not its business."""
        ...


SHOWN = (
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
        """`makers`: one for each core. `deliver` and `fail` are told what comes of a request, the others what comes of
        a core. `router`: None only where there is one core. `roles`: of each core, by default any."""
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
        # Called when a request waits that no core can take now. Set by the autoscaler, which starts stopped cores.
        self.on_waiting: Callable[[], None] | None = None
        self.on_arrival: Callable[[], None] | None = None  # called with each new request
        # How a core reaches another one's blocks, by both addresses. Set by the listener for other machines.
        self.block_route: Callable[[str, str], str] = lambda asking, source: source
        self._parked: list[RequestRun] = []  # without a core, in the order in which they are placed
        self._is_draining = False
        self._moves = Moves(self)

    async def open(self, num_replicas: int) -> None:
        """Start the first cores and wait until they are ready; what keeps one from that is raised."""
        await asyncio.gather(*(replica.supervisor.open() for replica in self.all[:num_replicas]))

    @property
    def num_parked(self) -> int:
        """Requests that wait for a core."""
        return len(self._parked)

    async def start(self, replica: Replica) -> None:
        """Start a core that is stopped; what keeps it from that is raised. Requests that other cores have not begun
        with are placed again once it is ready, since they were placed without it."""
        try:
            await replica.supervisor.open()
        except (TokenmillError, OSError) as problem:
            await replica.supervisor.stop(f"it could not be started: {problem}")
            raise
        self._spread()

    async def stop(self, replica: Replica, why: str = "") -> None:
        """End a core. Its requests go on in others, or wait for one."""
        was_kept_free, replica.is_kept_free = replica.is_kept_free, True
        try:
            await self._moves.empty(replica)
            await replica.supervisor.stop(why)
        finally:
            replica.is_kept_free = was_kept_free

    def _spread(self) -> None:
        """Place requests again that wait behind others on their cores."""
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

    def keep_free(self, replica: Replica, is_kept_free: bool) -> None:
        """Give a core no more requests, and those that it has to other cores; or let it work again. The last core that
        works can't be kept free."""
        if is_kept_free and not any(one.is_ready and not one.is_kept_free for one in self.all if one is not replica):
            raise InvalidRequest("no other engine process could take its requests", param="replica")
        replica.is_kept_free = is_kept_free
        if is_kept_free:
            self._moves.continue_from(replica)
        else:
            self._moves.stay(replica)
        self.place_parked()

    async def restart(self, replica: Replica) -> None:
        """Start a new core in place of one that runs. Its requests go on elsewhere, or wait for it if it is the only
        one; return once it is ready."""
        was_kept_free, replica.is_kept_free = replica.is_kept_free, True
        try:
            await self._moves.empty(replica)
            await replica.supervisor.restart()
        finally:
            replica.is_kept_free = was_kept_free
            self.place_parked()

    @property
    def health(self) -> Health:
        """Ready while one core is; otherwise the state of the one that is nearest to it."""
        if self._is_draining and not all(replica.supervisor.is_given_up for replica in self.all):
            return Health("draining", "finishing running requests")
        order = ("ready", "stalled", "loading", "draining", "stopped", "dead")
        best = min((replica.health for replica in self.all), key=lambda health: order.index(health.state))
        if self.on_waiting is not None and best.state in ("loading", "stopped"):
            return Health("ready", "requests wait until an engine process is started")
        return best

    def stats(self) -> EngineStats:
        """Statistics of all cores together."""
        each = [replica.totals() for replica in self.all]
        sums = added(each, (*NOW, *TOTALS, "restarts"))
        return EngineStats(engine_pid=each[0].engine_pid, resumed=self.num_resumed, **sums)

    def described(self) -> list[dict[str, Any]]:
        """Return a description of each core's state, for monitoring."""
        totals = {replica.index: replica.totals() for replica in self.all}
        return [
            {
                "replica": replica.index,
                "state": replica.health.state,
                "detail": replica.health.detail,
                "is_drained": replica.is_kept_free,
                "role": replica.role,
                "place": replica.place,
                "requests": len(replica.runs),
                "prefill_tokens": replica.num_prefilling,
                "num_placed": replica.num_placed,
                **{name: getattr(totals[replica.index], name) for name in SHOWN},
            }
            for replica in self.all
        ]

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────

    def submit(self, run: RequestRun) -> None:
        """Give a request to a core, or let it wait for one."""
        if self.on_arrival is not None:
            self.on_arrival()
        if not self._place(run):
            self._parked.append(run)
            if self.on_waiting is not None:
                self.on_waiting()

    def forget(self, run: RequestRun, *, tell_core: bool) -> None:
        """Let go of a request that is over."""
        self._moves.note_moved(run)
        replica = run.replica
        if replica is None:
            if run in self._parked:
                self._parked.remove(run)
                self.place_parked()  # a core may have been kept for it
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
        """Take a request from a core. What that core still says of it does not count."""
        self._moves.forget(run)
        replica.runs.pop(run.core_id, None)
        replica.num_sequences -= run.request.params.num_sequences
        if tell_core:
            replica.send(Abort(run.core_id))
        if run.is_starting:
            replica.num_prefilling -= run.num_uncached
        run.replica, run.source, run.is_starting, run.is_prefilling = None, replica, False, False

    def place_parked(self) -> None:
        """Give waiting requests to cores that can take them, suspects first."""
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
        """Fail waiting requests that no core will ever take."""
        for run in [run for run in self._parked if is_hopeless(run)]:
            self._parked.remove(run)
            self._fail(run, error)

    def _place(self, run: RequestRun) -> bool:
        """Give a request to a core; False: none can take it now."""
        route = self._route_of_suspect(run) if run.is_suspect else self._route_by_role(run)
        if route is None:
            return False
        if run.is_suspect:
            route.replica.probation, route.replica.is_reserved = run, False
        self.give(run, route, route.num_uncached + run.buffer.output_processor.num_completion_tokens)
        return True

    def give(self, run: RequestRun, route: Route, num_uncached: int) -> None:
        """Give a request to a core that can take it. `num_uncached`: tokens that it has to compute there first."""
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
        """Let a request wait for `place_parked`."""
        self._parked.append(run)

    def block_address(self, source: Replica | None, replica: Replica) -> str:
        """Return the address at which a core can fetch another one's blocks; empty: none."""
        if source is None or source is replica or not source.is_ready:
            return ""
        return self.block_route(replica.info.block_address, source.info.block_address)

    def _route_by_role(self, run: RequestRun) -> Route | None:
        """A core for a request, or for its prompt alone, where it would be a long one for a core that decodes."""
        if not self._has_roles:
            return self._route(run.request)
        route = self.route_of_answer(run.request)
        if route is None or route.replica.role != "decode" or route.num_uncached < LEAST_PREFILLED:
            return route
        if run.was_prefilled or not may_be_prefilled(run.request):
            return route
        prefilling = self._route(run.request, ("any", "prefill"))
        if prefilling is None:
            return route
        run.is_prefilling = True
        return prefilling._replace(why="prefill")

    def route_of_answer(self, request: Request) -> Route | None:
        """Return a core for a request whose prompt is computed already, or is to be computed there."""
        return self._route(request, ("any", "decode")) or self._route(request)

    def _route(self, request: Request, roles: tuple[Role, ...] = ROLES) -> Route | None:
        if self._router is None:
            only = self.all[0]
            return Route(only, "only") if self.can_take(only, request) else None
        able = [one for one in self.all if one.role in roles and self.can_take(one, request)]
        return self._router.choose(request, able) if able else None

    def can_take(self, replica: Replica, request: Request) -> bool:
        if not replica.is_ready or replica.probation is not None or replica.is_reserved or replica.is_kept_free:
            return False
        return not request.adapter or request.adapter in replica.adapters.values()

    def _route_of_suspect(self, run: RequestRun) -> Route | None:
        """A core without requests; where there will be none, one gets no more of them from now on."""
        able = [one for one in self.all if one.is_ready and one.probation is None and not one.is_kept_free]
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

    # ── what cores say ─────────────────────────────────────────────────────────────────────────────────

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
                continue  # else it was aborted meanwhile
            if run.is_prefilling:
                self._note_prefilled(run, replica, output)
                continue
            deliver(run, output)
            if run.is_starting:
                self._note_started(run, replica)
            elif run.preparation is not None:
                self._moves.note_token(run, replica)

    def _note_prefilled(self, run: RequestRun, replica: Replica, output: SequenceOutput) -> None:
        """Hand a request whose prompt was computed elsewhere, or could not be, to a core that decodes."""
        if output.finish_reason is None:
            return
        self.withdraw(run, replica, tell_core=False)
        run.was_prefilled = True
        if not self._place(run):
            self._parked.append(run)

    def _note_started(self, run: RequestRun, replica: Replica) -> None:
        """Note a request's first output: it is no longer suspected of ending cores, and the next one may start."""
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
        """Let a request wait for another core than the one that has died or hung, or fail where too many have."""
        run.note_death()
        self._moves.note_moved(run)
        if run.num_deaths >= MOST_DEATHS:
            deaths = f"{run.num_deaths} engine processes that computed this request have died"
            self._fail(run, RequestFailed(f"{deaths}, the last one with nothing else to do: {why}"))
        else:
            self._parked.append(run)
