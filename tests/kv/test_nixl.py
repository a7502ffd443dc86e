"""Blocks that are read from another process's memory by NIXL: whole or not at all, whatever happens to that process."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.nixl_program import DIGEST, NAMES, NixlCore, fetched, filled_pool
from tokenmill.arch.cache_parts import CacheField
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig
from tokenmill.engine.resolve import require_usable_tiers
from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import CacheGroup, KVLayout
from tokenmill.kv.ranked_records import RankBlocks, RankedRecords
from tokenmill.kv.records import BlockRecords, DeviceRecords, HostRecords
from tokenmill.kv.storage import KVStorage
from tokenmill.kv.tiers import nixl
from tokenmill.kv.tiers.nixl import BlockMap, MemoryAgent
from tokenmill.kv.tiers.peer import PeerTier

needs_nixl = pytest.mark.skipif(not nixl.is_installed(), reason='needs `pip install "tokenmill[nixl]"`')
KEYS, WIDE = CacheField("keys", (3, 8), "float16"), CacheField("inputs", (5,), "float32")
VALUES = CacheField("values", (3, 8), "float16")
UNIFORM = KVLayout((CacheGroup((KEYS, VALUES), None, (0, 1, 2)),))
MIXED = KVLayout((CacheGroup((KEYS, VALUES), None, (0, 2)), CacheGroup((WIDE,), None, (1, 3))))
LIMIT_S = 120.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, as sockets need."""
    with TemporaryDirectory(prefix="tm-") as name:
        yield Path(name)


# ── where blocks lie ───────────────────────────────────────────────────────────────────────────────────


class Now:
    """A stream on which everything has happened already."""

    def run(self, copies: Callable[[], None]) -> None:
        copies()


def filled(layout: KVLayout, seed: int = 1) -> KVStorage:
    storage = KVStorage(layout, 6, 4, torch.device("cpu"))
    for tensor in storage.regions[0]:
        bits = tensor.view(torch.uint8)
        bits.copy_(torch.randint(0, 256, bits.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8))
    return storage


def cut(layout: KVLayout, heads: int, layers: tuple[int, ...]) -> KVLayout:
    fields = tuple(CacheField(field.name, (heads, *field.shape[1:]), field.dtype) for field in layout.groups[0].fields)
    return KVLayout((CacheGroup(fields, None, layers),))


def ranked(parts: list[tuple[tuple[int, int], range]]) -> RankedRecords:
    """Records of ranks that have some heads of some layers each."""
    blocks = [
        RankBlocks(filled(cut(UNIFORM, heads[1] - heads[0], tuple(range(len(layers)))), place), layers, heads)
        for place, (heads, layers) in enumerate(parts)
    ]
    return RankedRecords(KVStorage(UNIFORM, 2, 4, torch.device("cpu")), blocks)


RECORDS: dict[str, Callable[[], BlockRecords]] = {
    "host": lambda: HostRecords(filled(UNIFORM)),
    "host, groups with different fields": lambda: HostRecords(filled(MIXED)),
    "device": lambda: DeviceRecords(filled(UNIFORM), Now()),
    "two ranks": lambda: ranked([((0, 2), range(3)), ((2, 3), range(3))]),
    "ranks that have all of it": lambda: ranked([((0, 3), range(3)), ((0, 3), range(3))]),
    "stages": lambda: ranked([((0, 3), range(2)), ((0, 3), range(2, 3))]),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_pieces_are_those_of_the_record(kind: str) -> None:
    records = RECORDS[kind]()
    pieces = records.pieces(0)
    for block in (1, 4):
        (record,) = records.empty(0, 1)
        records.read(0, [block], [record])
        row = records.row(0, block)
        found = b"".join(ctypes.string_at(address + row * stride, size) for address, stride, size in pieces)
        assert found == record.numpy().tobytes()
    # All of it lies in memory that is told.
    spans = [(storage.data_ptr(), storage.nbytes()) for storage in (one.untyped_storage() for one in records.memory())]
    for address, stride, size in pieces:
        assert any(start <= address and address + 5 * stride + size <= start + length for start, length in spans)


# ── between processes ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def serving(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    address = str(folder / "blocks")
    process = started("serve", address)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield address, process
    process.kill()
    process.communicate()


def started(*arguments: str) -> subprocess.Popen[str]:
    # Over TCP both processes take part, so that a transfer can be interrupted.
    environment = {**os.environ, "UCX_TLS": "tcp"} if arguments[2:] or arguments[0] == "serve" else dict(os.environ)
    command = [sys.executable, "-m", "tests.support.nixl_program", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def told_by(*arguments: str) -> dict[str, Any]:
    process = started(*arguments)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    told: dict[str, Any] = json.loads(output)
    return told


@needs_nixl
def test_blocks_of_another_process_are_read(serving: tuple[str, subprocess.Popen[str]]) -> None:
    told = told_by("read", serving[0])
    assert told["whole"] == [True] * 60 and told["absent"]


@needs_nixl
def test_nixl_listens_at_the_loopback_device_alone(serving: tuple[str, subprocess.Popen[str]]) -> None:
    assert told_by("read", serving[0])["absent"]  # so that all sockets are open
    own = {os.readlink(path) for path in Path(f"/proc/{serving[1].pid}/fd").iterdir()}
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{serving[1].pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                listening.append(fields[1].partition(":")[0])
    assert listening and set(listening) == {"0100007F"}  # 127.0.0.1


@needs_nixl
def test_a_process_that_is_killed_while_it_is_read_from_has_no_blocks(
    serving: tuple[str, subprocess.Popen[str]],
) -> None:
    told = told_by("read", serving[0], "kill", str(serving[1].pid))
    assert not told["any"]


@needs_nixl
def test_a_process_that_stands_still_is_given_up_and_asked_for_records_later(
    serving: tuple[str, subprocess.Popen[str]],
) -> None:
    told = told_by("read", serving[0], "stop", str(serving[1].pid))
    assert not told["any"]
    assert told["then"] and not told["is_read_again"]


# ── within one process ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def agent() -> MemoryAgent:
    return MemoryAgent(HostRecords(filled_pool(7)), [0])


def brought(agent: MemoryAgent, core: NixlCore) -> list[bytes | None]:
    tier = PeerTier(core.server.address, DIGEST, agent)
    found = fetched(tier, NAMES[:5], core.records)
    tier.close()
    return found


@needs_nixl
def test_a_block_that_is_overwritten_while_it_is_read_is_not_there(
    agent: MemoryAgent, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = NixlCore(str(folder / "blocks"))
    read = agent.read

    def overwritten(other: BlockMap, *given: Any) -> None:
        read(other, *given)
        core.index.forget(2)  # taken for other contents, and back under its name before anybody looks
        core.index.register(*NAMES[1], 2)

    monkeypatch.setattr(agent, "read", overwritten)
    assert brought(agent, core) == [core.record(1), None, *map(core.record, (3, 4, 5))]


@needs_nixl
def test_a_damaged_block_is_noticed(agent: MemoryAgent, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = NixlCore(str(folder / "blocks"))
    read = agent.read

    def damaged(other: BlockMap, group: int, blocks: list[tuple[int, torch.Tensor]], limit_s: float) -> None:
        read(other, group, blocks, limit_s)
        blocks[2][1][100] ^= 4

    monkeypatch.setattr(agent, "read", damaged)
    assert brought(agent, core) == [core.record(1), core.record(2), None, None, None]


@needs_nixl
@pytest.mark.parametrize("has_nixl", [False, True])
def test_a_core_without_nixl_sends_its_records(has_nixl: bool, agent: MemoryAgent, folder: Path) -> None:
    """Either side may lack it."""
    core = NixlCore(str(folder / "blocks"), has_nixl=has_nixl)
    tier = PeerTier(core.server.address, DIGEST, None if has_nixl else agent)
    assert fetched(tier, NAMES[:5], core.records) == [core.record(block) for block in range(1, 6)]
    tier.close()


@needs_nixl
def test_a_core_whose_blocks_have_another_size_is_not_read(agent: MemoryAgent, folder: Path) -> None:
    core = NixlCore(str(folder / "blocks"))
    assert core.agent is not None
    pieces = [piece[:2] + (piece[2] - 1,) for piece in core.agent.map.regions[0]]
    core.agent.map = BlockMap(core.agent.map.agent, core.agent.map.metadata, False, 0, [pieces])
    assert brought(agent, core) == [None] * 5


def test_nixl_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "find_spec", lambda name: None)
    config = EngineConfig(ModelConfig(model="m"), CacheConfig(kv_transfer="nixl"))
    with pytest.raises(InvalidConfig, match="NIXL is not installed"):
        require_usable_tiers(config, None, "cpu")  # type: ignore[arg-type]


def test_nothing_is_read_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "find_spec", lambda name: None)
    with pytest.raises(InvalidConfig):
        MemoryAgent(HostRecords(filled(UNIFORM)), [0])


def test_spans_are_those_of_every_piece_of_every_block() -> None:
    spans = nixl.spans_of(np.array([[10, 20], [30, 40]]), np.array([1, 2]), 3)
    assert spans.tolist() == [[10, 1, 3], [20, 2, 3], [30, 1, 3], [40, 2, 3]]
