"""Resolving the ranks of a config: their number, their devices and how they communicate.

Settings that ranks do not support are refused with an error that names the setting.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tokenmill.arch.spec import ModelSpec
from tokenmill.arch.unproven import VARIABLE, is_chosen
from tokenmill.config import EngineConfig, ParallelConfig
from tokenmill.config.engine import Link
from tokenmill.engine.backends import Backend, Device
from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import KVLayout
from tokenmill.ops import cpu as native_kernels
from tokenmill.parallel.cuts import parting_limits
from tokenmill.parallel.stages import split_layers, stage_limits, stage_share

MAX_RANKS = 64
MAX_GPU_RANKS = 16  # an exchange window has arrival counters for this many (`ops/triton/batch/exchange.py`)
MAX_RANKS_ON_ONE_GPU = 8  # as many as have been tested
LINKS = {
    "shared": "processes with shared memory",
    "gloo": "processes connected over loopback",
    "threads": "threads",
}


def resolve_parallel(
    config: EngineConfig, spec: ModelSpec, device: Device, backend: Backend, num_gpus: int, reasons: list[str]
) -> ParallelConfig:
    """Resolve the number of ranks and how they communicate; unsupported combinations are refused by name."""
    parallel = config.parallel
    tp, pp = parallel.tp, parallel.pp
    if parallel.lanes is not None and pp == 1:
        raise InvalidConfig("lanes needs a pipeline (pp of 2 or more)", param="lanes")
    _require_experts(parallel, spec, backend)
    if parallel.stages_at is not None and (pp == 1 or parallel.link == "threads"):
        problem = "stages_at needs a pipeline (pp of 2 or more) with ranks in processes"
        raise InvalidConfig(problem, param="stages_at")
    if parallel.dp_attention:
        _require_parting(parallel, spec, backend)
    if parallel.rank_gpus is not None and (device.name != "cuda" or parallel.num_ranks == 1):
        raise InvalidConfig("rank_gpus needs several ranks (tp) on GPUs", param="rank_gpus")
    if parallel.num_ranks == 1:
        if parallel.link != "auto":
            raise InvalidConfig("link needs several ranks (tp or pp of 2 or more)", param="link")
        return parallel
    if parallel.num_ranks > MAX_RANKS:
        raise InvalidConfig(f"tp {tp} times pp {pp} is more than {MAX_RANKS} ranks", param="tp")
    if config.model.adapter or config.model.adapter_slots:
        if backend.name == "reference" and spec.experts:
            problem = "adapters for models with experts on several ranks need the native kernels"
            raise InvalidConfig(problem, param="tp" if tp > 1 else "pp", hint="--backend cpu")
        if parallel.ep:
            raise InvalidConfig("adapters can't be combined with expert parallelism (ep)", param="ep")
    if pp > 1 and (limit := stage_limits(spec, pp)) is not None:
        raise InvalidConfig(f"pp {pp} can't be used: {limit}", param="pp")
    if device.name == "cuda":
        return _on_gpus(parallel, spec, num_gpus, reasons)
    has_native = native_kernels.is_available()[0]
    link: Link = parallel.link if parallel.link != "auto" else "shared" if has_native else "gloo"
    if link == "gloo" and backend.name == "cpu":
        raise InvalidConfig("native kernels exchange through shared memory, not through gloo", param="link")
    if link == "shared" and not has_native:
        raise InvalidConfig("shared memory between ranks needs the native kernels", param="link", hint="--link gloo")
    if tp > 1:
        reasons.append(f"tensor parallel: {tp} ranks in {LINKS[link]}, each with its rows of every matrix")
    if parallel.dp_attention:
        reasons.append("data parallel attention: each rank stores and attends to the contexts of some sequences")
    if parallel.ep:
        copies = f", {parallel.expert_copies} of each layer on a second rank" if parallel.expert_copies else ""
        reasons.append(f"expert parallel: each rank has whole experts{copies}")
    if pp > 1:
        layers = " + ".join(str(len(stage)) for stage in split_layers(spec, pp))
        lanes = parallel.num_lanes
        where = "processes" if parallel.stages_at is None else f"processes that join at {parallel.stages_at}"
        where = LINKS[link] if tp > 1 or link == "threads" else where
        reasons.append(f"pipeline: {pp} stages of {layers} layers in {where}, {lanes} steps in flight")
    return replace(parallel, link=link)


def gpu_of_each_rank(parallel: ParallelConfig) -> list[int]:
    if parallel.rank_gpus is None:
        return list(range(parallel.num_ranks))
    try:
        found = [int(part) for part in parallel.rank_gpus.split(",")]
    except ValueError:
        found = []
    if len(found) != parallel.num_ranks or found[0] != 0 or min(found) < 0:
        problem = f"rank_gpus must be {parallel.num_ranks} comma-separated GPU numbers that start with 0"
        raise InvalidConfig(f"{problem}, got {parallel.rank_gpus!r}", param="rank_gpus")
    return found


def ranks_of_a_device(parallel: ParallelConfig) -> int:
    """Return how many ranks share the memory of a device: on a CPU all of them, on GPUs the most on any GPU."""
    if parallel.link != "ipc":
        return parallel.num_ranks
    return max(Counter(gpu_of_each_rank(parallel)).values())


def _on_gpus(parallel: ParallelConfig, spec: ModelSpec, num_gpus: int, reasons: list[str]) -> ParallelConfig:
    """Resolve GPU ranks: each is a process with its own GPU, unless `rank_gpus` puts several on one."""
    if parallel.stages_at is not None:
        problem = "pipeline stages on GPUs must be on one machine: they map each other's memory"
        raise InvalidConfig(problem, param="stages_at")
    if parallel.link not in ("auto", "ipc"):
        problem = f"ranks on GPUs exchange through ipc, not through {parallel.link}"
        raise InvalidConfig(problem, param="link", hint="--link ipc, which is the default")
    if parallel.tp > MAX_GPU_RANKS:
        raise InvalidConfig(f"tp {parallel.tp} is more than {MAX_GPU_RANKS} GPUs", param="tp")
    gpus = gpu_of_each_rank(parallel)
    if max(gpus) >= num_gpus:
        raise InvalidConfig(
            f"{parallel.num_ranks} ranks need GPUs 0 to {max(gpus)}, but torch sees {num_gpus}",
            param=("tp" if parallel.tp > 1 else "pp") if parallel.rank_gpus is None else "rank_gpus",
            hint="--rank-gpus 0,0 puts two ranks on one GPU, for tests",
        )
    is_tested = max(gpus) == 0 and len(gpus) <= MAX_RANKS_ON_ONE_GPU
    if not is_tested and not is_chosen("gpu_ranks"):
        problem = f"only up to {MAX_RANKS_ON_ONE_GPU} ranks on one GPU have been tested"
        raise InvalidConfig(
            f"{len(gpus)} ranks on GPUs {', '.join(map(str, gpus))}: {problem}",
            param="tp" if parallel.tp > 1 else "pp",
            hint=f"{VARIABLE}=gpu_ranks turns them on anyway",
        )
    where = "a GPU each" if len(set(gpus)) == len(gpus) else f"GPUs {', '.join(map(str, gpus))}"
    lanes = parallel.lanes
    if parallel.tp > 1:
        reasons.append(f"tensor parallel: {parallel.tp} ranks with {where}, each with its rows of every matrix")
    if parallel.pp > 1:
        lanes = lanes or parallel.pp + 1  # one step is planned while all stages compute
        layers = " + ".join(str(len(stage)) for stage in split_layers(spec, parallel.pp))
        reasons.append(f"pipeline: {parallel.pp} stages of {layers} layers with {where}, {lanes} steps in flight")
    return replace(parallel, link="ipc", lanes=lanes)


def _require_experts(parallel: ParallelConfig, spec: ModelSpec, backend: Backend) -> None:
    """Refuse expert settings that would have no effect or are not supported."""
    if parallel.expert_copies and parallel.expert_loads is None:
        raise InvalidConfig("expert_copies needs expert_loads, which selects the experts", param="expert_copies")
    if not parallel.ep:
        if parallel.expert_loads is not None:
            raise InvalidConfig("expert_loads needs expert parallelism (ep)", param="expert_loads")
        return
    if parallel.tp == 1:
        raise InvalidConfig("ep distributes the experts over the ranks of tp, but tp is 1", param="ep")
    if not spec.experts:
        raise InvalidConfig("ep can't be used: this model has no experts", param="ep")
    if min(experts.num_experts for experts in spec.experts) < parallel.tp:
        raise InvalidConfig("ep can't be used: there are more ranks than experts", param="ep")
    if backend.name != "cpu":
        raise InvalidConfig("ep needs the native kernels", param="ep", hint="--backend cpu")


def _require_parting(parallel: ParallelConfig, spec: ModelSpec, backend: Backend) -> None:
    """Refuse data parallel attention if it would have no effect or is not supported."""
    if parallel.tp == 1:
        problem = "dp_attention distributes the sequences over the ranks of tp, but tp is 1"
        raise InvalidConfig(problem, param="dp_attention")
    if backend.name != "cpu":
        raise InvalidConfig("dp_attention needs the native kernels", param="dp_attention", hint="--backend cpu")
    if (limit := parting_limits(spec)) is not None:
        raise InvalidConfig(f"dp_attention can't be used: {limit}", param="dp_attention")


def heaviest_rank(
    spec: ModelSpec, parallel: ParallelConfig, layout: KVLayout, block_size: int
) -> tuple[float, KVLayout]:
    """Return the largest share of the weights on any rank, and the KV cache layout of the rank with the largest
    cache."""
    stages = split_layers(spec, parallel.pp)
    share = max(stage_share(spec, layers) for layers in stages) / parallel.tp
    layouts = (layout.of_layers(layers) for layers in stages)
    return share, max(layouts, key=lambda one: one.block_bytes(block_size))
