"""One of two processes that transfer blocks by NIXL: `python -m tests.support.nixl_program serve SOCKET`, or `read
SOCKET [stop PID | kill PID]`, which stops or kills the other process after it has sent the addresses of its blocks.

`serve` answers until its standard input ends. `read` prints a JSON object: which blocks arrived intact, and in `then`
the result of a second fetch after the other process continued.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from tokenmill.arch.cache_parts import CacheField
from tokenmill.kv.blocks import PrefixIndex
from tokenmill.kv.layout import CacheGroup, KVLayout
from tokenmill.kv.names import BlockName
from tokenmill.kv.records import BlockRecords, DeviceRecords, GpuCopyStream, HostRecords, Record, bytes_of
from tokenmill.kv.storage import KVStorage
from tokenmill.kv.tiers import peer
from tokenmill.kv.tiers.nixl import BlockMap, MemoryAgent
from tokenmill.kv.tiers.peer import BlockServer, PeerTier

FIELDS = CacheField("keys", (2, 64), "float16"), CacheField("values", (2, 64), "float16")
LAYOUT = KVLayout((CacheGroup(FIELDS, None, tuple(range(12))),))
NUM_BLOCKS, BLOCK_SIZE = 200, 16
DIGEST = b"d" * 32
DEVICE = torch.device(os.environ.get("NIXL_PROGRAM_DEVICE", "cpu"))  # device of the pools
NAMES = [BlockName(0, number.to_bytes(16, "big")) for number in range(1, NUM_BLOCKS)]
ABSENT = BlockName(0, b"x" * 16)


def filled_pool(seed: int) -> KVStorage:
    storage = KVStorage(LAYOUT, NUM_BLOCKS, BLOCK_SIZE, DEVICE)
    for tensor in storage.regions[0]:
        bits = tensor.view(torch.uint8)
        bits.copy_(torch.randint(0, 256, bits.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return storage


def records_of(storage: KVStorage) -> BlockRecords:
    if DEVICE.type == "cpu":
        return HostRecords(storage)
    return DeviceRecords(storage, GpuCopyStream(torch.cuda.current_stream(DEVICE)))


class NixlCore:
    """A pool whose blocks are registered, so that others may read them."""

    def __init__(self, address: str, seed: int = 3, *, has_nixl: bool = True) -> None:
        self.storage = filled_pool(seed)
        self.records = records_of(self.storage)
        self.index = PrefixIndex(1)
        for block, name in enumerate(NAMES, start=1):
            self.index.register(*name, block)
        self.agent = MemoryAgent(self.records, [0]) if has_nixl else None
        self.server = BlockServer(address, lambda: DIGEST, self.index, [0], lambda: self.records, self.agent)

    def record(self, block: int) -> bytes:
        (record,) = self.records.empty(0, 1)
        self.records.read(0, [block], [record])
        return bytes(bytes_of(record))


def serve(address: str) -> None:
    core = NixlCore(address)
    print("ready", flush=True)
    sys.stdin.read()
    core.server.close()


def fetched(tier: PeerTier, names: Sequence[BlockName], own: BlockRecords) -> list[bytes | None]:
    scratch = tier.scratch(0, lambda region: own.empty(region, len(names)))
    with tier.records(names, scratch[: len(names)]) as found:
        return [None if record is None else bytes(bytes_of(record.cpu())) for record in found]


def read(address: str, what: str = "", pid: int = 0) -> dict[str, Any]:
    own = records_of(filled_pool(5))
    agent, expected = MemoryAgent(own, [0]), NixlCore.record
    truth = NixlCore(address + ".truth", has_nixl=False)
    want = [expected(truth, block) for block in range(1, NUM_BLOCKS)]
    if what:
        peer.TIMEOUT_S = 1.0
        real = agent.read

        def disturbed(other: BlockMap, group: int, blocks: Sequence[tuple[int, Record]], limit_s: float) -> None:
            os.kill(pid, signal.SIGSTOP)  # it no longer answers, so the transfer is interrupted
            if what == "kill":
                threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
            real(other, group, blocks, limit_s)

        agent.read = disturbed  # type: ignore[method-assign]
    began = time.monotonic()
    tier = PeerTier(address, DIGEST, agent)
    names = [*NAMES[:60], ABSENT]
    found = fetched(tier, names, own)
    tier.close()
    report: dict[str, Any] = {
        "seconds": time.monotonic() - began,
        "whole": [data == right for data, right in zip(found, want[:60], strict=False)],
        "absent": found[-1] is None,
        "any": any(data is not None for data in found),
    }
    if what == "stop":
        os.kill(pid, signal.SIGCONT)
        report["is_read_again"] = agent.can_read(fetch_block_map(address))
        again = PeerTier(address, DIGEST, agent)
        report["then"] = fetched(again, NAMES[:60], own) == want[:60]
        again.close()
    return report


def fetch_block_map(address: str) -> BlockMap:
    """Return the block map of the core at an address, requested by an agent that has seen no failure."""
    tier = PeerTier(address, DIGEST, MemoryAgent(records_of(filled_pool(1)), [0]))
    found = tier._readable()
    tier.close()
    assert found is not None
    return found


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        print(json.dumps(read(sys.argv[2], *sys.argv[3:4], *map(int, sys.argv[4:]))), flush=True)
        os._exit(0)  # NIXL may wait for a process that has ended
