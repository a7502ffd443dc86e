"""Background threads that copy blocks between the pool and the tiers (`kv/tiers/`) while steps run.

    saver     copies each newly registered block to every tier, after the step that computed it; all blocks registered
              meanwhile are copied together, because each copy waits for the steps in flight
    loaders   serve fetches: look up which tiers have the blocks, then load their records into blocks of the pool

Registered blocks are never written, and a block is unregistered before it is reused. So the saver copies without a
lock, and checks afterwards whether the block's registration has changed; if so, the copy is discarded. The blocks of a
fetch are not used until it is done. No step ever waits for these threads.

The seconds per byte are measured for each tier, so that blocks are fetched only if that is faster than computing them
(`scheduler/fetches.py`). The estimate of a tier decays with each use, so that a slow tier is tried again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from tokenmill.kv.blocks import PrefixIndex
from tokenmill.kv.names import BlockName, ExpectedBlock, Fetch
from tokenmill.kv.records import BlockRecords, BufferOf, Record
from tokenmill.kv.tiers.host import HostTier
from tokenmill.kv.tiers.nixl import MemoryAgent
from tokenmill.kv.tiers.peer import BlockServer, PeerTier, tier_name

log = logging.getLogger(__name__)

MAX_SAVED_BATCH = 16  # blocks that are saved together
MAX_HOST_BATCH = 512  # if only the host tier keeps them, which needs no copy in between
SCRATCH_BYTES = 32 << 20  # a thread's buffer for records being saved or loaded (at least one record)
CLOSE_S = 1.5  # time limit for saving queued blocks when a core ends
EWMA_WEIGHT = 0.3  # weight of the newest fetch in a tier's seconds per byte
ESTIMATE_DECAY = 0.95  # a tier's estimate is multiplied by this with each use

NUM_PULLERS = 2  # threads that fetch from other cores, one of which may not respond

Registered = tuple[int, tuple[int, bytes]]  # a block and its registration
FetchTask = tuple[Callable[[Fetch], None], Fetch]
T = TypeVar("T")


class Tier(Protocol):
    name: str

    def find(self, names: Sequence[BlockName]) -> list[bool]: ...

    def scratch(self, region: int, buffer: BufferOf) -> Sequence[Record]:
        """Return the records into which the calling thread loads blocks, a batch at a time: its own `buffer`, or memory
        of the tier; empty if the tier's records are in host memory and need no loading."""
        ...

    def records(
        self, names: Sequence[BlockName], scratch: Sequence[Record]
    ) -> AbstractContextManager[list[Record | None]]:
        """Return the records of some blocks of one region, valid inside the context; None for an unavailable block.
        Records that have to be loaded are loaded into `scratch`."""
        ...


class KeepingTier(Tier, Protocol):
    """A tier that can store blocks."""

    def has(self, name: BlockName) -> bool: ...

    def keep(self, name: BlockName, record: Record) -> int:
        """Store a copy of a record; return its bytes, 0 if the tier already has it or can't store it."""
        ...


class TrafficCounts:
    """Running totals of block transfers, exported as metrics."""

    def __init__(self) -> None:
        self.fetched_blocks = 0
        self.fetched_bytes = 0
        self.fetch_s = 0.0
        self.saved_bytes = 0


class BlockTraffic:
    def __init__(
        self,
        make_records: Callable[[], BlockRecords],
        index: PrefixIndex,
        regions: Sequence[int],
        tiers: Sequence[KeepingTier] = (),
        host: HostTier | None = None,
        digest: Callable[[], bytes] = bytes,
        address: str = "",
        agent: MemoryAgent | None = None,
    ) -> None:
        """`make_records`: makes a copier of blocks for one thread. `regions`: the pool's region of each cache group.
        `host`: the tier in host memory, which is searched before the others. `digest`: returns the digest of everything
        that blocks depend on besides their hash. `address`: the socket at which other cores can fetch blocks; empty:
        none. `agent`: reads from other cores' memory, and lets them read from this core's."""
        self._index = index
        self._regions = regions
        self._host, self._keeping = host, tiers
        all_tiers: list[HostTier | KeepingTier] = [*([host] if host is not None else []), *tiers]
        self._tiers: Mapping[str, HostTier | KeepingTier] = {tier.name: tier for tier in all_tiers}
        self.has_tiers = bool(all_tiers)
        self.counts = TrafficCounts()
        self._byte_s: dict[str, float] = {}  # estimated seconds per byte, by tier
        self._changed = threading.Event()
        self._is_saved = threading.Event()
        self._digest = digest
        self._agent = agent
        self._peers: dict[Fetch, PeerTier] = {}
        weakref.finalize(self, close_peers, self._peers)
        self.server = BlockServer(address, digest, index, regions, make_records, agent) if address else None
        self._make_records = make_records
        self._own = threading.local()  # each thread's copier and buffers
        self._sizes = make_records().sizes
        self._saves: queue.SimpleQueue[Registered | None] = queue.SimpleQueue()
        self._fetches: queue.SimpleQueue[FetchTask | None] = queue.SimpleQueue()
        self._pulls: queue.SimpleQueue[FetchTask | None] = queue.SimpleQueue()  # fetches that involve other cores
        self._has_pullers = False
        if self.has_tiers:
            saves = self._saves
            index.save = lambda block, registration: saves.put((block, registration))
            start_thread("kv-saver", self, self._saves, BlockTraffic._save)
        start_thread("kv-loader", self, self._fetches, BlockTraffic._fetch)

    # ── the `Fetcher` interface ────────────────────────────────────────────────────────────────────────

    def look_up(self, fetch: Fetch) -> None:
        self._tasks(fetch).put((self._find, fetch))

    def expect(self, fetch: Fetch) -> None:
        fetch.found = dict.fromkeys(fetch.names, tier_name(fetch.source))
        fetch.is_looked_up = True

    def load(self, fetch: Fetch) -> None:
        self._tasks(fetch).put((self._load, fetch))

    def end(self, fetch: Fetch) -> None:
        fetch.is_over = True
        if peer := self._peers.pop(fetch, None):
            peer.close()

    def _tasks(self, fetch: Fetch) -> queue.SimpleQueue[FetchTask | None]:
        if not fetch.source:
            return self._fetches
        if not self._has_pullers:
            self._has_pullers = True
            for number in range(NUM_PULLERS):
                start_thread(f"kv-puller-{number}", self, self._pulls, BlockTraffic._fetch)
        return self._pulls

    def seconds(self, found: Mapping[BlockName, str]) -> float:
        total = 0.0
        for name, tier in found.items():
            total += self._byte_s.get(tier, 0.0) * self._sizes[self._regions[name.group]]
        for tier in set(found.values()) & self._byte_s.keys():
            self._byte_s[tier] *= ESTIMATE_DECAY
        return total

    def wait(self, timeout_s: float) -> None:
        self._changed.wait(timeout_s)
        self._changed.clear()

    def close(self) -> None:
        """Stop the threads; queued blocks are saved as far as `CLOSE_S` allows."""
        for fetch in list(self._peers):
            self.end(fetch)
        if self.server is not None:
            self.server.close()
        if self.has_tiers:
            self._saves.put(None)
            self._is_saved.wait(CLOSE_S)

    # ── fetches ────────────────────────────────────────────────────────────────────────────────────────

    def _fetch(self, task: FetchTask) -> None:
        work, fetch = task
        try:
            work(fetch)
        except Exception:
            log.exception("KV blocks could not be fetched; they will be computed instead")
        if work == self._find:
            fetch.is_looked_up = True
        else:
            fetch.is_loaded = True
        self._changed.set()
        if fetch.is_over:
            self.end(fetch)

    def _find(self, fetch: Fetch) -> None:
        missing = list(fetch.names)
        tiers: list[Tier] = list(self._tiers.values())
        if fetch.source:
            tiers.append(self._peer(fetch))
        for tier in tiers:
            are_found = tier.find(missing)
            fetch.found |= {name: tier.name for name, is_found in zip(missing, are_found, strict=True) if is_found}
            missing = [name for name, is_found in zip(missing, are_found, strict=True) if not is_found]

    def _peer(self, fetch: Fetch) -> PeerTier:
        if fetch not in self._peers:
            self._peers[fetch] = PeerTier(fetch.source, self._digest(), self._agent)
        return self._peers[fetch]

    def _load(self, fetch: Fetch) -> None:
        by_source: dict[tuple[str, int], list[ExpectedBlock]] = {}  # by tier and region
        for target in fetch.targets:
            source = fetch.found[target.name], self._regions[target.name.group]
            by_source.setdefault(source, []).append(target)
        for (tier, region), targets in by_source.items():
            began, num_before = time.monotonic(), len(fetch.arrived)
            self._load_from(self._tiers.get(tier) or self._peer(fetch), region, targets, fetch)
            self._note_loaded(tier, region, len(fetch.arrived) - num_before, time.monotonic() - began)

    def _load_from(self, tier: Tier, region: int, targets: Sequence[ExpectedBlock], fetch: Fetch) -> None:
        copier, scratch = self._records(), tier.scratch(region, self._buffer)
        for some in parts(targets, len(scratch) or len(targets)):
            with tier.records([target.name for target in some], scratch[: len(some)]) as records:
                whole = [(target, record) for target, record in zip(some, records, strict=True) if record is not None]
                blocks = [target.block for target, _ in whole]
                copier.write(region, blocks, [record for _, record in whole])
                fetch.arrived.update(target.name for target, _ in whole)

    def _note_loaded(self, tier: str, region: int, number: int, seconds: float) -> None:
        counts, num_bytes = self.counts, number * self._sizes[region]
        counts.fetched_blocks += number
        counts.fetched_bytes += num_bytes
        counts.fetch_s += seconds
        if num_bytes:
            byte_s = seconds / num_bytes
            self._byte_s[tier] = byte_s + (1 - EWMA_WEIGHT) * (self._byte_s.get(tier, byte_s) - byte_s)

    def _records(self) -> BlockRecords:
        """Return the copier of the calling thread."""
        if not hasattr(self._own, "records"):
            self._own.records, self._own.buffers = self._make_records(), {}
        records: BlockRecords = self._own.records
        return records

    def _buffer(self, region: int) -> list[Record]:
        """Return the calling thread's buffer for the records of a batch."""
        records, buffers = self._records(), self._own.buffers
        if region not in buffers:
            buffers[region] = records.empty(region, max(1, min(MAX_SAVED_BATCH, SCRATCH_BYTES // self._sizes[region])))
        buffer: list[Record] = buffers[region]
        return buffer

    # ── saves ──────────────────────────────────────────────────────────────────────────────────────────

    def _save(self, first: Registered) -> None:
        try:
            self._save_some([first, *self._queued_saves()])
        except Exception:
            log.exception("KV blocks could not be saved to the tiers")

    def _queued_saves(self) -> Iterator[Registered]:
        for _ in range((MAX_SAVED_BATCH if self._keeping else MAX_HOST_BATCH) - 1):
            try:
                queued = self._saves.get_nowait()
            except queue.Empty:
                return
            if queued is None:
                self._saves.put(None)
                return
            yield queued

    def _save_some(self, registered: Sequence[Registered]) -> None:
        by_region: dict[int, list[Registered]] = {}
        for block, registration in registered:
            if self._should_save(block, registration):
                by_region.setdefault(self._regions[registration[0]], []).append((block, registration))
        for region, unsaved in by_region.items():
            for some in parts(unsaved, self._save_batch_size(region)):
                self._save_batch(region, some)

    def _save_batch_size(self, region: int) -> int:
        """Return how many blocks are copied together: as many as fit into the buffer, and at most half of the host
        tier's slots, so that a batch does not evict its own blocks."""
        size = len(self._buffer(region)) if self._host is None or self._keeping else MAX_HOST_BATCH
        return size if self._host is None else max(1, min(size, self._host.num_slots(region) // 2))

    def _save_batch(self, region: int, batch: Sequence[Registered]) -> None:
        """Copy blocks into slots of host memory, or into this thread's buffer if there is no slot and another tier
        stores them."""
        names = [BlockName(*registration) for _, registration in batch]
        slots = self._host.take_slots(names) if self._host is not None else [None] * len(names)
        buffer: Sequence[Record | None] = self._buffer(region) if self._keeping else [None] * len(names)
        records = [slot if slot is not None else record for slot, record in zip(slots, buffer, strict=False)]
        copied = [(block, record) for (block, _), record in zip(batch, records, strict=True) if record is not None]
        self._records().read(region, [block for block, _ in copied], [record for _, record in copied])
        for (block, registration), name, slot, record in zip(batch, names, slots, records, strict=True):
            is_whole = self._index.registration(block) is registration  # it was not overwritten meanwhile
            if self._host is not None and slot is not None:
                self.counts.saved_bytes += self._host.put_slot(name, slot, is_whole=is_whole)
            if is_whole and record is not None:
                self.counts.saved_bytes += sum(tier.keep(name, record) for tier in self._keeping)

    def _should_save(self, block: int, registration: tuple[int, bytes]) -> bool:
        """Tell whether a block still has its registered contents, and a tier lacks them."""
        if self._index.registration(block) is not registration:
            return False
        return not all(tier.has(BlockName(*registration)) for tier in self._tiers.values())

    def note_saved(self) -> None:
        """Note that the saver has ended and nothing is left to save."""
        self._is_saved.set()


def parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def close_peers(peers: dict[Fetch, PeerTier]) -> None:
    for peer in peers.values():
        peer.close()


def start_thread(
    name: str,
    traffic: BlockTraffic,
    tasks: queue.SimpleQueue[T | None],
    work: Callable[[BlockTraffic, T], None],
) -> None:
    """Start a thread that works on tasks until one is None. It holds only a weak reference to its owner, and ends with
    it."""
    weakref.finalize(traffic, tasks.put, None)
    threading.Thread(target=serve, args=(weakref.ref(traffic), tasks, work), name=name, daemon=True).start()


def serve(
    owner: weakref.ref[BlockTraffic], tasks: queue.SimpleQueue[T | None], work: Callable[[BlockTraffic, T], None]
) -> None:
    while (task := tasks.get()) is not None:
        if (traffic := owner()) is None:
            return
        work(traffic, task)
        del traffic, task
    if (traffic := owner()) is not None:
        traffic.note_saved()
