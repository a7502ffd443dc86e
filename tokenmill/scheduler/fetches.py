"""Running groups that wait for KV blocks which are fetched from tiers instead of computed.

For an admitted group, a tier (a folder, host memory, another core) may have more of its leader's blocks than the pool.
The group then has a *pending fetch*: it counts as running and has its row, but wants no tokens until its blocks have
arrived or the fetch has failed. Other groups are planned meanwhile.

    admitted ──► look the blocks up ──► load them into blocks of the pool ──► register them, reopen the block table
                      │ none found, or computing is faster                │ damaged, late
                      └───────────────► compute those tokens ◄────────────┘

For a request that is moved here, or prepared for a move, no lookup is made: the core that computes it has its blocks.

Measured times decide whether to fetch. A late fetch is not waited for: its blocks are released when its thread is done
with them, and those that have arrived by then are in the prefix cache.
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

# A fetch is late after LATE_FACTOR times the estimated time to compute its tokens, plus LATE_S.
LATE_FACTOR = 2.0
LATE_S = 0.5
DEFAULT_LIMIT_S = 10.0  # used while the time to compute tokens is not known yet


@dataclass(eq=False)
class PendingFetch:
    """The fetch of a group's blocks."""

    group: SequenceGroup
    fetch: Fetch
    hashes: list[bytes]
    limit: int  # the most blocks that the leader can use
    start: int  # tokens of the leader that are already in the pool
    late_s: float  # the time after which the group does not wait for it
    table: BlockTable | None = None  # holds the blocks while they are loaded

    @property
    def is_awaited(self) -> bool:
        """False once the group has ended, or continues without the blocks."""
        return self.group.pending_fetch is self


class Fetches:
    def __init__(
        self,
        cache: KVCache,
        running: RunningSet,
        fetcher: Fetcher,
        step_time: StepTime,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._running = running
        self._fetcher = fetcher
        self._step_time = step_time
        self._counters = counters
        self._clock = clock
        self._pending: list[PendingFetch] = []

    def __len__(self) -> int:
        return len(self._pending)

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the progress of a fetch."""
        self._fetcher.wait(timeout_s)

    def start(self, group: SequenceGroup, match: PrefixMatch) -> None:
        """Start fetching the blocks that a newly admitted group has not found in the pool."""
        fetcher, leader, request = self._fetcher, group.leader, group.state.request
        if not (fetcher.has_tiers or request.fetch_from):
            return
        limit = min(group.target(leader), len(leader.window) - 1) // self._cache.block_size
        first = match.num_tokens // self._cache.block_size
        if first >= limit or not group.state.may_reuse_prefix or not self._cache.prefix_caching:
            return
        hashes = leader.chain.extend(leader.window, limit)
        fetch = Fetch(self._cache.absent(hashes, first, limit), request.fetch_from)
        late_s = self._clock() + DEFAULT_LIMIT_S
        group.pending_fetch = pending = PendingFetch(group, fetch, hashes, limit, match.num_tokens, late_s)
        self._pending.append(pending)
        is_computed_there = bool(request.progress) or not request.max_tokens  # moved, or prepared for a move
        if request.fetch_from and is_computed_there:
            fetcher.expect(fetch)
            self._load(pending)
        else:
            fetcher.look_up(fetch)

    def advance(self) -> None:
        """Process the progress that the fetching threads have made."""
        all_pending, self._pending = self._pending, []
        for pending in all_pending:
            if self._advance_one(pending):
                self._pending.append(pending)
            else:
                self._fetcher.end(pending.fetch)

    def _advance_one(self, pending: PendingFetch) -> bool:
        """Advance a fetch to its next stage; return False once it has ended."""
        if pending.is_awaited and self._clock() > pending.late_s:
            self._resume_group(pending)
        if pending.table is not None:
            if pending.fetch.is_loaded:
                self._register(pending, pending.table)
            return not pending.fetch.is_loaded
        if not pending.is_awaited:
            return False
        if not pending.fetch.is_looked_up:
            return True
        if not self._load(pending):
            self._resume_group(pending)
            return False
        return True

    def _load(self, pending: PendingFetch) -> bool:
        """Start loading the blocks that were found; return False if there are none, or computing is faster."""
        cache, fetch, fetcher = self._cache, pending.fetch, self._fetcher
        num_blocks = cache.num_with(pending.hashes, pending.limit, fetch.found)
        num_tokens = num_blocks * cache.block_size - pending.start
        if num_tokens <= 0:
            return False
        compute_s = num_tokens * self._step_time.token_s(pending.start + num_tokens // 2)
        needed = cache.absent(pending.hashes, num_blocks, num_blocks)
        is_known = self._step_time.is_known
        if is_known and fetcher.seconds({name: fetch.found[name] for name in needed}) > compute_s:
            return False
        opened = cache.open_absent(pending.hashes, num_blocks, pending.group.state.account.tenant.id)
        if opened is None:
            return False
        pending.table, fetch.targets = opened
        self._running.loading.append(pending.table)
        pending.late_s = self._clock() + (LATE_FACTOR * compute_s + LATE_S if is_known else DEFAULT_LIMIT_S)
        fetcher.load(fetch)
        return True

    def _register(self, pending: PendingFetch, table: BlockTable) -> None:
        """Register the blocks that have arrived, let the group continue with them, and release the other blocks."""
        for name, block in pending.fetch.targets:
            if name in pending.fetch.arrived:
                self._cache.prefix.register(name.group, name.block_hash, block)
        if pending.is_awaited:
            self._resume_group(pending)
        self._running.loading.remove(table)
        self._cache.release(table)

    def _resume_group(self, pending: PendingFetch) -> None:
        """Let a group continue with the blocks that are in the pool now."""
        group, leader = pending.group, pending.group.leader
        group.pending_fetch = None
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
