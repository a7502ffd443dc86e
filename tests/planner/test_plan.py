from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.arch.cost import WeightParts, decode_step_bytes, decode_step_flops, share_of_experts, weight_parts
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.cli import main
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.engine.backends import BACKENDS, KeptWeights, StoredWeights
from tokenmill.engine.resolve import MachineFacts, resolve
from tokenmill.errors import InvalidConfig
from tokenmill.hardware.peaks import DEVICES
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.planner.calibrate import fit_speeds
from tokenmill.planner.capacity import Slo, largest_load, steady_load
from tokenmill.planner.device import plan_device
from tokenmill.planner.memory import GPU_CONTEXT_BYTES, Limits, Split, plan_memory
from tokenmill.planner.model import PlannedModel
from tokenmill.planner.plan import Question, grid, make_plan
from tokenmill.planner.report import brief_facts, fit_verdict, html_page, verdict
from tokenmill.planner.serving import serving_lines, serving_plan
from tokenmill.report.units import duration

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
MODEL = PlannedModel("llama-8b", spec_from_hf(LLAMA_8B), "bfloat16")
MIXTURE = spec_from_hf({**LLAMA_8B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})
H200 = plan_device("H200")


def test_pool_is_what_the_engine_would_allocate() -> None:
    """The same machine, model and settings through the planner and through the engine's own settling."""
    limits = Limits(context=4096, max_running=64, token_budget=512)
    small = replace(H200, available_bytes=24 << 30)
    plan = plan_memory(MODEL.spec, MODEL.weights("auto"), "bfloat16", small, Split(), limits)
    free = small.available_bytes - GPU_CONTEXT_BYTES
    facts = MachineFacts(cores=8, free_bytes={"cuda": free})
    kept = KeptWeights(WeightParts(0, 0, plan.weights), "bfloat16")
    backends = [replace(row, kernel_limits=lambda _: None, kept_weights=lambda *_: kept) for row in BACKENDS]
    asked = EngineConfig(ModelConfig(max_context=4096), scheduler=SchedulerConfig(max_running=64, token_budget=512))
    stored = StoredWeights(MODEL.spec, None)
    settled = resolve(asked, MODEL.spec, facts, stored, backends).config
    assert settled.cache.num_blocks == plan.num_blocks
    assert plan.kv_pool == plan.num_blocks * KVLayout.from_spec(MODEL.spec, CacheDtypes("bfloat16")).block_bytes(16)


def test_a_context_shorter_than_its_requests_is_told() -> None:
    assert "a request of 2,048 tokens is longer" in make_plan(MODEL, H200, Question(max_context=512)).warnings()[0]


def test_a_small_device_holds_fewer_blocks() -> None:
    small = replace(H200, available_bytes=24 << 30)
    limits = Limits(context=4096, max_running=64)
    plan = plan_memory(MODEL.spec, MODEL.weights("auto"), "bfloat16", small, Split(), limits)
    assert 0 < plan.max_concurrency < 64 and plan.total <= small.available_bytes
    halved = plan_memory(MODEL.spec, MODEL.weights("auto"), "fp8", small, Split(), limits)
    assert halved.num_blocks == pytest.approx(plan.num_blocks * 256 / (128 + 4), rel=1e-3)  # 4: the scale


def test_splits_share_weights_and_heads() -> None:
    parts, limits = MODEL.weights("auto"), Limits(context=4096)
    whole = plan_memory(MODEL.spec, parts, "bfloat16", H200, Split(), limits)
    four = plan_memory(MODEL.spec, parts, "bfloat16", H200, Split(4), limits)
    sixteen = plan_memory(MODEL.spec, parts, "bfloat16", H200, Split(16), limits)
    assert four.weights == pytest.approx(whole.weights / 4, rel=1e-6)
    assert four.kv_per_request == whole.kv_per_request // 4
    assert sixteen.kv_per_request == whole.kv_per_request // 8  # eight KV heads: no device has less than one
    with pytest.raises(InvalidConfig, match="heads"):
        Split(5).check(MODEL.spec)


def test_experts_are_read_as_tokens_choose_them() -> None:
    parts = weight_parts(MIXTURE, "bfloat16")
    assert share_of_experts(MIXTURE, 1) == pytest.approx(0.25)
    assert share_of_experts(MIXTURE, 64) == pytest.approx(1.0, abs=1e-6)
    one, many = (decode_step_bytes(MIXTURE, parts, "bfloat16", batch, 1) for batch in (1, 64))
    assert many - one == pytest.approx(0.75 * parts.experts, rel=0.001)


def test_largest_load_is_the_edge_of_the_slo() -> None:
    roofline = make_plan(MODEL, H200, Question()).roofline
    slo = Slo(ttft_s=0.2, tpot_s=0.02)
    best = largest_load(roofline, slo, 4096, 1024, 1024)
    assert best is not None and slo.holds(best)
    assert not slo.holds(steady_load(roofline, best.concurrency + 1, 1024, 1024))
    assert largest_load(roofline, Slo(ttft_s=1e-4), 4096, 1024, 1024) is None


def test_calibration_predicts_steps_it_has_not_seen() -> None:
    """Steps of a made-up machine: 2 ms fixed, 9 GB/s, 300 GFLOP/s; fitted at 1, 4 and 16, asked at 2, 8 and 32."""
    roofline = make_plan(MODEL, H200, Question()).roofline
    true = replace(roofline.speeds, bandwidth_bytes_s=9e9, decode_flops_s=3e11, step_s=2e-3, overlap=False)
    machine = replace(roofline, speeds=true)
    rows = []
    for batch in (1, 4, 16):
        seconds = machine.decode_s(batch, 128)
        moved = decode_step_bytes(MODEL.spec, roofline.parts, "bfloat16", batch, 128)
        flops = decode_step_flops(MODEL.spec, batch, 128)
        rows.append({"decode_step_ms": seconds * 1e3, "decode_step_bytes": moved, "decode_flops_s": flops / seconds,
                     "prefill_flops_s": 2e11})  # fmt: skip
    fitted = replace(roofline, speeds=fit_speeds(rows))
    for batch in (2, 8, 32):
        assert fitted.decode_s(batch, 128) == pytest.approx(machine.decode_s(batch, 128), rel=0.02)
    assert fitted.speeds.prefill_flops_s == 2e11


def test_stages_of_a_pipeline_make_a_token_for_each_sequence_and_no_more() -> None:
    """Whatever the batch: the fullest share sets the pace, and no sequence gets two tokens of a turn."""
    roofline = make_plan(MODEL, H200, Question(split=Split(1, 4))).roofline
    alone = make_plan(MODEL, H200, Question()).roofline
    for batch in range(1, 40):
        share = -(-batch // 4)
        sent_s = 4 * H200.link.send_s(share * MODEL.spec.hidden_size * 2)
        paced = alone.decode_s(share, 1024) / (roofline.stage_share if batch >= 4 else 1.0)
        assert roofline.decode_s(batch, 1024) == pytest.approx(paced + sent_s)
        assert roofline.decode_tok_s(batch, 1024) * roofline.decode_s(batch, 1024) == pytest.approx(batch)
    tpots = [steady_load(roofline, batch, 1024, 256).tpot_s for batch in range(2, 40)]
    assert tpots == sorted(tpots)


def test_grid() -> None:
    big = PlannedModel("70b", spec_from_hf({**LLAMA_8B, "hidden_size": 8192, "num_hidden_layers": 80,
                       "num_attention_heads": 64, "intermediate_size": 28672}), "bfloat16")  # fmt: skip
    plans = grid(big, plan_device("H100"), Question())
    fits = {(p.weight_dtype, p.question.split.tensor) for p in plans if p.memory.fits}
    assert {("int4", 1), ("bfloat16", 2)} <= fits and ("bfloat16", 1) not in fits
    assert all(p.memory.fits and p.question.split.pipeline == 1 for p in plans)  # one machine holds it
    rows = [(p.weight_dtype, p.kv_dtype, p.question.split) for p in plans]
    assert len(rows) == len(set(rows)) and len({p.weight_dtype for p in plans}) == 4
    quantised = grid(replace(big, stored_dtype="Q4_K"), plan_device("H100"), Question())
    assert {p.weight_dtype for p in quantised} == {"Q4_K"}  # a quantised file is taken as it is
    on_cpu = grid(MODEL, plan_device("Xeon 8380"), Question())
    assert {p.weight_dtype for p in on_cpu} == {"bfloat16", "int8"}  # no CPU kernels turn weights into fp8 or int4


def test_a_cache_of_latents_is_not_planned_in_one_byte() -> None:
    latent = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
              "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 32, "n_routed_experts": 8,
              "num_experts_per_tok": 2, "moe_intermediate_size": 1024}  # fmt: skip
    model = PlannedModel("latents", spec_from_hf({**LLAMA_8B, **latent}), "bfloat16")
    assert {plan.kv_dtype for plan in grid(model, H200, Question())} == {"bfloat16"}
    assert not make_plan(model, H200, Question()).warnings()
    (warning,) = make_plan(model, H200, Question(kv_dtype="int8")).warnings()
    assert "the engine refuses a one-byte KV cache for latent attention" in warning


def test_a_plan_has_a_verdict() -> None:
    assert verdict(make_plan(MODEL, H200, Question())).startswith("Yes: H200 SXM holds ")
    assert "per million output tokens" in verdict(make_plan(MODEL, H200, Question(usd_per_hour=3.0)))
    small = replace(plan_device("L4"), available_bytes=2 << 30)
    assert verdict(make_plan(MODEL, small, Question())).startswith("No: L4 does not hold llama-8b: 18.")
    slow = verdict(make_plan(MODEL, plan_device("L4"), Question(slo=Slo(tpot_s=0.001))))
    assert slow.startswith("No: llama-8b fits L4, but misses the limits; alone")
    plans = grid(MODEL, H200, Question(usd_per_hour=3.0))
    assert fit_verdict(plans).startswith("Cheapest: llama-8b, ")
    assert [name for name, _ in brief_facts(plans[0])][:3] == ["model", "device", "weights"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.00002, "20 µs"), (0.0123, "12.3 ms"), (0.84, "840 ms"), (1.234, "1.23 s"), (31.729, "32 s"), (300, "5 min"),
     (7200, "2.0 h"), (400_000, "5 days"), (None, "–")],
)  # fmt: skip
def test_durations_are_in_human_units(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_page_draws_and_escapes() -> None:
    plan = make_plan(replace(MODEL, name="<b>&"), H200, Question())
    text = html_page([plan, make_plan(MODEL, plan_device("L4"), Question())])
    assert text.count("<figure>") == 4 and text.count("<svg role=") == 8 and "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<b>&" not in text and "NaN" not in text and "inf" not in text.lower().replace("inference", "")


def test_json_has_the_promised_keys_without_torch_in_under_a_second(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    code = (
        "import sys, time; began = time.perf_counter(); from tokenmill.cli import main; "
        f"code = main(['plan', {str(file)!r}, '--device', 'H100', '--json']); "
        "print(code, 'torch' in sys.modules, time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    plan, last = done.stdout.strip().splitlines()
    keys = ("params_total", "params_active", "weight_bytes", "kv_bytes_per_token", "prefill_tflops",
            "decode_tflops_per_token", "ttft_s", "tpot_s", "max_concurrency")  # fmt: skip
    assert all(isinstance(json.loads(plan)[key], int | float) for key in keys)
    code_text, has_torch, seconds = last.split()
    assert (code_text, has_torch) == ("0", "False") and float(seconds) < 1.0


def test_every_device_of_the_table_can_be_planned_with() -> None:
    assert len(DEVICES) >= 40
    for device in DEVICES:
        flat = make_plan(MODEL, plan_device(device.name), Question(batch=4)).flat()
        assert flat["ttft_s"] > 0 and flat["tpot_s"] > 0, device.name


def test_wrong_questions_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    for arguments in (["--device", "H1000"], ["--slo", "speed=3"], ["--mfu", "2"], ["--tp", "5"], ["--batch", "0"],
                      ["--weight-dtype", "q9"], ["--slo", "ttft=soon"], ["--kv-dtype", "q9"], ["--context", "0"],
                      ["--memory-fraction", "nan"], ["--memory-fraction", "2"], ["--mbu", "0"], ["--device", ","],
                      ["--usd-per-hour", "inf"], ["--batch", "1.5"], ["--batch", "9" * 20], ["--fit", "--tp", "2"],
                      ["--fit", "--kv-dtype", "int8"], ["--calibrate", "r.json", "--mbu", "0.5"],
                      ["--calibrate", "r.json", "--compare", "L40S"], ["--html", "/no/where/x.html"]):  # fmt: skip
        device = [] if "--device" in arguments else ["--device", "H100"]
        assert main(["plan", str(file), *device, *arguments]) == 2, arguments
        assert capsys.readouterr().err.count("\n") == 1


def test_a_server_s_plan_counts_weights_as_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.planner.serving.this_machine", lambda **_: H200)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    plain, rounded = (
        serving_plan(EngineConfig(ModelConfig(quantization=how)), tmp_path, "x").memory.weights
        for how in ("none", "int8")
    )
    assert 0.5 * plain <= rounded < 0.55 * plain  # a GPU computes so large a model in 16 bits, whatever is stored
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "hidden_size": 1024, "num_hidden_layers": 2}))
    configs = (
        EngineConfig(),
        EngineConfig(ops=OpsConfig(deterministic=True)),
        EngineConfig(ModelConfig(dtype="bfloat16")),
    )
    small = [serving_plan(config, tmp_path, "x") for config in configs]
    assert [plan.kv_dtype for plan in small] == ["float32", "bfloat16", "bfloat16"]
    assert small[0].memory.weights == 2 * small[1].memory.weights == 2 * small[2].memory.weights
    assert small[0].memory.activations > small[1].memory.activations


def test_a_server_s_plan_warns_when_its_limits_can_t_hold(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(plan_device("Xeon 8380"), available_bytes=1 << 30)
    monkeypatch.setattr("tokenmill.planner.serving.this_machine", lambda **_: small)
    lines = serving_lines(EngineConfig(), smollm2_path, "smollm2")
    assert "weights 0.10 GB" in lines[0] and any("does not fit: one request of 8,192" in line for line in lines)
    some = serving_lines(EngineConfig(ModelConfig(max_context=1024)), smollm2_path, "smollm2")
    assert any("fewer than the 64 that may run" in line for line in some)
    few_blocks = EngineConfig(ModelConfig(max_context=64), CacheConfig(num_blocks=5), SchedulerConfig(max_running=4))
    assert any("memory holds 1 request of 64 tokens" in line for line in serving_lines(few_blocks, smollm2_path, "x"))
    many_blocks = EngineConfig(ModelConfig(max_context=64), CacheConfig(num_blocks=10**6))
    assert any("1,000,000 KV blocks take" in line for line in serving_lines(many_blocks, smollm2_path, "x"))
    large = replace(small, available_bytes=4 << 30)
    monkeypatch.setattr("tokenmill.planner.serving.this_machine", lambda **_: large)
    assert len(serving_lines(EngineConfig(), smollm2_path, "smollm2")) == 2  # nobody chose these limits
    monkeypatch.setattr("tokenmill.planner.serving.this_machine", lambda **_: small)
    roomy = EngineConfig(ModelConfig(max_context=64), scheduler=SchedulerConfig(max_running=4))
    assert not any("warning" in line for line in serving_lines(roomy, smollm2_path, "smollm2"))
