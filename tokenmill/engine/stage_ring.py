"""The ring of connections between pipeline stages on one machine, and the stage links made from them."""

from __future__ import annotations

from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.arch.cost import DTYPE_BYTES
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.config import EngineConfig
from tokenmill.parallel.stages import Mesh

if TYPE_CHECKING:
    from tokenmill.parallel.stage_link import StageLink  # needs torch, which computing sizes does not

MAX_STREAMS_PER_STEP = 2  # hidden states of rows sampled on the device, and of rows sampled on the host


class StageRing:
    """Connections from each rank to the rank with the same position in the next stage, made before the ranks start."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        pipes = [Pipe(duplex=False) for _ in range(mesh.size)] if mesh.pp > 1 else []
        self._readers = [reader for reader, _ in pipes]  # by reading rank
        self._writers = {mesh.before(rank): writer for rank, (_, writer) in enumerate(pipes)}  # by writing rank

    def descriptors(self, rank: int) -> tuple[int, int]:
        if not self._readers:
            return -1, -1
        return self._readers[rank].fileno(), self._writers[rank].fileno()

    def link(self, rank: int, config: EngineConfig, model_path: Path) -> StageLink | None:
        if not self._readers:
            return None
        is_first = self._mesh.stage(rank) == 0
        return make_link(config, model_path, self._readers[rank], self._writers[rank], is_first=is_first)

    def close_others(self, own: int) -> None:
        for rank in range(self._mesh.size if self._readers else 0):
            if rank != own:
                self._readers[rank].close()
                self._writers[rank].close()


def make_link(
    config: EngineConfig, model_path: Path, before: Connection, behind: Connection, *, is_first: bool
) -> StageLink:
    """Make the link of a rank to the previous and the next stage."""
    if config.ops.device != "cuda":
        from tokenmill.parallel.stage_link import StageLink

        return StageLink(before, behind, reads_ahead=is_first)
    from tokenmill.parallel.device_link import DeviceStageLink

    slot_bytes, num_slots = stage_slots(config, read_spec(model_path))
    return DeviceStageLink(before, behind, reads_ahead=is_first, slot_bytes=slot_bytes, num_slots=num_slots)


def stage_slots(config: EngineConfig, spec: ModelSpec) -> tuple[int, int]:
    """Return the bytes of the largest transfer between stages on GPUs, and how many of them a rank has room for."""
    tokens = max(config.scheduler.num_tokens, config.scheduler.num_rows)
    slot_bytes = tokens * spec.hidden_size * int(DTYPE_BYTES[config.model.dtype])
    return slot_bytes, MAX_STREAMS_PER_STEP * config.parallel.num_lanes


def stage_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the memory of a rank's GPU for transfers between stages: those being sent, and the last received one."""
    slot_bytes, num_slots = stage_slots(config, spec)
    return slot_bytes * (num_slots + 1)
