"""Blocks that are copied beside a device which does everything as late as it may: steps that were launched have not run
yet when a copy is asked for, and later ones run while it is made. What is kept and brought back must not show it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenmill.arch.cache_parts import CacheField
from tokenmill.kv.blocks import PrefixIndex
from tokenmill.kv.layout import CacheGroup, KVLayout
from tokenmill.kv.names import BlockName, ExpectedBlock, Fetch
from tokenmill.kv.records import DeviceRecords
from tokenmill.kv.storage import KVStorage
from tokenmill.kv.tiers.disk import DiskTier
from tokenmill.kv.tiers.host import HostTier
from tokenmill.kv.traffic import BlockTraffic

FIELDS = CacheField("keys", (2, 8), "float16"), CacheField("values", (2, 8), "float16")
LAYOUT = KVLayout((CacheGroup(FIELDS, None, (0, 1, 2)),))
NUM_BLOCKS, NUM_SLOTS, NUM_TURNS = 8, 6, 400
LIMIT_S = 60.0


class LateDevice:
    """Steps in the order of their launch, none of which runs before it has to; a stream for copies."""

    def __init__(self, seed: int, *, keeps_order: bool = True) -> None:
        """`keeps_order`: copies run behind the steps that were launched before them."""
        self._steps: list[Callable[[], None]] = []
        self._num_run = 0
        self._lock = threading.Lock()
        self._rng = random.Random(seed)
        self._keeps_order = keeps_order

    def launch(self, step: Callable[[], None]) -> None:
        self._steps.append(step)

    def run(self, copies: Callable[[], None]) -> None:
        if self._keeps_order:
            self.run_steps(len(self._steps))
        if self._rng.random() < 0.5:
            time.sleep(0.0005)  # more is launched meanwhile, and may run first: nothing orders it behind copies
            self.run_steps(len(self._steps) if self._keeps_order else 0)
        with self._lock:
            copies()

    def run_steps(self, number: int) -> None:
        """Run all steps up to one."""
        with self._lock:
            while self._num_run < number:
                self._steps[self._num_run]()
                self._num_run += 1

    def finish(self) -> None:
        self.run_steps(len(self._steps))


def content(number: int, size: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def name_of(number: int) -> BlockName:
    return BlockName(0, number.to_bytes(16, "big"))


class CopyScene:
    """A scheduler's part: blocks are taken, written by steps, registered, read by steps; some are brought back."""

    def __init__(self, device: LateDevice, seed: int, folder: Path | None = None) -> None:
        """`folder`: blocks are kept there too."""
        self.device = device
        self.storage = KVStorage(LAYOUT, NUM_BLOCKS, 4, torch.device("cpu"))
        self.planes = [tensor.view(torch.uint8).view(3, NUM_BLOCKS, -1).numpy() for tensor in self.storage.regions[0]]
        self.size = sum(plane.shape[0] * plane.shape[2] for plane in self.planes)
        self.index = PrefixIndex(1)
        records = DeviceRecords(self.storage, device)
        self.tier = HostTier(records.empty, records.sizes, [0], NUM_SLOTS * self.size)
        disk = [] if folder is None else [DiskTier(folder, bytes(32), 1 << 30)]
        self.traffic = BlockTraffic(lambda: DeviceRecords(self.storage, device), self.index, [0], disk, self.tier)
        self.rng = random.Random(seed)
        self.num_wrong = self.num_brought = 0

    def write(self, block: int, number: int) -> None:
        values, start = content(number, self.size), 0
        for plane in self.planes:
            part = plane[:, block]
            part[...] = values[start : start + part.size].reshape(part.shape)
            start += part.size

    def check(self, block: int, number: int) -> None:
        found = np.concatenate([plane[:, block].ravel() for plane in self.planes])
        self.num_wrong += not np.array_equal(found, content(number, self.size))

    def take(self) -> int:
        block = self.rng.randrange(1, NUM_BLOCKS)
        self.index.forget(block)
        return block

    def compute(self, number: int) -> None:
        block = self.take()
        self.device.launch(lambda: self.write(block, number))
        self.index.register(*name_of(number), block)
        self.device.launch(lambda: self.check(block, number))

    def bring(self, number: int) -> None:
        """Bring a block that was computed before, where it is still kept, into one that a step may still read."""
        if self.index.find(*name_of(number)) is not None:
            return
        fetch = Fetch([name_of(number)])
        self.traffic.look_up(fetch)
        self.wait(lambda: fetch.is_looked_up)
        if not fetch.found:
            return
        block = self.take()
        fetch.targets = [ExpectedBlock(name_of(number), block)]
        self.traffic.load(fetch)
        self.wait(lambda: fetch.is_loaded)
        if name_of(number) in fetch.arrived:
            self.num_brought += 1
            self.index.register(*name_of(number), block)
            self.device.launch(lambda: self.check(block, number))

    def wait(self, is_done: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + LIMIT_S
        while not is_done():
            assert time.monotonic() < ends_s
            self.traffic.wait(0.01)

    def play(self) -> None:
        for number in range(NUM_TURNS):
            self.compute(number)
            if self.rng.random() < 0.3:  # otherwise it may be overwritten while it is saved
                self.wait(lambda name=name_of(number): self.tier.has(name))
            if self.rng.random() < 0.5:
                self.bring(self.rng.randrange(max(0, number - 12), number + 1))
        self.device.finish()
        self.traffic.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_late_device_changes_nothing(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.kv.records.STAGING_BYTES", 1 if seed == 2 else 1 << 20)
    scene = CopyScene(LateDevice(seed), seed, tmp_path if seed == 3 else None)
    scene.play()
    assert scene.num_brought > 0 and scene.num_wrong == 0
    assert seed < 3 or len([path for path in tmp_path.rglob("*") if path.is_file()]) > 2 * NUM_SLOTS


def test_copies_before_their_steps_are_noticed() -> None:
    """The same with copies that do not wait for steps: what this test looks for is there to be seen."""
    scene = CopyScene(LateDevice(1, keeps_order=False), 1)
    scene.play()
    assert scene.num_wrong > 0


class HeldDevice(LateDevice):
    """One whose copies wait until they are let go."""

    def __init__(self) -> None:
        super().__init__(0)
        self.may_copy = threading.Event()

    def run(self, copies: Callable[[], None]) -> None:
        assert self.may_copy.wait(LIMIT_S)
        super().run(copies)


def test_the_newest_of_many_blocks_at_once_has_a_slot(tmp_path: Path) -> None:
    """All blocks of the pool wait to be saved, and are more than host memory has slots for."""
    device = HeldDevice()
    scene = CopyScene(device, 0, tmp_path)
    for block in range(1, NUM_BLOCKS):
        device.launch(lambda block=block: scene.write(block, block))
        scene.index.register(*name_of(block), block)
    device.may_copy.set()
    scene.wait(lambda: scene.tier.has(name_of(NUM_BLOCKS - 1)))
    scene.traffic.close()
