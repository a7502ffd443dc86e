"""Reading blocks from the memory of other cores with NIXL, over the transport that UCX selects: RDMA, NVLink, shared
memory or TCP.

    BlockMap      the locations of a core's blocks, for cores that read them
    MemoryAgent   registers this core's pool for reading, and reads blocks of other cores

A piece is the part of a block in one layer of one tensor; the pieces of a block, one after another, are its record
(`kv/records.py`). Blocks are read into separate landing records, not into the pool: a transfer that timed out may still
write later, and then only into records that are never used again.

The bytes are not trusted here: the protocol (`peer.py`) verifies afterwards that the blocks were not overwritten
meanwhile. UCX makes progress only when it is called, so a core calls it while another one reads (`make_progress`), and
not otherwise.
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
# UCX would otherwise listen on every address of the machine, write warnings to standard output and handle signals.
ENVIRONMENT = {
    "UCX_NET_DEVICES": "lo",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_HANDLE_ERRORS": "none",
    "NIXL_LOG_LEVEL": "FATAL",
}
POLL_S = 0.0002
RETRY_S = 60.0  # after a failure, blocks of that core are requested over the stream for this long
LANDING_BYTES = 32 << 20  # a thread's landing records (at least one record)
MAX_ABANDONED = 8  # sets of landing records abandoned after failures; then no more memory is read


class BlockMap(msgspec.Struct, frozen=True, array_like=True):
    """The locations of blocks in a core's memory: a piece of the block in row r is at `address + r * stride`."""

    agent: str
    metadata: bytes  # for NIXL
    is_on_device: bool
    device: int
    regions: list[list[Piece]]


class TransferFailed(OSError):
    """Blocks could not be read; the contents of their landing records are undefined."""


def is_installed() -> bool:
    return any(find_spec(name) for name in PACKAGES)


def require_installed() -> None:
    if not is_installed():
        problem = "kv_transfer is nixl, but NIXL is not installed"
        raise InvalidConfig(problem, param="kv_transfer", hint='pip install "tokenmill[nixl]"')


def load_nixl() -> tuple[ModuleType, tuple[type[Exception], ...]]:
    """Import NIXL, preferring the package for this torch's CUDA version; return its API and its error types."""
    require_installed()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    preferred = f"nixl_cu{(torch.version.cuda or '13').partition('.')[0]}"
    name = next(name for name in sorted(PACKAGES, key=lambda name: name != preferred) if find_spec(name))
    bindings = importlib.import_module(f"{name}._bindings")
    kinds = [kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return importlib.import_module(f"{name}._api"), tuple(kinds)


class MemoryAgent:
    def __init__(self, records: BlockRecords, regions: Sequence[int]) -> None:
        """`records`: of the pool, whose memory is registered with NIXL so that other cores can read it. `regions`: the
        pool's region of each cache group."""
        api, self._errors = load_nixl()
        self._records, self._regions = records, regions
        self._lock = threading.Lock()
        self._own = threading.local()  # each thread's landing records
        self._known: set[str] = set()  # agents of other cores
        self._failed: dict[str, float] = {}  # when reading from an agent last failed
        self._abandoned: list[Sequence[Record]] = []
        self._agent: Any = api.nixl_agent(
            f"tokenmill-{os.urandom(16).hex()}",
            api.nixl_agent_config(
                enable_prog_thread=False,  # that thread would busy-wait
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

    def make_progress(self) -> None:
        """Let UCX serve the cores that are reading from this process."""
        with self._lock:
            self._agent.get_new_notifs()

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────

    def can_read(self, other: BlockMap) -> bool:
        """Tell whether the memory of another core may be read now."""
        failed = self._failed.get(other.agent)
        may_try = failed is None or time.monotonic() - failed > RETRY_S
        return may_try and other.is_on_device == self.is_on_device and len(self._abandoned) < MAX_ABANDONED

    def landing(self, region: int) -> Sequence[Record]:
        """Return the calling thread's landing records."""
        kept: dict[int, Sequence[Record]] = self._own.__dict__.setdefault("landing", {})
        if region not in kept:
            number = max(1, LANDING_BYTES // self._records.sizes[region])
            records = self._records.empty_beside_pool(region, number)
            with self._lock:
                self._register(records)
            kept[region] = records
        return kept[region]

    def read(self, other: BlockMap, group: int, blocks: Sequence[tuple[int, Record]], limit_s: float) -> None:
        """Read blocks of a cache group from another core; `blocks`: their rows there, and landing records for them."""
        region = self._regions[group]
        pieces = np.array(other.regions[region], dtype=np.int64)  # [pieces, (address, stride, bytes)]
        addresses, strides, lengths = pieces.T
        if lengths.sum() != self._records.sizes[region]:
            raise TransferFailed(f"blocks of {lengths.sum()} bytes instead of {self._records.sizes[region]}")
        starts = np.cumsum(lengths) - lengths
        rows = np.array([row for row, _ in blocks], dtype=np.int64)
        targets = np.array([record.data_ptr() for _, record in blocks], dtype=np.int64)
        local = spans_of(targets[:, None] + starts, lengths, self._device)
        remote = spans_of(addresses + rows[:, None] * strides, lengths, other.device)
        try:
            with self._lock:
                if other.agent not in self._known:
                    self._agent.add_remote_agent(other.metadata)
                    self._known.add(other.agent)
            self._transfer(other.agent, local, remote, limit_s)
        except self._errors as problem:
            self._abandon(other.agent, region)
            raise TransferFailed(f"NIXL: {problem}") from problem
        except TransferFailed:
            self._abandon(other.agent, region)
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
            raise TransferFailed(f"a transfer took longer than {limit_s:.0f} s")

    def _abandon(self, agent: str, region: int) -> None:
        """Remove another core's agent, and never use again the landing records of the failed transfer."""
        self._failed[agent] = time.monotonic()
        with self._lock:
            self._abandoned.append(self._own.landing.pop(region))
            if agent in self._known:
                self._known.discard(agent)
                try:
                    self._agent.remove_remote_agent(agent)
                except self._errors as problem:
                    log.info("NIXL could not remove the agent %s: %s", agent, problem)


def spans_of(addresses: np.ndarray, lengths: np.ndarray, device: int) -> np.ndarray:
    """Return [spans, (address, bytes, device)] of the pieces of some blocks, [blocks, pieces]."""
    spans = np.empty((*addresses.shape, 3), dtype=np.uint64)
    spans[..., 0], spans[..., 1], spans[..., 2] = addresses, lengths, device
    return spans.reshape(-1, 3)
