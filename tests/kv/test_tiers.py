"""Records of blocks, and the tiers that keep them: what is kept comes back whole or not at all, within its bounds."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill.arch.cache_parts import CacheField
from tokenmill.kv.layout import CacheGroup, KVLayout
from tokenmill.kv.names import BlockName
from tokenmill.kv.records import DeviceRecords, HostRecords
from tokenmill.kv.storage import KVStorage
from tokenmill.kv.tiers.disk import DiskTier
from tokenmill.kv.tiers.host import HostTier

CPU = torch.device("cpu")
HALVES = CacheField("keys", (2, 8), "float16"), CacheField("values", (2, 8), "float16")
BYTES = CacheField("keys", (2, 8), "int8"), CacheField("values", (2, 8), "int8")
INPUTS = (CacheField("inputs", (32,), "float16"),)
STATE = CacheField("state", (2, 3, 4), "float32"), CacheField("tail", (5, 3), "float32")
LAYOUTS = {
    "one group": KVLayout((CacheGroup(HALVES, None, (0, 1, 2)),)),
    "a window": KVLayout((CacheGroup(HALVES, None, (1, 3)), CacheGroup(HALVES, 8, (0, 2)))),
    "scales": KVLayout((CacheGroup(BYTES, None, (0, 1)),)),
    "other fields beside": KVLayout((CacheGroup(HALVES, None, (0, 1)), CacheGroup(INPUTS, None, (2, 3)))),
    "states": KVLayout((CacheGroup(HALVES, None, (0, 1)), CacheGroup(STATE, None, (2, 3), kind="state"))),
}
DIGEST = bytes(range(32))


class AtOnce:
    """A device whose copies are made at once."""

    def run(self, copies: Callable[[], None]) -> None:
        copies()


def device_records(storage: KVStorage) -> DeviceRecords:
    return DeviceRecords(storage, AtOnce())


def filled_storage(layout: KVLayout, seed: int) -> KVStorage:
    has_states = any(group.kind == "state" for group in layout.groups)
    storage = KVStorage(layout, 6, 4, CPU, num_states=5 if has_states else 0)
    drawing = torch.Generator().manual_seed(seed)
    for tensor in (tensor for tensors in storage.regions for tensor in tensors):
        bits = tensor.view(torch.uint8)
        bits.copy_(torch.randint(0, 256, bits.shape, generator=drawing, dtype=torch.uint8))
    return storage


def bits_of(storage: KVStorage) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8).clone() for tensors in storage.regions for tensor in tensors]


@pytest.mark.parametrize("staged_bytes", [1, 1 << 20])  # a block at a time, or all
@pytest.mark.parametrize("name", LAYOUTS)
def test_records_hold_a_block_and_nothing_else(name: str, staged_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of one pool and written to another is that block, for both ways of copying; the others stay."""
    monkeypatch.setattr("tokenmill.kv.records.STAGING_BYTES", staged_bytes)
    layout = LAYOUTS[name]
    for region, ids in ((0, [4, 2, 5]), (2, [6, 8])):
        source = filled_storage(layout, 1)
        if not source.regions[region]:
            continue
        one, other = HostRecords(source), device_records(source)
        kept, also = one.empty(region, len(ids)), other.empty(region, len(ids))
        one.read(region, ids, kept)
        other.read(region, ids, also)
        assert all(torch.equal(a, b) for a, b in zip(kept, also, strict=True))
        for make in (HostRecords, device_records):
            target = filled_storage(layout, 2)
            before = bits_of(target)
            make(target).write(region, ids, kept)
            rows = [block if region == 0 else block - 5 for block in ids]
            expected = dict(zip(map(id, target.regions[region]), source.regions[region], strict=True))
            tensors = [tensor for tensors in target.regions for tensor in tensors]
            for tensor, old in zip(tensors, before, strict=True):
                if id(tensor) in expected:
                    old[:, rows] = expected[id(tensor)].view(torch.uint8)[:, rows]
                assert torch.equal(tensor.view(torch.uint8), old)


# ── disk ───────────────────────────────────────────────────────────────────────────────────────────────


def record_of(number: int, size: int = 1000) -> torch.Tensor:
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)


def name_of(number: int, group: int = 0) -> BlockName:
    return BlockName(group, number.to_bytes(16, "big"))


def read(tier: DiskTier | HostTier, name: BlockName, size: int = 1000) -> torch.Tensor | None:
    with tier.records([name], [torch.zeros(size, dtype=torch.uint8)]) as (record,):
        return None if record is None else record.clone()


def the_file(folder: Path) -> Path:
    (found,) = (path for path in folder.rglob("*") if path.is_file())
    return found


def test_a_kept_block_comes_back_and_belongs_to_its_user_alone(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", DIGEST, 1 << 20)
    assert tier.keep(name_of(1), record_of(1)) > 1000 and tier.keep(name_of(1), record_of(1)) == 0
    again = DiskTier(tmp_path / "kv", DIGEST, 1 << 20)  # another server
    assert again.find([name_of(1), name_of(1, group=1), name_of(2)]) == [True, False, False]
    found = read(again, name_of(1))
    assert found is not None and torch.equal(found, record_of(1))
    file = the_file(tmp_path / "kv")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert all(stat.S_IMODE(parent.stat().st_mode) == 0o700 for parent in list(file.parents)[:2])


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def flip_a_byte_of_the_head(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[9] ^= 1
    file.write_bytes(data)


def cut_off(file: Path) -> None:
    os.truncate(file, 700)


def make_longer(file: Path) -> None:
    os.truncate(file, 3000)


def another_block(file: Path) -> None:
    """A whole file under a name that is not its own."""
    other = DiskTier(file.parents[3] / "other", DIGEST, 1 << 20)
    other.keep(name_of(7), record_of(7))
    file.write_bytes(the_file(file.parents[3] / "other").read_bytes())


def another_model(file: Path) -> None:
    other = DiskTier(file.parents[3] / "other", DIGEST[::-1], 1 << 20)
    other.keep(name_of(1), record_of(7))
    file.write_bytes(the_file(file.parents[3] / "other").read_bytes())


def a_link(file: Path) -> None:
    file.rename(file.parents[3] / "elsewhere")
    file.symlink_to(file.parents[3] / "elsewhere")


@pytest.mark.parametrize(
    "damage",
    [flip_a_byte, flip_a_byte_of_the_head, cut_off, make_longer, another_block, another_model, a_link, Path.unlink],
)
def test_a_damaged_block_is_not_there(damage: Any, tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", DIGEST, 1 << 20)
    tier.keep(name_of(1), record_of(1))
    damage(the_file(tmp_path / "kv"))
    assert read(tier, name_of(1)) is None
    if damage is not a_link:
        assert tier.keep(name_of(1), record_of(1)) > 0, "it is kept anew"
        found = read(tier, name_of(1))
        assert found is not None and torch.equal(found, record_of(1))


def test_models_and_servers_share_a_folder_within_its_bytes(tmp_path: Path) -> None:
    tiers = [DiskTier(tmp_path, digest, 20_000) for digest in (DIGEST, DIGEST, DIGEST[::-1])]
    for number in range(90):
        tiers[number % 3].keep(name_of(number), record_of(number))
        # Each looks anew after a tenth; so three are at most three tenths beyond.
        assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) <= 26_000
    assert tiers[0].find([name_of(2), name_of(87)]) == [False, True]
    assert tiers[1].has(name_of(87)) and not tiers[2].has(name_of(87))


def test_a_full_disk_ends_the_writing_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(tmp_path, DIGEST, 1 << 20)
    tier.keep(name_of(1), record_of(1))

    def full(descriptor: int, buffers: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with caplog.at_level(logging.WARNING):
        assert [tier.keep(name_of(number), record_of(number)) for number in (2, 3)] == [0, 0]
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert the_file(tmp_path).name.startswith(name_of(1).block_hash.hex())
    assert read(tier, name_of(1)) is not None


# ── host memory ────────────────────────────────────────────────────────────────────────────────────────


def test_host_memory_keeps_what_was_used_last() -> None:
    def empty(region: int, number: int) -> list[torch.Tensor]:
        return list(torch.zeros((number, 1000), dtype=torch.uint8))

    def keep(number: int) -> int:
        (slot,) = tier.take_slots([name_of(number)])
        if slot is None:
            return 0
        slot.copy_(record_of(number))
        return tier.put_slot(name_of(number), slot, is_whole=True)

    tier = HostTier(empty, [1000], [0, 0], 3000)
    for number in (1, 2, 3):
        assert keep(number) == 1000 and keep(number) == 0
    with tier.records([name_of(1), name_of(9)], []) as (first, absent):
        assert first is not None and absent is None
        assert keep(4) == keep(5) == 1000
        assert keep(6) == 1000, "the oldest that nobody copies from makes room"
        assert torch.equal(first, record_of(1)), "a block stays as it is while it is copied"
    assert tier.find([name_of(number) for number in range(1, 7)]) == [True, False, False, False, True, True]
    with tier.records([name_of(1)], []):
        slots = tier.take_slots([name_of(number) for number in (7, 8, 9)])
        assert [slot is None for slot in slots] == [False, False, True], "one is copied from"
        assert slots[0] is not None and slots[1] is not None
        assert tier.put_slot(name_of(7), slots[0], is_whole=False) == 0, "it was overwritten meanwhile"
        assert tier.put_slot(name_of(8), slots[1], is_whole=True) == 1000
    assert tier.find([name_of(number) for number in (1, 7, 8)]) == [True, False, True] and keep(9) == 1000
    assert tier.find([name_of(number) for number in (1, 8, 9)]) == [True, True, True], "the slot was given back"
