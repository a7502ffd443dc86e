"""Threads that copy blocks between the pool and the tiers (`kv/tiers/`) while steps run.

    saver     each block that is registered is copied out, behind the step that computed it, and kept by every tier;
              all that were registered meanwhile together, since each copy waits for the steps in flight
    loaders   fetches: who has which blocks, then their records into blocks of the pool

Registered blocks are never written, and a block that is taken for other contents is unregistered first. So the saver
copies without a lock, and checks afterwards whether the block's registration has changed; if so, the copy is discarded.
A fetch's blocks are used by nothing else until it is done. No step ever waits for either.

The seconds per byte are measured for each tier, so that blocks are fetched only where that is faster than computing
them (`scheduler/fetches.py`). The estimate of a slow tier decays with time, so that it is tried again.
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
from tokenmill.kv.records import BlockRecords, Record, Room
from tokenmill.kv.tiers.host import HostTier
from tokenmill.kv.tiers.nixl import MemoryAgent
from tokenmill.kv.tiers.peer import BlockServer, PeerTier, tier_name

log = logging.getLogger(__name__)

SAVED_AT_ONCE = 16
SAVED_IN_SLOTS = 512  # at once, where host memory takes them without a copy in between
SCRATCH_BYTES = 32 << 20  # of records that are saved, or brought, at a time; at least one
CLOSE_S = 1.5  # for what is still to be saved when a core ends
STEADINESS = 0.3  # weight of the newest fetch in what a tier's bytes take
HOPE = 0.95  # what a tier's estimate becomes each time it is asked for

NUM_PULLERS = 2  # threads that ask other cores, one of which may be silent

Registered = tuple[int, tuple[int, bytes]]  # a block, and what it is registered as
FetchTask = tuple[Callable[[Fetch], None], Fetch]
T = TypeVar("T")


class Tier(Protocol):
    name: str

    def find(self, names: Sequence[BlockName]) -> list[bool]: ...

    def scratch(self, region: int, room: Room) -> Sequence[Record]:
        """Where the calling thread's records are brought to, some at a time: `room` of that thread, or memory of the
        tier's own; empty: they lie in memory."""
        ...

    def records(
        self, names: Sequence[BlockName], scratch: Sequence[Record]
    ) -> AbstractContextManager[list[Record | None]]:
        """The records of some blocks of one region, while the context lasts; None: can't be had. Those that must be
        brought are brought into `scratch`."""
        ...


class KeepingTier(Tier, Protocol):
    """A tier that can store blocks."""

    def has(self, name: BlockName) -> bool: ...

    def keep(self, name: BlockName, record: Record) -> int:
        """Keep a copy of a record; the bytes that it takes, 0 if it is there already or can't be kept."""
        ...


class TrafficCounts:
    """Totals."""

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
        """`make_records`: copies for one thread; `regions`: of the pool, by cache group. `host`: the tier in host
        memory, which is searched before the others. `digest`: of all that blocks depend on beside their names;
        `address`: the socket at which other cores may ask for them, empty: none. `agent`: reads from other cores'
        memory, and lets them read from this one's."""
        self._index = index
        self._regions = regions
        self._host, self._keeping = host, tiers
        all_tiers: list[HostTier | KeepingTier] = [*([host] if host is not None else []), *tiers]
        self._tiers: Mapping[str, HostTier | KeepingTier] = {tier.name: tier for tier in all_tiers}
        self.has_tiers = bool(all_tiers)
        self.counts = TrafficCounts()
        self._byte_s: dict[str, float] = {}  # by tier
        self._changed = threading.Event()
        self._is_saved = threading.Event()
        self._digest = digest
        self._agent = agent
        self._peers: dict[Fetch, PeerTier] = {}
        weakref.finalize(self, close_peers, self._peers)
        self.server = BlockServer(address, digest, index, regions, make_records, agent) if address else None
        self._make_records = make_records
        self._own = threading.local()  # each thread's copies and room
        self._sizes = make_records().sizes
        self._saves: queue.SimpleQueue[Registered | None] = queue.SimpleQueue()
        self._fetches: queue.SimpleQueue[FetchTask | None] = queue.SimpleQueue()
        self._pulls: queue.SimpleQueue[FetchTask | None] = queue.SimpleQueue()  # those that ask other cores too
        self._has_pullers = False
        if self.has_tiers:
            saves = self._saves
            index.save = lambda block, registration: saves.put((block, registration))
            start_thread("kv-saver", self, self._saves, BlockTraffic._save)
        start_thread("kv-loader", self, self._fetches, BlockTraffic._fetch)

    # ── what a scheduler asks for ──────────────────────────────────────────────────────────────────────

    def ask(self, fetch: Fetch) -> None:
        self._tasks(fetch).put((self._find, fetch))

    def expect(self, fetch: Fetch) -> None:
        fetch.found = dict.fromkeys(fetch.names, tier_name(fetch.source))
        fetch.is_asked = True

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
            self._byte_s[tier] *= HOPE
        return total

    def wait(self, patience_s: float) -> None:
        self._changed.wait(patience_s)
        self._changed.clear()

    def close(self) -> None:
        """Stop the threads, after saving what is queued as far as a short time limit allows."""
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
            log.exception("blocks could not be fetched; they are computed")
        if work == self._find:
            fetch.is_asked = True
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
            is_there = tier.find(missing)
            fetch.found |= {name: tier.name for name, found in zip(missing, is_there, strict=True) if found}
            missing = [name for name, found in zip(missing, is_there, strict=True) if not found]

    def _peer(self, fetch: Fetch) -> PeerTier:
        if fetch not in self._peers:
            self._peers[fetch] = PeerTier(fetch.source, self._digest(), self._agent)
        return self._peers[fetch]

    def _load(self, fetch: Fetch) -> None:
        by_place: dict[tuple[str, int], list[ExpectedBlock]] = {}
        for target in fetch.targets:
            place = fetch.found[target.name], self._regions[target.name.group]
            by_place.setdefault(place, []).append(target)
        for (tier, region), targets in by_place.items():
            began, num_before = time.monotonic(), len(fetch.arrived)
            self._load_from(self._tiers.get(tier) or self._peer(fetch), region, targets, fetch)
            self._note_loaded(tier, region, len(fetch.arrived) - num_before, time.monotonic() - began)

    def _load_from(self, tier: Tier, region: int, targets: Sequence[ExpectedBlock], fetch: Fetch) -> None:
        own, room = self._records(), tier.scratch(region, self._room)
        for some in parts(targets, len(room) or len(targets)):
            with tier.records([target.name for target in some], room[: len(some)]) as records:
                whole = [(target, record) for target, record in zip(some, records, strict=True) if record is not None]
                blocks = [target.block for target, _ in whole]
                own.write(region, blocks, [record for _, record in whole])
                fetch.arrived.update(target.name for target, _ in whole)

    def _note_loaded(self, tier: str, region: int, number: int, seconds: float) -> None:
        counts, num_bytes = self.counts, number * self._sizes[region]
        counts.fetched_blocks += number
        counts.fetched_bytes += num_bytes
        counts.fetch_s += seconds
        if num_bytes:
            byte_s = seconds / num_bytes
            self._byte_s[tier] = byte_s + (1 - STEADINESS) * (self._byte_s.get(tier, byte_s) - byte_s)

    def _records(self) -> BlockRecords:
        """Return the copier of the calling thread."""
        if not hasattr(self._own, "records"):
            self._own.records, self._own.room = self._make_records(), {}
        records: BlockRecords = self._own.records
        return records

    def _room(self, region: int) -> list[Record]:
        """Return the calling thread's buffer for the records of a batch."""
        records, room = self._records(), self._own.room
        if region not in room:
            room[region] = records.empty(region, max(1, min(SAVED_AT_ONCE, SCRATCH_BYTES // self._sizes[region])))
        found: list[Record] = room[region]
        return found

    # ── saves ──────────────────────────────────────────────────────────────────────────────────────────

    def _save(self, first: Registered) -> None:
        try:
            self._save_some([first, *self._queued_saves()])
        except Exception:
            log.exception("blocks could not be kept")

    def _queued_saves(self) -> Iterator[Registered]:
        for _ in range((SAVED_AT_ONCE if self._keeping else SAVED_IN_SLOTS) - 1):
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
            if self._is_wanted(block, registration):
                by_region.setdefault(self._regions[registration[0]], []).append((block, registration))
        for region, wanted in by_region.items():
            for some in parts(wanted, self._num_saved_at_once(region)):
                self._save_part(region, some)

    def _num_saved_at_once(self, region: int) -> int:
        """As many as there is room for, and never so many that host memory has no slot for the newest of them."""
        at_once = len(self._room(region)) if self._host is None or self._keeping else SAVED_IN_SLOTS
        return at_once if self._host is None else max(1, min(at_once, self._host.num_slots(region) // 2))

    def _save_part(self, region: int, wanted: Sequence[Registered]) -> None:
        """Copy blocks into slots of host memory, or into this thread's room where there is no slot for them and another
        tier keeps them."""
        names = [BlockName(*registration) for _, registration in wanted]
        slots = self._host.take_slots(names) if self._host is not None else [None] * len(names)
        room: Sequence[Record | None] = self._room(region) if self._keeping else [None] * len(names)
        places = [slot if slot is not None else record for slot, record in zip(slots, room, strict=False)]
        copied = [(block, place) for (block, _), place in zip(wanted, places, strict=True) if place is not None]
        self._records().read(region, [block for block, _ in copied], [place for _, place in copied])
        for (block, registration), name, slot, place in zip(wanted, names, slots, places, strict=True):
            is_whole = self._index.registration(block) is registration  # it was not overwritten meanwhile
            if self._host is not None and slot is not None:
                self.counts.saved_bytes += self._host.put_slot(name, slot, is_whole=is_whole)
            if is_whole and place is not None:
                self.counts.saved_bytes += sum(tier.keep(name, place) for tier in self._keeping)

    def _is_wanted(self, block: int, registration: tuple[int, bytes]) -> bool:
        if self._index.registration(block) is not registration:
            return False
        return not all(tier.has(BlockName(*registration)) for tier in self._tiers.values())

    def note_saved(self) -> None:
        """Note that the saver has ended, with nothing left to save."""
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
    """Start a thread that works on tasks until one is None. It keeps nothing alive: it ends with its owner."""
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
