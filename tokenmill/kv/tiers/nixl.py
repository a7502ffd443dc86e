"""Memory that other cores read blocks from by NIXL: over whatever UCX finds between the two, RDMA, NVLink, the shared
memory of a machine or TCP.

    BlockMap      where the pieces of a core's blocks lie, for those who read them
    MemoryAgent   this process's part: its pool can be read, and it reads from others into memory of its own

A piece is what one tensor of the pool has of a block in one layer; the pieces of a block, one after another, are its
record (`kv/records.py`). What is read lands in records of this agent, not in the pool: a transfer that was given up may
still write when nobody expects it any more, and then only into memory that is never used again.

Nothing here trusts the bytes: the protocol around it (`peer.py`) asks afterwards whether the blocks were there all the
time. UCX does its work when it is called, so a core that is read from calls it while someone reads (`drive`); nothing
runs when nobody does.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import torch

from tokenmill.errors import InvalidConfig
from tokenmill.kv.records import BlockRecords, Piece, Record

log = logging.getLogger(__name__)

PACKAGES = ("nixl_cu13", "nixl_cu12")
# What UCX does by default, and nobody here wants: listen at every address of the machine, write warnings to the
# standard output, take over signals.
ENVIRONMENT = {
    "UCX_NET_DEVICES": "lo",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_HANDLE_ERRORS": "none",
    "NIXL_LOG_LEVEL": "FATAL",
}
POLL_S = 0.0002
RETRY_S = 60.0  # until a core is read from again after a failure; until then its blocks come over the stream
LANDING_BYTES = 32 << 20  # a thread's records that are read into at a time; at least one
MAX_ABANDONED = 8  # landing records that were given up, until nothing is read any more


class BlockMap(msgspec.Struct, frozen=True, array_like=True):
    """Where blocks lie in a core's memory: a piece of the block in row r lies at `address + r * stride`."""

    agent: str
    metadata: bytes  # for NIXL
    is_on_device: bool
    device: int
    regions: list[list[Piece]]


class TransferFailed(OSError):
    """Blocks could not be read; nothing is known about the memory they were to land in."""


def is_installed() -> bool:
    return any(find_spec(name) for name in PACKAGES)


def require_installed() -> None:
    if not is_installed():
        problem = "kv_transfer nixl was asked for, but NIXL is not installed"
        raise InvalidConfig(problem, param="kv_transfer", hint='pip install "tokenmill[nixl]"')


def load_nixl() -> tuple[ModuleType, tuple[type[Exception], ...]]:
    """Import NIXL, the one for this torch's CUDA if both are there; return its API and its errors."""
    require_installed()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    wanted = f"nixl_cu{(torch.version.cuda or '13').partition('.')[0]}"
    name = next(name for name in sorted(PACKAGES, key=lambda name: name != wanted) if find_spec(name))
    bindings = importlib.import_module(f"{name}._bindings")
    kinds = [kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return importlib.import_module(f"{name}._api"), tuple(kinds)


class MemoryAgent:
    def __init__(self, records: BlockRecords, regions: Sequence[int]) -> None:
        """`records`: of the pool that others may read from; all its memory is registered with NIXL. `regions`: of the
        pool, by cache group."""
        api, self._errors = load_nixl()
        self._records, self._regions = records, regions
        self._lock = threading.Lock()
        self._own = threading.local()  # each thread's landing records
        self._known: set[str] = set()  # agents of other cores
        self._failed: dict[str, float] = {}  # when reading from them failed
        self._abandoned: list[Sequence[Record]] = []
        self._agent: Any = api.nixl_agent(
            f"tokenmill-{os.urandom(16).hex()}",
            api.nixl_agent_config(
                enable_prog_thread=False,  # it would never rest
                backends=["UCX"],
                sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            ),
        )
        tensors = records.memory()
        self.is_on_device = tensors[0].device.type == "cuda"
        self._device = tensors[0].device.index or 0
        self._kind = "VRAM" if self.is_on_device else "DRAM"
        self._register(tensors)
        pieces = [records.pieces(region) for region in range(len(records.sizes))]
        metadata = self._agent.get_agent_metadata()
        self.map = BlockMap(self._agent.name, metadata, self.is_on_device, self._device, pieces)

    def _register(self, tensors: Sequence[torch.Tensor]) -> None:
        spans = {(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors}
        self._agent.register_memory([(*span, self._device, "") for span in sorted(spans) if span[1]], self._kind)

    def drive(self) -> None:
        """Let UCX serve those who read from this process."""
        with self._lock:
            self._agent.get_new_notifs()

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────

    def can_read(self, other: BlockMap) -> bool:
        """Tell whether blocks of another core may be read, now."""
        failed = self._failed.get(other.agent)
        is_well = failed is None or time.monotonic() - failed > RETRY_S
        return is_well and other.is_on_device == self.is_on_device and len(self._abandoned) < MAX_ABANDONED

    def landing(self, region: int) -> Sequence[Record]:
        """Return the calling thread's records to read into."""
        kept: dict[int, Sequence[Record]] = self._own.__dict__.setdefault("landing", {})
        if region not in kept:
            number = max(1, LANDING_BYTES // self._records.sizes[region])
            records = self._records.empty_beside_pool(region, number)
            with self._lock:
                self._register(records)
            kept[region] = records
        return kept[region]

    def read(self, other: BlockMap, group: int, blocks: Sequence[tuple[int, Record]], limit_s: float) -> None:
        """Read blocks of a cache group from another core: rows there, and this thread's landing records for them."""
        region = self._regions[group]
        pieces = np.array(other.regions[region], dtype=np.int64)  # [pieces, (address, stride, bytes)]
        addresses, strides, lengths = pieces.T
        if lengths.sum() != self._records.sizes[region]:
            raise TransferFailed(f"its blocks have {lengths.sum()} bytes, not {self._records.sizes[region]}")
        starts = np.cumsum(lengths) - lengths
        rows = np.array([row for row, _ in blocks], dtype=np.int64)
        places = np.array([record.data_ptr() for _, record in blocks], dtype=np.int64)
        local = spans_of(places[:, None] + starts, lengths, self._device)
        remote = spans_of(addresses + rows[:, None] * strides, lengths, other.device)
        try:
            with self._lock:
                if other.agent not in self._known:
                    self._agent.add_remote_agent(other.metadata)
                    self._known.add(other.agent)
            self._transfer(other.agent, local, remote, limit_s)
        except self._errors as problem:
            self._give_up(other.agent, region)
            raise TransferFailed(f"NIXL: {problem}") from problem
        except TransferFailed:
            self._give_up(other.agent, region)
            raise

    def _transfer(self, agent: str, local: np.ndarray, remote: np.ndarray, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        with self._lock:
            ours, theirs = (self._agent.get_xfer_descs(spans, self._kind) for spans in (local, remote))
            handle = self._agent.initialize_xfer("READ", ours, theirs, agent)
        try:
            with self._lock:
                state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < end_s:
                time.sleep(POLL_S)
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
        finally:
            with self._lock:
                handle.release()
        if state != "DONE":
            raise TransferFailed(f"a transfer has not ended after {limit_s:.0f} s")

    def _give_up(self, agent: str, region: int) -> None:
        """Forget another core, and never use again what was to be read into."""
        self._failed[agent] = time.monotonic()
        with self._lock:
            self._abandoned.append(self._own.landing.pop(region))
            if agent in self._known:
                self._known.discard(agent)
                try:
                    self._agent.remove_remote_agent(agent)
                except self._errors as problem:
                    log.info("NIXL can't forget %s: %s", agent, problem)


def spans_of(addresses: np.ndarray, lengths: np.ndarray, device: int) -> np.ndarray:
    """Return [spans, (address, bytes, device)] of the pieces of some blocks, [blocks, pieces]."""
    spans = np.empty((*addresses.shape, 3), dtype=np.uint64)
    spans[..., 0], spans[..., 1], spans[..., 2] = addresses, lengths, device
    return spans.reshape(-1, 3)
