"""One rank of a model: its first message, loading its part of the model, and executing the messages of rank 0.

    RankStart ──► load_part ──► RankPart ──► RankReady ──► messages of rank 0, until it closes the connection

Rank 0 calls `load_part` too, and uses the part with the core's scheduler and sampler (`ranks.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from tokenmill.arch.packed_formats import stored_formats
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.arch.tensors import tensors_of
from tokenmill.arch.unproven import is_chosen
from tokenmill.config import EngineConfig
from tokenmill.engine.backends import find_backend
from tokenmill.engine.model import kv_storage, open_source
from tokenmill.engine.stage_ring import make_link
from tokenmill.errors import InvalidConfig, TokenmillError
from tokenmill.kv.pool_memory import PoolMemory
from tokenmill.kv.storage import KVStorage
from tokenmill.models.protocol import StagedModel
from tokenmill.parallel.cuts import cut_spec, shard_model
from tokenmill.parallel.group import RankGroup, Shard
from tokenmill.parallel.stage_link import StageLink
from tokenmill.parallel.stages import Mesh, split_layers
from tokenmill.runner.ranked import FollowingSampler, follow, run_plan
from tokenmill.runner.runner import ModelRunner
from tokenmill.runner.staged import StageRunner, run_message
from tokenmill.sampling.sampler import Sampler
from tokenmill.weights.rank_weights import RankWeights

if TYPE_CHECKING:
    from tokenmill.runner.cuda_runner import CudaRunner
    from tokenmill.runner.staged_cuda import StagedCudaRunner

log = logging.getLogger(__name__)


class RankStart(msgspec.Struct, frozen=True):
    """The first message to a rank: its position, and what to load."""

    config: EngineConfig  # resolved
    model_path: str
    rank: int
    descriptor: int = -1  # of the anonymous file that the ranks of a stage share or meet through
    before: int = -1  # descriptors of the connections to the previous and the next stage, if there are several
    behind: int = -1
    behind_at: tuple[str, int] | None = None  # for a rank on another machine: address of the next stage; None: the core
    core_port: int = 0  # the core's port for this rank, if the next stage is the core; 0: the port that it joined at
    pool: int = -1  # descriptor of the file with its part of the KV pool, if the core maps it too

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.config.parallel.tp, self.config.parallel.pp)

    @property
    def descriptors(self) -> tuple[int, int, int, int]:
        return self.descriptor, self.before, self.behind, self.pool


def open_link(start: RankStart) -> StageLink | None:
    """Open the stage link of a rank that runs in a process; None if there is one stage."""
    if start.before < 0:
        return None
    is_first = start.mesh.stage(start.rank) == 0
    before, behind = Connection(start.before), Connection(start.behind)
    return make_link(start.config, Path(start.model_path), before, behind, is_first=is_first)


class RankReady(msgspec.Struct, frozen=True):
    """A rank's first reply: it has loaded its part of the model, or the error."""

    rank: int
    error: str | None = None
    hint: str | None = None
    adapted: list[str] = []  # names of this rank's matrices that adapters may change


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a model: some of its layers, and some rows of their matrices."""

    config: EngineConfig
    rank: int
    layers: range
    model: StagedModel
    storage: KVStorage
    link: StageLink | None  # None: there is one stage

    def row_runner(self, sampler: Sampler) -> ModelRunner:
        config = self.config
        assert config.model.max_context is not None
        rows, context = config.scheduler.num_rows, config.model.max_context
        part = self.rank % config.parallel.tp if config.parallel.dp_attention else None
        return ModelRunner(self.model, self.storage, sampler, rows, context, part)

    def cuda_runner(self, sampler: Sampler) -> CudaRunner:
        from tokenmill.runner.cuda_runner import (
            CudaRunner,  # needs Triton, which may be missing on machines without a GPU
        )

        config = self.config
        assert config.model.max_context is not None
        return CudaRunner(self.model, self.storage, sampler, config.scheduler.num_rows, config.model.max_context)

    def staged_cuda_runner(self, sampler: Sampler) -> StagedCudaRunner:
        from tokenmill.models.decoder import Decoder
        from tokenmill.runner.staged_cuda import StagedCudaRunner

        config, model = self.config, self.model
        assert config.model.max_context is not None and self.link is not None
        assert isinstance(model, Decoder), "the only model class for GPUs"
        rows, tokens = config.scheduler.num_rows, config.scheduler.num_tokens
        return StagedCudaRunner(model, self.storage, sampler, rows, config.model.max_context, self.link, tokens)

    def stage_runner(self, sampler: Sampler) -> StageRunner:
        assert self.link is not None
        return StageRunner(self.row_runner(sampler), self.model, self.link, is_first=self.layers.start == 0)


def load_part(
    config: EngineConfig,
    spec: ModelSpec,
    model_path: Path,
    rank: int,
    group: RankGroup,
    link: StageLink | None,
    memory: PoolMemory | None = None,
) -> RankPart:
    """Load one rank's part of a model and allocate its part of the KV pool, in `memory` if the core maps it too."""
    mesh = Mesh(config.parallel.tp, config.parallel.pp)
    layers = split_layers(spec, mesh.pp)[mesh.stage(rank)]
    parallel = config.parallel
    loads = {} if parallel.expert_loads is None else read_loads(Path(parallel.expert_loads), spec)
    by_heads = not parallel.dp_attention
    copies = parallel.expert_copies
    cuts = shard_model(
        spec, group.size, group.rank, ep=parallel.ep, loads=loads, copies=copies, by_heads=by_heads,
        sums=has_sums(config), in_blocks=names_in_blocks(spec, model_path),
    )  # fmt: skip
    source = RankWeights(open_source(config, model_path, spec), cuts, layers)
    own = cut_spec(spec, group.size, group.rank, by_heads=by_heads)
    model = find_backend(config.ops.backend).build_model(config, own, source, Shard(group, cuts, layers))
    torch.cuda.empty_cache()  # temporary memory of loading can be reused for the pool; does nothing without a GPU
    return RankPart(config, rank, layers, model, kv_storage(config, own, layers, memory), link)


def has_sums(config: EngineConfig) -> bool:
    """Tell whether ranks sum partial products, which halves the number of exchanges, but makes the order of additions
    depend on the number of ranks. Matrices quantised while loading, and adapters, need whole columns, so not with
    them."""
    is_plain = config.model.quantization == "none" and not config.model.adapter_slots
    return config.parallel.link == "ipc" and not config.ops.deterministic and is_plain and is_chosen("gpu_sums")


def names_in_blocks(spec: ModelSpec, model_path: Path) -> set[str]:
    """Return the names of a checkpoint's matrices that are stored in blocks."""
    return {name.removesuffix(".weight") for name in stored_formats(model_path, spec)}


def read_loads(path: Path, spec: ModelSpec) -> dict[str, list[float]]:
    """Read the expert loads of each layer: the tokens per expert, by the name of the layer's router."""
    sizes = {
        name.removesuffix(".weight"): tensor.shape[0]
        for name, tensor in tensors_of(spec).items()
        if name.endswith("router.weight")
    }
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, list[float]])
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidConfig(f"{path} can't be read as expert loads: {error}", param="expert_loads") from None
    for name, loads in found.items():
        if sizes.get(name) != len(loads) or min(loads) < 0:
            raise InvalidConfig(f"{path}: {name} does not fit this model", param="expert_loads")
    return found


def run_follower(start: RankStart, group: RankGroup, link: StageLink | None, leader: Connection) -> None:
    """Load a part of the model and execute the messages of rank 0 until it closes the connection."""
    config, path = start.config, Path(start.model_path)
    try:
        memory = PoolMemory(start.pool, is_owner=True) if start.pool >= 0 else None
        part = load_part(config, read_spec(path), path, start.rank, group, link, memory)
    except TokenmillError as error:
        log.error("rank %d could not load its part: %s", start.rank, error.message)
        _answer(leader, RankReady(start.rank, error.message, error.hint))
        return
    sampler = FollowingSampler(part.model.vocab_size, config.scheduler.num_rows, part.storage.device)
    slots = part.model.adapter_slots
    _answer(leader, RankReady(start.rank, adapted=[] if slots is None else sorted(slots.names())))
    if start.config.ops.device == "cuda":
        follow(_device_messages(part, sampler), start.rank, group, leader)
        return
    if link is None:
        follow(partial(run_plan, part.row_runner(sampler)), start.rank, group, leader)
        return
    try:
        follow(partial(run_message, part.stage_runner(sampler)), start.rank, group, leader)
    finally:
        link.close()


def _device_messages(part: RankPart, sampler: Sampler) -> Callable[[bytes], bytes | None]:
    """Return the function that executes messages of rank 0 on a rank with a GPU."""
    if part.link is not None:
        from tokenmill.runner.staged_cuda import run_device_message

        return partial(run_device_message, part.staged_cuda_runner(sampler))
    from tokenmill.runner.mirrored import mirror

    return partial(mirror, part.cuda_runner(sampler))


def _answer(leader: Connection, ready: RankReady) -> None:
    with suppress(OSError):  # rank 0 has ended: the next read fails
        leader.send_bytes(msgspec.msgpack.encode(ready))
