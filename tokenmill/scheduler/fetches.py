"""Running groups that wait for blocks which are fetched from tiers instead of computed.

A group that is admitted may find more of its leader's tokens elsewhere (a folder, host memory, another core) than in
the pool. It is then *arriving*: it counts as running and has its row, but wants no tokens until its blocks have arrived
or the fetch has failed. Other groups are planned meanwhile.

    admitted ──► asked: who has what? ──► loading into blocks of the pool ──► registered, the table opens on them
                      │ none, or computing is faster                      │ damaged, late
                      └───────────────► it wants those tokens ◄───────────┘

For a request that is moved here, or prepared for that, no tier is asked: the core that computes it has its blocks.

Whether to fetch is decided by measured seconds. A late fetch is not waited for: its blocks are released when its thread
is done with them, and those that have arrived by then are in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.kv.blocks import BlockTable
from tokenmill.kv.cache import KVCache, PrefixMatch
from tokenmill.kv.names import Fetch, Fetcher
from tokenmill.scheduler.request import SequenceGroup
from tokenmill.scheduler.running import RunningSet
from tokenmill.scheduler.stats import Counters
from tokenmill.scheduler.step_time import StepTime

LATE = 2.0  # times what computing would take, after which a fetch is not waited for
LATE_S = 0.5  # ... and so much more
UNKNOWN_S = 10.0  # that a fetch may take where it is not known yet how long computing takes


@dataclass(eq=False)
class Arrival:
    """A group whose blocks are being fetched."""

    group: SequenceGroup
    fetch: Fetch
    hashes: list[bytes]
    limit: int  # blocks that the leader could use
    start: int  # tokens that it has
    late_s: float  # when it is not waited for any longer
    table: BlockTable | None = None  # holds the blocks while they are loaded

    @property
    def is_awaited(self) -> bool:
        """False once the group has gone, or goes on without its blocks."""
        return self.group.arriving is self


class Fetches:
    def __init__(
        self,
        cache: KVCache,
        running: RunningSet,
        fetcher: Fetcher | None,
        step_time: StepTime,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        """`fetcher`: None where blocks are kept in the pool alone."""
        self._cache = cache
        self._running = running
        self._fetcher = fetcher
        self._step_time = step_time
        self._counters = counters
        self._clock = clock
        self._arrivals: list[Arrival] = []

    def __len__(self) -> int:
        return len(self._arrivals)

    def wait(self, patience_s: float) -> None:
        """Wait for something to arrive."""
        assert self._fetcher is not None
        self._fetcher.wait(patience_s)

    def start(self, group: SequenceGroup, match: PrefixMatch) -> None:
        """Ask for what a group that was just admitted has not found in the pool."""
        fetcher, leader, request = self._fetcher, group.leader, group.state.request
        if fetcher is None or not (fetcher.has_tiers or request.fetch_from):
            return
        limit = min(group.target(leader), len(leader.window) - 1) // self._cache.block_size
        first = match.num_tokens // self._cache.block_size
        if first >= limit or not group.state.may_reuse_prefix or not self._cache.prefix_caching:
            return
        hashes = leader.chain.extend(leader.window, limit)
        fetch = Fetch(self._cache.absent(hashes, first, limit), request.fetch_from)
        late_s = self._clock() + UNKNOWN_S
        group.arriving = arrival = Arrival(group, fetch, hashes, limit, match.num_tokens, late_s)
        self._arrivals.append(arrival)
        if request.fetch_from and (request.given or not request.max_tokens):  # that core computes it, or did until now
            fetcher.expect(fetch)
            self._load(arrival)
        else:
            fetcher.ask(fetch)

    def advance(self) -> None:
        """Take in what threads have found and brought."""
        assert self._fetcher is not None
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            if self._is_open(arrival):
                self._arrivals.append(arrival)
            else:
                self._fetcher.end(arrival.fetch)

    def _is_open(self, arrival: Arrival) -> bool:
        """Move an arrival on; False: it is over."""
        if arrival.is_awaited and self._clock() > arrival.late_s:
            self._go_on(arrival)
        if arrival.table is not None:
            if arrival.fetch.is_loaded:
                self._take_in(arrival, arrival.table)
            return not arrival.fetch.is_loaded
        if not arrival.is_awaited:
            return False
        if not arrival.fetch.is_asked:
            return True
        if not self._load(arrival):
            self._go_on(arrival)
            return False
        return True

    def _load(self, arrival: Arrival) -> bool:
        """Begin to bring the blocks that were found; False: there are none, or it is not worth it."""
        cache, fetch, fetcher = self._cache, arrival.fetch, self._fetcher
        assert fetcher is not None
        num_blocks = cache.num_with(arrival.hashes, arrival.limit, fetch.found)
        num_tokens = num_blocks * cache.block_size - arrival.start
        if num_tokens <= 0:
            return False
        compute_s = num_tokens * self._step_time.token_s(arrival.start + num_tokens // 2)
        needed = cache.absent(arrival.hashes, num_blocks, num_blocks)
        is_known = self._step_time.is_known
        if is_known and fetcher.seconds({name: fetch.found[name] for name in needed}) > compute_s:
            return False
        opened = cache.open_absent(arrival.hashes, num_blocks, arrival.group.state.account.tenant.id)
        if opened is None:
            return False
        arrival.table, fetch.targets = opened
        self._running.loading.append(arrival.table)
        arrival.late_s = self._clock() + (LATE * compute_s + LATE_S if is_known else UNKNOWN_S)
        fetcher.load(fetch)
        return True

    def _take_in(self, arrival: Arrival, table: BlockTable) -> None:
        """Register what has arrived, let the group go on with it, and give back the blocks of what has not."""
        for name, block in arrival.fetch.targets:
            if name in arrival.fetch.arrived:
                self._cache.prefix.register(name.group, name.block_hash, block)
        if arrival.is_awaited:
            self._go_on(arrival)
        self._running.loading.remove(table)
        self._cache.release(table)

    def _go_on(self, arrival: Arrival) -> None:
        """Let a group go on with what is in the pool by now."""
        group, leader = arrival.group, arrival.group.leader
        group.arriving = None
        match = self._cache.match(leader.window, leader.chain, min(group.target(leader), len(leader.window) - 1))
        gained = match.num_tokens - leader.computed
        if gained > 0:
            self._running.reopen(leader, match)
            self._counters.prefix_hit_tokens += gained
            self._counters.fetched_tokens += gained
            if not leader.has_emitted and not leader.num_outputs:
                group.state.num_cached_tokens = match.num_tokens
        if not group.wants(leader):
            self._running.fork_pending(group)
