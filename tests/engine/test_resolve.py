"""`auto` settled: what is chosen on which machine, and that every choice has its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tokenmill.arch.cost import WeightParts
from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, ModelSpec
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, ParallelConfig, SchedulerConfig
from tokenmill.config.engine import KVDType
from tokenmill.engine.backends import BACKENDS, Backend, KeptWeights, StoredWeights
from tokenmill.engine.resolve import MachineFacts, Resolved, resolve
from tokenmill.errors import InvalidConfig
from tokenmill.runner.memory import GPU_START_BYTES, RunnerLimits, runner_bytes

LAYER = LayerSpec(Gqa(8, 2, 64, 0.125, None), MlpSpec(1024))
SPEC = ModelSpec("llama", 32_000, 512, (LAYER,) * 4, 1e-5, 131_072, tied_head=True, dtype="bfloat16")
LAPTOP = MachineFacts(cores=4, free_bytes={"cpu": 8 << 30})
SERVER = replace(LAPTOP, free_bytes={"cuda": 140 << 30, "cpu": 8 << 30})
# Weights of 1 GiB, and kernels that are built, whatever this machine has.
KEPT = KeptWeights(WeightParts(0, 0, 1 << 30), "bfloat16")
ROWS = tuple(replace(row, kernel_limits=lambda _: None, kept_weights=lambda *_: KEPT) for row in BACKENDS)
NOT_BUILT = tuple(replace(row, kernel_limits=lambda _: "no compiler") if row.name == "cpu" else row for row in ROWS)
BLOCK_BYTES = 2 * 4 * 2 * 16 * 64 * 2  # keys and values, layers, heads, tokens, head_dim, float16


def settle(
    config: EngineConfig | None = None,
    machine: MachineFacts = LAPTOP,
    spec: ModelSpec = SPEC,
    backends: tuple[Backend, ...] = ROWS,
) -> Resolved:
    stored = StoredWeights(spec, None)
    return resolve(config or EngineConfig(), spec, machine, stored, backends)


def gpu_with(free_bytes: int) -> MachineFacts:
    return replace(SERVER, free_bytes={"cuda": free_bytes, "cpu": 8 << 30})


def test_a_cpu_computes_natively_in_float32_over_a_float16_cache() -> None:
    settled = settle().config
    assert (settled.ops.device, settled.ops.backend, settled.ops.threads) == ("cpu", "cpu", 4)
    assert (settled.model.dtype, settled.cache.kv_dtype) == ("float32", "float16")
    assert settle(spec=replace(SPEC, dtype="float32")).config.cache.kv_dtype == "float32"


def test_without_native_kernels_the_reference_serves_and_says_why() -> None:
    found = settle(backends=NOT_BUILT)
    assert found.config.ops.backend == "reference"
    assert any("no compiler" in reason for reason in found.reasons)
    with pytest.raises(InvalidConfig, match="no compiler"):
        settle(EngineConfig(ops=OpsConfig(backend="cpu")), backends=NOT_BUILT)


def test_the_first_backend_that_can_is_chosen_and_refusals_are_remembered() -> None:
    picky = tuple(replace(row, kernel_limits=lambda _: "it is Monday") if row.name == "triton" else row for row in ROWS)
    found = settle(machine=SERVER, backends=picky)
    assert (found.config.ops.device, found.config.ops.backend) == ("cuda", "reference")
    assert found.reasons[0] == "device cuda, backend reference (it is Monday)"


@pytest.mark.parametrize(
    ("ops", "changes", "reason"),
    [
        (OpsConfig(backend="reference"), {"quantization": "int8"}, "backend reference .* quantization int8"),
        (OpsConfig(backend="triton"), {}, "backend triton .* on a GPU, not on cpu"),
        (OpsConfig(backend="cpu"), {"dtype": "float16"}, "native kernels do not support activations in float16"),
        (
            OpsConfig(),
            {"quantization": "fp8"},
            "no backend .* native kernels do not support .* only none or int8; torch.s ops do not .* only none",
        ),
    ],
)
def test_a_backend_that_cannot_is_not_replaced_silently(ops: OpsConfig, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        settle(EngineConfig(ModelConfig(**changes), ops=ops))


def test_a_backend_that_is_asked_for_runs_where_it_can() -> None:
    found = settle(EngineConfig(ops=OpsConfig(backend="cpu")), SERVER).config
    assert (found.ops.device, found.ops.backend, found.cache.kv_dtype) == ("cpu", "cpu", "float16")
    with pytest.raises(InvalidConfig, match="on a CPU, not on cuda"):
        settle(EngineConfig(ops=OpsConfig(device="cuda", backend="cpu")), SERVER)


def test_a_gpu_is_not_left_for_the_processor_because_its_kernels_can_not() -> None:
    """What was asked for fits the native kernels, but nobody asked for a CPU."""
    asked = EngineConfig(ModelConfig(quantization="int8"), ops=OpsConfig(deterministic=True))
    with pytest.raises(InvalidConfig, match="no backend can compute this on cuda"):
        settle(asked, SERVER, backends=BACKENDS)


def test_a_gpu_computes_in_the_models_own_half_precision() -> None:
    settled = settle(machine=SERVER).config
    assert (settled.ops.device, settled.ops.backend) == ("cuda", "triton")
    assert (settled.model.dtype, settled.cache.kv_dtype) == ("bfloat16", "bfloat16")
    with pytest.raises(InvalidConfig, match="CUDA"):
        settle(EngineConfig(ops=OpsConfig(device="cuda")))


LARGE = replace(SPEC, layers=(replace(LAYER, mlp=MlpSpec(65_536)),) * 8)  # 0.8 G parameters
GEMMA = replace(LARGE, family="gemma2")


@pytest.mark.parametrize(
    ("spec", "stored", "extra", "expected"),
    [
        (SPEC, "quantised", "", "float32"), (SPEC, "float32", "", "float32"),
        (SPEC, "float16", "", "float32"), (SPEC, "bfloat16", "", "bfloat16"),
        (SPEC, "float32", "int8", "bfloat16"), (SPEC, "quantised", "deterministic", "bfloat16"),
        (LARGE, "quantised", "", "bfloat16"), (LARGE, "float32", "", "bfloat16"),
        (LARGE, "float16", "", "float16"), (GEMMA, "float16", "", "bfloat16"),
    ],
)  # fmt: skip
def test_a_gpu_computes_small_models_in_float32_and_none_beyond_its_range(
    spec: ModelSpec, stored: str, extra: str, expected: str
) -> None:
    model = ModelConfig(quantization="int8" if extra == "int8" else "none")
    config = EngineConfig(model, ops=OpsConfig(deterministic=extra == "deterministic"))
    found = settle(config, SERVER, replace(spec, dtype=stored))
    assert (found.config.model.dtype, found.config.cache.kv_dtype) == (expected, expected)
    (told,) = [reason for reason in found.reasons if reason.startswith("computing in")]
    is_lost, is_slower = stored == "float32" != expected, expected == "float32"
    assert ("--dtype float32" in told, "--dtype bfloat16" in told) == (is_lost, is_slower), "what is lost is told"


def test_a_gpu_that_torch_can_t_use_is_told() -> None:
    machine = replace(LAPTOP, unused_gpu="there is a GPU, but torch can't open it")
    assert machine.unused_gpu in settle(machine=machine).reasons
    assert machine.unused_gpu not in settle(EngineConfig(ops=OpsConfig(device="cpu")), machine).reasons
    with pytest.raises(InvalidConfig, match="CUDA") as refused:
        settle(EngineConfig(ops=OpsConfig(device="cuda")), machine)
    assert refused.value.hint == machine.unused_gpu


def test_a_gpu_says_whether_a_request_depends_on_its_batch() -> None:
    assert any("may depend on its batch" in reason for reason in settle(machine=SERVER).reasons)
    steady = settle(EngineConfig(ops=OpsConfig(deterministic=True)), SERVER)
    assert any(reason.startswith("deterministic:") and "cost in speed" in reason for reason in steady.reasons)
    assert not any("batch" in reason for reason in settle().reasons)


def test_a_gpu_runs_more_at_once() -> None:
    def limits(found: Resolved) -> tuple[int | None, int | None]:
        return found.config.scheduler.max_running, found.config.scheduler.token_budget

    assert limits(settle()) == (64, 512)
    assert limits(settle(machine=SERVER)) == (1024, 8192)
    assert limits(settle(machine=gpu_with(24 << 30))) == (256, 2048)
    asked = EngineConfig(scheduler=SchedulerConfig(max_running=3, token_budget=7))
    assert limits(settle(asked, SERVER)) == (3, 7)


def test_a_cache_of_one_byte_a_number_counts_its_scales() -> None:
    def num_blocks(kv_dtype: KVDType) -> int:
        config = EngineConfig(cache=CacheConfig(kv_dtype=kv_dtype), scheduler=SchedulerConfig(4096, 4096))
        return settle(config, gpu_with(8 << 30)).config.cache.num_blocks or 0

    assert num_blocks("int8") == pytest.approx(num_blocks("bfloat16") * 128 / (64 + 4), rel=1e-3)


def test_what_steps_need_is_left_beside_the_pool() -> None:
    config = EngineConfig(scheduler=SchedulerConfig(4096, 8192))
    beside = runner_bytes(SPEC, RunnerLimits(4096, 8192, 32_768)).total + GPU_START_BYTES
    settled = settle(config, gpu_with(20 << 30)).config
    assert settled.cache.num_blocks == int(((19 << 30) - beside) * 0.9) // BLOCK_BYTES


def test_the_pool_takes_its_share_of_memory_and_no_more_than_is_useful() -> None:
    settled = settle(EngineConfig(scheduler=SchedulerConfig(max_running=1000))).config
    assert settled.cache.num_blocks == int((7 << 30) * 0.25) // BLOCK_BYTES
    few = settle(EngineConfig(ModelConfig(max_context=160), scheduler=SchedulerConfig(max_running=3))).config
    assert few.cache.num_blocks == 3 * 10 + 1


def test_the_context_is_cut_to_what_the_pool_holds() -> None:
    found = settle(EngineConfig(cache=CacheConfig(num_blocks=11)))
    assert found.config.model.max_context == 160
    assert any("limited to 160" in reason for reason in found.reasons)
    assert settle().config.model.max_context == 32_768
    windowed = replace(SPEC, layers=(LAYER, replace(LAYER, mixer=replace(LAYER.mixer, window=64))) * 2)
    with pytest.raises(InvalidConfig, match="at least 3"):  # one for each kind of layer, and nobody's
        settle(EngineConfig(cache=CacheConfig(num_blocks=2)), spec=windowed)


def test_small_models_round_their_activations_finely() -> None:
    assert settle().config.ops.activation_bits == "mixed"
    large = replace(SPEC, layers=(replace(LAYER, mlp=MlpSpec(500_000)),) * 4)
    assert settle(spec=large).config.ops.activation_bits == "8"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (EngineConfig(ModelConfig(max_context=0)), "max_context"),
        (EngineConfig(ModelConfig(max_context=200_000)), "max_context"),
        (EngineConfig(cache=CacheConfig(block_size=0)), "block_size"),
        (EngineConfig(cache=CacheConfig(num_blocks=1)), "num_blocks"),
        (EngineConfig(cache=CacheConfig(memory_fraction=1.5)), "memory_fraction"),
        (EngineConfig(scheduler=SchedulerConfig(max_running=0)), "max_running"),
        (EngineConfig(scheduler=SchedulerConfig(token_budget=-1)), "token_budget"),
        (EngineConfig(ops=OpsConfig(threads=0)), "threads"),
    ],
)
def test_nonsense_is_refused_by_name(config: EngineConfig, name: str) -> None:
    with pytest.raises(InvalidConfig, match=name):
        settle(config)


def test_a_machine_without_room_is_told_so() -> None:
    with pytest.raises(InvalidConfig, match="no room for a KV cache"):
        settle(machine=replace(LAPTOP, free_bytes={"cpu": 1 << 30}))


# ── ranks on GPUs ──────────────────────────────────────────────────────────────────────────────────────


def ranks_on(num_gpus: int, **parallel: Any) -> Resolved:
    return settle(EngineConfig(parallel=ParallelConfig(**parallel)), replace(gpu_with(6 << 30), num_gpus=num_gpus))


def test_ranks_have_a_gpu_each_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_UNPROVEN_KERNELS", "gpu_ranks")
    two = ranks_on(2, tp=2)
    assert two.config.parallel.link == "ipc" and any("2 ranks with a GPU each" in reason for reason in two.reasons)
    one, shared = ranks_on(2), ranks_on(1, tp=2, rank_gpus="0,0")
    blocks = [found.config.cache.num_blocks or 0 for found in (one, two, shared)]
    assert blocks[1] > 1.9 * blocks[0], "half of the heads on each, and half of the weights"
    assert 0.3 * blocks[1] < blocks[2] < 0.5 * blocks[1], "both have their weights and their pool on one GPU"


@pytest.mark.parametrize(("tp", "pp"), [(8, 1), (2, 4), (1, 2)])
def test_ranks_that_have_been_run_on_one_gpu_need_no_switch(tp: int, pp: int) -> None:
    parallel = ParallelConfig(tp=tp, pp=pp, rank_gpus=",".join("0" * (tp * pp)))
    machine = replace(gpu_with(100 << 30), num_gpus=1)
    assert settle(EngineConfig(parallel=parallel), machine).config.parallel.link == "ipc"


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        ({"tp": 4}, "need GPUs 0 to 3, but torch sees 2"),
        ({"tp": 2, "rank_gpus": "0,2"}, "need GPUs 0 to 2"),
        ({"tp": 2, "rank_gpus": "1,0"}, "start with 0"),
        ({"tp": 2, "rank_gpus": "0,one"}, "got '0,one'"),
        ({"tp": 2}, "only up to 8 ranks on one GPU have been tested"),
        ({"tp": 9, "rank_gpus": ",".join("0" * 9)}, "only up to 8 ranks on one GPU have been tested"),
        ({"tp": 2, "link": "gloo"}, "through ipc, not through gloo"),
        ({"pp": 2}, "only up to 8 ranks on one GPU have been tested"),
        ({"pp": 2, "stages_at": "localhost:1"}, "must be on one machine"),
        ({"rank_gpus": "0"}, "needs several ranks"),
    ],
)
def test_what_ranks_on_gpus_can_not_do_is_refused(parallel: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        ranks_on(2, **parallel)
