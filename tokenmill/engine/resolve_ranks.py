"""The ranks of a config: how many there are, where they compute and how they reach each other.

What they can't do is refused by name.
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
MAX_GPU_RANKS = 16  # whose arrivals a window has places for (`ops/triton/batch/exchange.py`)
MAX_SHARING = 8  # ranks that have been seen to compute on one GPU
LINKS = {"shared": "processes that share memory", "gloo": "processes that exchange over loopback", "threads": "threads"}


def resolve_parallel(
    config: EngineConfig, spec: ModelSpec, device: Device, backend: Backend, num_gpus: int, reasons: list[str]
) -> ParallelConfig:
    """Resolve the number of ranks and how they communicate; unsupported combinations are refused by name."""
    parallel = config.parallel
    tp, pp = parallel.tp, parallel.pp
    if parallel.lanes is not None and pp == 1:
        raise InvalidConfig("lanes are those of a pipeline, and pp is 1", param="lanes")
    _require_experts(parallel, spec, backend)
    if parallel.stages_at is not None and (pp == 1 or parallel.link == "threads"):
        problem = "stages_at is where stages of a pipeline (pp) join, in processes"
        raise InvalidConfig(problem, param="stages_at")
    if parallel.dp_attention:
        _require_parting(parallel, spec, backend)
    if parallel.rank_gpus is not None and (device.name != "cuda" or parallel.num_ranks == 1):
        raise InvalidConfig("rank_gpus are those of several ranks (tp) on GPUs", param="rank_gpus")
    if parallel.num_ranks == 1:
        return parallel
    if parallel.num_ranks > MAX_RANKS:
        raise InvalidConfig(f"tp {tp} times pp {pp} is more than {MAX_RANKS} ranks", param="tp")
    if config.model.adapter or config.model.adapter_slots:
        if backend.name == "reference" and spec.experts:
            problem = "adapters of models with experts need the native kernels on several ranks"
            raise InvalidConfig(problem, param="tp" if tp > 1 else "pp", hint="--backend cpu")
        if device.name == "cuda" and not is_chosen("gpu_rank_adapters"):
            problem = "adapters on several ranks with GPUs have not been run on one yet"
            raise InvalidConfig(problem, param="adapter", hint=f"{VARIABLE}=gpu_rank_adapters tries it all the same")
        if parallel.ep:
            raise InvalidConfig("adapters can't be used with whole experts on ranks", param="ep")
    if pp > 1 and (limit := stage_limits(spec, pp)) is not None:
        raise InvalidConfig(f"pp {pp} was asked for, but {limit}", param="pp")
    if device.name == "cuda":
        return _on_gpus(parallel, spec, num_gpus, reasons)
    has_native = native_kernels.is_available()[0]
    link: Link = parallel.link if parallel.link != "auto" else "shared" if has_native else "gloo"
    if link == "gloo" and backend.name == "cpu":
        raise InvalidConfig("native kernels exchange over shared memory, not over gloo", param="link")
    if link == "shared" and not has_native:
        raise InvalidConfig("shared memory between ranks needs the native kernels", param="link", hint="--link gloo")
    if tp > 1:
        reasons.append(f"tensor parallel: {tp} ranks in {LINKS[link]}, each with its rows of every matrix")
    if parallel.dp_attention:
        reasons.append("data parallel attention: each rank keeps the contexts of some sequences, and attends for them")
    if parallel.ep:
        copies = f", {parallel.expert_copies} of a layer on one more" if parallel.expert_copies else ""
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
        problem = f"rank_gpus are {parallel.num_ranks} numbers of GPUs with commas between them, 0 first"
        raise InvalidConfig(f"{problem}, not {parallel.rank_gpus!r}", param="rank_gpus")
    return found


def ranks_of_a_device(parallel: ParallelConfig) -> int:
    """How many ranks share the memory of a device: all of them on CPUs, on GPUs those of the fullest."""
    if parallel.link != "ipc":
        return parallel.num_ranks
    return max(Counter(gpu_of_each_rank(parallel)).values())


def _on_gpus(parallel: ParallelConfig, spec: ModelSpec, num_gpus: int, reasons: list[str]) -> ParallelConfig:
    """Ranks as processes, a GPU each unless several are put on one."""
    if parallel.stages_at is not None:
        problem = "stages of a pipeline of GPUs must be on one machine: they map each other's memory"
        raise InvalidConfig(problem, param="stages_at")
    if parallel.pp > 1 and not is_chosen("gpu_stages"):
        problem = "pipelines of GPUs have not been run on one yet"
        raise InvalidConfig(problem, param="pp", hint=f"{VARIABLE}=gpu_stages tries it all the same")
    if parallel.link not in ("auto", "ipc"):
        problem = f"ranks on GPUs exchange by ipc, not by {parallel.link}"
        raise InvalidConfig(problem, param="link", hint="--link ipc, which is the default")
    if parallel.tp > MAX_GPU_RANKS:
        raise InvalidConfig(f"tp {parallel.tp} is more than {MAX_GPU_RANKS} GPUs", param="tp")
    gpus = gpu_of_each_rank(parallel)
    if max(gpus) >= num_gpus:
        raise InvalidConfig(
            f"{parallel.num_ranks} ranks need GPUs 0 to {max(gpus)}, and torch sees {num_gpus}",
            param=("tp" if parallel.tp > 1 else "pp") if parallel.rank_gpus is None else "rank_gpus",
            hint="--rank-gpus 0,0 puts two ranks on one GPU, for tests",
        )
    is_proven = max(gpus) == 0 and len(gpus) <= MAX_SHARING
    if not is_proven and not is_chosen("gpu_ranks"):
        raise InvalidConfig(
            f"{len(gpus)} ranks on GPUs {', '.join(map(str, gpus))}: only up to {MAX_SHARING} on one GPU have been run",
            param="tp",
            hint=f"{VARIABLE}=gpu_ranks tries it all the same",
        )
    where = "a GPU each" if len(set(gpus)) == len(gpus) else f"GPUs {', '.join(map(str, gpus))}"
    lanes = parallel.lanes
    if parallel.tp > 1:
        reasons.append(f"tensor parallel: {parallel.tp} ranks with {where}, each with its rows of every matrix")
    if parallel.pp > 1:
        lanes = lanes or parallel.pp + 1  # one is planned while all stages compute
        layers = " + ".join(str(len(stage)) for stage in split_layers(spec, parallel.pp))
        reasons.append(f"pipeline: {parallel.pp} stages of {layers} layers with {where}, {lanes} steps in flight")
    return replace(parallel, link="ipc", lanes=lanes)


def _require_experts(parallel: ParallelConfig, spec: ModelSpec, backend: Backend) -> None:
    """Refuse settings of experts that would do nothing, and what can't be done."""
    if parallel.expert_copies and parallel.expert_loads is None:
        raise InvalidConfig("which experts get copies is decided by expert_loads", param="expert_copies")
    if not parallel.ep:
        if parallel.expert_loads is not None:
            raise InvalidConfig("expert_loads place whole experts on ranks: that is ep", param="expert_loads")
        return
    if parallel.tp == 1:
        raise InvalidConfig("ep shares the experts out among the ranks of tp, and tp is 1", param="ep")
    if not spec.experts:
        raise InvalidConfig("ep was asked for, but this model has no experts", param="ep")
    if min(experts.num_experts for experts in spec.experts) < parallel.tp:
        raise InvalidConfig("ep was asked for, but there are more ranks than experts", param="ep")
    if backend.name != "cpu":
        raise InvalidConfig("whole experts on ranks need the native kernels", param="ep", hint="--backend cpu")


def _require_parting(parallel: ParallelConfig, spec: ModelSpec, backend: Backend) -> None:
    """Refuse data parallel attention where it would do nothing, or can't be done."""
    if parallel.tp == 1:
        problem = "dp_attention shares sequences out among the ranks of tp, and tp is 1"
        raise InvalidConfig(problem, param="dp_attention")
    if backend.name != "cpu":
        problem = "attention of ranks for sequences of their own needs the native kernels"
        raise InvalidConfig(problem, param="dp_attention", hint="--backend cpu")
    if (limit := parting_limits(spec)) is not None:
        raise InvalidConfig(f"dp_attention was asked for, but {limit}", param="dp_attention")


def heaviest_rank(
    spec: ModelSpec, parallel: ParallelConfig, layout: KVLayout, block_size: int
) -> tuple[float, KVLayout]:
    """Return the largest share of the weights on any rank, and the KV cache layout of the rank with the largest
    cache."""
    stages = split_layers(spec, parallel.pp)
    share = max(stage_share(spec, layers) for layers in stages) / parallel.tp
    layouts = (layout.of_layers(layers) for layers in stages)
    return share, max(layouts, key=lambda one: one.block_bytes(block_size))
