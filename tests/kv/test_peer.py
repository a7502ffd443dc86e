"""Blocks of another core over a stream: whole or not at all, whatever happens to the stream."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tokenmill.arch.cache_parts import CacheField
from tokenmill.kv.blocks import PrefixIndex
from tokenmill.kv.layout import CacheGroup, KVLayout
from tokenmill.kv.names import BlockName, ExpectedBlock, Fetch
from tokenmill.kv.records import HostRecords, Record
from tokenmill.kv.storage import KVStorage
from tokenmill.kv.tiers.peer import BlockServer, PeerTier
from tokenmill.kv.traffic import BlockTraffic

FIELDS = CacheField("keys", (2, 8), "float16"), CacheField("values", (2, 8), "float16")
LAYOUT = KVLayout((CacheGroup(FIELDS, None, (0, 1, 2)),))
DIGEST = b"d" * 32
NAMES = [BlockName(0, bytes([number]) * 16) for number in range(1, 6)]
WAIT_S = 30.0


class PeerCore:
    """A pool with five registered blocks, and the socket at which it gives them away."""

    def __init__(self, path: Path, digest: bytes = DIGEST) -> None:
        self.storage = KVStorage(LAYOUT, 8, 4, torch.device("cpu"))
        for tensor in self.storage.regions[0]:
            bits = tensor.view(torch.uint8)
            bits.copy_(torch.randint(0, 256, bits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.uint8))
        self.index = PrefixIndex(1)
        for block, name in enumerate(NAMES, start=1):
            self.index.register(*name, block)
        self.records = HostRecords(self.storage)
        self.server = BlockServer(str(path), lambda: digest, self.index, [0], lambda: self.records)

    def record(self, block: int) -> Record:
        (record,) = self.records.empty(0, 1)
        self.records.read(0, [block], [record])
        return record


def pulled(address: Path, names: list[BlockName] = NAMES, digest: bytes = DIGEST) -> list[Record | None]:
    tier = PeerTier(str(address), digest)
    scratch = HostRecords(KVStorage(LAYOUT, 8, 4, torch.device("cpu"))).empty(0, len(names))
    with tier.records(names, scratch) as found:
        tier.close()
        return found


def test_blocks_come_by_name(tmp_path: Path) -> None:
    core = PeerCore(tmp_path / "blocks")
    absent = BlockName(0, b"x" * 16)
    tier = PeerTier(str(tmp_path / "blocks"), DIGEST)
    assert tier.find([NAMES[0], absent, NAMES[4], BlockName(7, b"x" * 16)]) == [True, False, True, False]
    tier.close()
    found = pulled(tmp_path / "blocks", [NAMES[2], absent, NAMES[0]])
    assert found[1] is None and found[0] is not None and found[2] is not None
    assert torch.equal(found[0], core.record(3)) and torch.equal(found[2], core.record(1))
    assert (tmp_path / "blocks").stat().st_mode & 0o777 == 0o600


def test_a_core_of_another_model_has_nothing(tmp_path: Path) -> None:
    core = PeerCore(tmp_path / "blocks", digest=b"e" * 32)
    tier = PeerTier(core.server.address, DIGEST)
    assert not any(tier.find(NAMES))
    tier.close()
    assert pulled(tmp_path / "blocks") == [None] * 5


def test_a_block_that_is_overwritten_while_it_is_copied_is_not_there(tmp_path: Path) -> None:
    core = PeerCore(tmp_path / "blocks")
    read = core.records.read

    def overwritten(region: int, blocks: list[int], records: list[Record]) -> None:
        read(region, blocks, records)
        if blocks == [2]:  # taken for other contents, and back under its name before anybody looks
            core.index.forget(2)
            core.index.register(*NAMES[1], 2)

    core.records.read = overwritten  # type: ignore[method-assign,assignment]
    assert [record is not None for record in pulled(tmp_path / "blocks")] == [True, False, True, True, True]


class Relay:
    """A stream to a core with something in between that changes, ends or swallows it after so many bytes."""

    def __init__(self, path: Path, core: Path, most: int, change: Callable[[bytes], bytes] | None) -> None:
        """`change`: what becomes of the piece that holds byte `most`; None: nothing more comes."""
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self._core, self._left, self._change = core, most, change
        self._open: list[socket.socket] = [self._listening]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):  # either side may be gone first
            self._relay()

    def _relay(self) -> None:
        asking, _ = self._listening.accept()
        having = socket.socket(socket.AF_UNIX)
        having.connect(str(self._core))
        self._open += [asking, having]
        having.sendall(asking.recv(1 << 16))
        while data := having.recv(64):
            if len(data) > self._left >= 0:
                if self._change is None:
                    return  # silent, until the test closes it
                data = self._change(data)
            self._left -= len(data)
            if not data:
                break
            asking.sendall(data)
        asking.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self._open:
            one.close()


def flipped(data: bytes) -> bytes:
    return bytes([*data[:-1], data[-1] ^ 4])


@pytest.mark.parametrize("change", [flipped, lambda data: b"", None])
def test_a_damaged_cut_or_silent_stream_brings_what_came_before(
    change: Callable[[bytes], bytes] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.kv.tiers.peer.TIMEOUT_S", 0.5)
    core = PeerCore(tmp_path / "blocks")
    size = core.records.sizes[0]
    relay = Relay(tmp_path / "relay", tmp_path / "blocks", int(2.5 * (size + 12)), change)
    found = pulled(tmp_path / "relay")
    relay.close()
    assert [record is not None for record in found] == [True, True, False, False, False]
    for block, record in enumerate(found[:2], start=1):
        assert record is not None and torch.equal(record, core.record(block))


def test_a_core_that_is_gone_has_nothing(tmp_path: Path) -> None:
    tier = PeerTier(str(tmp_path / "nobody"), DIGEST)
    assert tier.find(NAMES) == [False] * 5
    assert pulled(tmp_path / "nobody") == [None] * 5


def test_nonsense_ends_the_stream_that_sends_it_alone(tmp_path: Path) -> None:
    core = PeerCore(tmp_path / "blocks")
    for nonsense in (b"\xff\xff\xff\xff", b"\x04\x00\x00\x00abcd", b"\x01"):
        with socket.socket(socket.AF_UNIX) as stream:
            stream.settimeout(WAIT_S)
            stream.connect(core.server.address)
            stream.sendall(nonsense)
            stream.shutdown(socket.SHUT_WR)
            assert stream.recv(1) == b""
    assert all(record is not None for record in pulled(tmp_path / "blocks"))


def test_a_fetch_from_another_core_fills_the_pool(tmp_path: Path) -> None:
    core = PeerCore(tmp_path / "blocks")
    own = KVStorage(LAYOUT, 8, 4, torch.device("cpu"))
    traffic = BlockTraffic(lambda: HostRecords(own), PrefixIndex(1), [0], digest=lambda: DIGEST)
    fetch = Fetch(NAMES, source=core.server.address)
    traffic.look_up(fetch)
    wait_for(traffic, lambda: fetch.is_looked_up)
    assert fetch.found == dict.fromkeys(NAMES, "peer")
    fetch.targets = [ExpectedBlock(name, 7 - number) for number, name in enumerate(NAMES)]
    traffic.load(fetch)
    wait_for(traffic, lambda: fetch.is_loaded)
    traffic.end(fetch)
    assert fetch.arrived == set(NAMES) and traffic.counts.fetched_blocks == 5
    for number in range(5):
        (record,) = core.records.empty(0, 1)
        HostRecords(own).read(0, [7 - number], [record])
        assert torch.equal(record, core.record(number + 1))


def wait_for(traffic: BlockTraffic, is_done: Callable[[], bool]) -> None:
    for _ in range(int(WAIT_S / 0.05)):
        if is_done():
            return
        traffic.wait(0.05)
    raise AssertionError("nothing came")
