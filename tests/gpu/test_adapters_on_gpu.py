"""Adapters on a real GPU: trained ones answer as recorded, many in one batch, through captured graphs and chunks."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.large_model import relative_error
from tests.support.peft_cases import CASES, OF_EXPERTS, RECORDED, model_folder
from tests.support.random_adapters import llama_shapes, plain_config, write_adapter
from tests.support.small_floats import raw_matrix
from tests.support.trained_models import GREEDY, golden_cases, num_equal_tokens
from tokenmill import LLM, SamplingParams
from tokenmill.ops.compose import MODES
from tokenmill.ops.interface import LinearWeight, Routing
from tokenmill.ops.low_rank import ExpertsShape, LowRank
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.ops.reference.low_rank import ReferenceLowRankOps
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.dummy import random_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
TRAINED = ("dora_r8_robots", "lora_pattern_reversed", "lora_r8_upper", "rslora_r16_bang")
SIZES = {"q_proj": (64, 64), "v_proj": (32, 64), "down_proj": (64, 172)}
ONCE = "Once upon a time"
MAX_ERROR = 0.12  # of a logprob in bfloat16; an adapter changes it by about 1
NUM_WIDE_LAYERS = 2
WIDE = {
    "q_proj": (1024, 1024), "k_proj": (512, 1024), "v_proj": (512, 1024), "o_proj": (1024, 1024),
    "gate_proj": (2048, 1024), "up_proj": (2048, 1024), "down_proj": (1024, 2048),
}  # fmt: skip
"""Rows and columns of matrices that are large enough for kernels of large models, adapters included"""


WAITS_IN_VAIN = """
import sys

sys.path.insert(0, ".")

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.launch import pdl
from tokenmill.ops.triton.launch.pdl import wait_for_arrivals

pdl.MAX_POLLS = tl.constexpr(1000)


@triton.jit
def wait(counter, out, num):
    tl.store(out, wait_for_arrivals(counter, num))


counter, out = torch.tensor([2, 0], device="cuda", dtype=torch.int32)
wait[(1,)](counter, out, 2)
torch.cuda.synchronize()
print("compiled, and waits for no more than has arrived", flush=True)
wait[(1,)](counter, out, 3)
torch.cuda.synchronize()
"""


def write_wide_model(folder: Path, vocab_size: int = 512) -> Path:
    """Write a random Llama model whose matrices are `WIDE`."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size, "hidden_size": 1024,
        "intermediate_size": 2048, "num_hidden_layers": NUM_WIDE_LAYERS, "num_attention_heads": 16,
        "num_key_value_heads": 8, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.03).bfloat16()

    tensors = {"model.embed_tokens.weight": normal(vocab_size, 1024), "lm_head.weight": normal(vocab_size, 1024)}
    norms = ["model.norm"]
    for layer in (f"model.layers.{number}" for number in range(NUM_WIDE_LAYERS)):
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        for name, shape in WIDE.items():
            part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            tensors[f"{layer}.{part}.{name}.weight"] = normal(*shape)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    ones = {f"{name}.weight": torch.ones(1024).bfloat16() for name in norms}
    save_file(tensors | ones, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("deterministic", [False, True])
def test_trained_adapters_answer_as_recorded(deterministic: bool, stories_dir: Path, shared_dir: Path) -> None:
    root = shared_dir / "goldens" / "tiny" / "adapters"
    llm = LLM(
        stories_dir,
        device="cuda",
        dtype="float32",
        deterministic=deterministic,
        adapters={name: root / name for name in TRAINED},
        token_budget=96,
        max_running=24,
        num_blocks=400,
    )
    asked = [(name, case) for name in TRAINED for case in golden_cases(root / name)[:6]]
    asked += [(None, case) for case in golden_cases(stories_dir.parent)[:6]]
    cases, names = [case for _, case in asked], [name for name, _ in asked]
    answers = llm.generate([case["prompt_ids"] for case in cases], GREEDY, adapter=names, progress=False)
    assert num_equal_tokens(cases, answers, 4e-3) > 1000
    plain = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)  # drawn in graphs
    prompts = [case["prompt_ids"] for case in cases]
    drawn = llm.generate(prompts, plain, adapter=names, progress=False)
    same = sum(
        one.outputs[0].token_ids == other.outputs[0].token_ids[:40] for one, other in zip(drawn, answers, strict=True)
    )
    assert same >= (len(drawn) if deterministic else len(drawn) - 3)  # a close call may fall either way


@pytest.mark.parametrize("sizes", [(4096, 1024, 1024), (14336, 14336)])
def test_adapters_below_the_matrices_of_an_8b_model(sizes: tuple[int, ...]) -> None:
    """One product for a matrix and its adapters, captured or not, by every kernel that few rows have."""
    from tokenmill.ops.triton.build import build_ops
    from tokenmill.ops.triton.launch.pdl import overlaps

    torch.manual_seed(0)
    columns, rows, rank, ops = 4096, sum(sizes), 16, build_ops()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02

    held = ops.low_rank.hold(sizes, columns, 8, rank, normal(1))
    weight = held.adopt(LinearWeight(rows, columns, normal(rows, columns)))
    adapters = [[LowRank(normal(rank, columns), normal(size, rank) * 5) for size in sizes] for _ in range(8)]
    for slot, parts in enumerate(adapters, start=1):
        held.put(slot, parts)
    for num_tokens, mode in product((1, 17, 32, 40, 64), MODES):
        x = normal(num_tokens, columns) * 50
        slots = torch.arange(num_tokens, device="cuda", dtype=torch.int32) % 9
        plan, exact = ops.low_rank.plan(slots), x.float() @ weight.packed.float().T
        for slot, parts in enumerate(adapters, start=1):
            mine = x[slots == slot].float()
            exact[slots == slot] += torch.cat([mine @ one.a.float().T @ one.b.float().T for one in parts], dim=1)
        whole, joined = held.product(x, weight, plan), held.matrix(weight, plan)
        assert joined.rows > rows and (whole is not None) == (overlaps() and 1 < num_tokens <= 32)
        if whole is not None:
            assert relative_error(whole, exact) < 0.005, num_tokens
            repeats = [held.product(x, weight, plan) for _ in range(20)]
            assert all(torch.equal(one, whole) for one in repeats), "it matters which program is first"
        assert relative_error(held.add(x, ops.linear(x, joined, mode), None, plan), exact) < 0.005, (num_tokens, mode)
        found = held.add_gated(x, ops.linear(x, joined, mode), None, plan, "silu")
        assert relative_error(found, REFERENCE_OPS.act_mul(exact, "silu")) < 0.01, (num_tokens, mode)


def test_mixed_batches_answer_as_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several adapters and rows without one, in prompts and in captured steps that get smaller: a product and its
    adapters are one kernel there."""
    from tokenmill.ops.triton.adapters import low_rank
    from tokenmill.ops.triton.adapters.adapted_product import Factors
    from tokenmill.ops.triton.launch.pdl import overlaps

    adapted_product, captured = low_rank.adapted_product, set()

    def noted(x: torch.Tensor, joined: LinearWeight, factors: Factors, *others: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            captured.add((len(x), factors.rows))
        return adapted_product(x, joined, factors, *others)

    monkeypatch.setattr(low_rank, "adapted_product", noted)
    model, ranks, folders = write_wide_model(tmp_path / "model"), {"a": 16, "b": 7, "c": 16, "d": 1, "e": 16}, {}
    for name, rank in ranks.items():
        config = plain_config(r=rank, lora_alpha=1, target_modules=list(WIDE))
        folders[name] = write_adapter(tmp_path / name, config, llama_shapes(WIDE, NUM_WIDE_LAYERS, rank))
    rows = range(24)
    names = [[None, *ranks][row % 6] for row in rows]
    prompts = [[5 + row, 7, *range(20, 21 + 2 * row)] for row in rows]
    settings: dict[str, Any] = {
        "adapters": folders, "max_running": 24, "token_budget": 96, "num_blocks": 400, "max_context": 128
    }  # fmt: skip
    llm = LLM(model, device="cuda", dtype="bfloat16", **settings)
    scored, drawn = (
        llm.generate(
            prompts,
            [SamplingParams(temperature=0.0, max_tokens=12 + row, ignore_eos=True, logprobs=scores) for row in rows],
            adapter=names,
            progress=False,
        )
        for scores in (0, None)
    )
    if overlaps():
        assert {size for size, _ in captured} >= {8, 16, 24}
        assert {matrix for _, matrix in captured} == {2048, 1024, 4096}
    exact = LLM(model, device="cpu", dtype="float32", **settings)
    of_prompt = SamplingParams(max_tokens=1, prompt_logprobs=1)
    for answers in (scored, drawn):
        found = [answer.outputs[0] for answer in answers]
        fed = [prompt + one.token_ids for prompt, one in zip(prompts, found, strict=True)]
        expected = exact.generate(fed, of_prompt, adapter=names, progress=False)
        for prompt, one, answer in zip(prompts, found, expected, strict=True):
            wanted = [info for info in (answer.prompt_logprobs or [])[len(prompt) :] if info is not None]
            assert len(wanted) == len(one.token_ids)
            assert all(info.top[0][3] - info.logprob < MAX_ERROR for info in wanted), "another token is better"
            for info, own in zip(wanted, one.logprobs or [], strict=False):
                assert abs(info.logprob - own.logprob) < MAX_ERROR


def test_a_wait_in_vain_fails_the_step(tmp_path: Path) -> None:
    """A wait that gives up yields no wrong numbers. In a process of its own: its device can't be used afterwards."""
    program = tmp_path / "program.py"
    program.write_text(WAITS_IN_VAIN)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode and "CUDA error" in done.stderr and "compiled" in done.stdout, done.stderr[-2000:]


def test_few_slots_and_reloading_give_the_tokens_of_each_alone(stories_dir: Path, tmp_path: Path) -> None:
    folders = {}
    for number in range(8):
        rank = (1, 8, 17, 32)[number % 4]
        config = plain_config(r=rank, lora_alpha=rank, target_modules=list(SIZES))
        folders[f"a{number}"] = write_adapter(tmp_path / f"a{number}", config, llama_shapes(SIZES, 5, rank))
    settings = {"device": "cuda", "dtype": "float32", "deterministic": True, "num_blocks": 400}
    llm = LLM(stories_dir, adapters=folders, adapter_slots=3, max_running=16, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    names: list[str | None] = [f"a{number % 8}" if number % 9 else None for number in range(40)]
    prompts = [f"{ONCE} number {number}" for number in range(40)]
    together = llm.generate(prompts, params, adapter=names, progress=False)
    alone = [llm.generate(p, params, adapter=n, progress=False)[0] for p, n in zip(prompts, names, strict=True)]
    assert [one.outputs[0].token_ids for one in together] == [one.outputs[0].token_ids for one in alone]


@pytest.mark.parametrize("quant", [None, "Q4_K", "MXFP4", "F8"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_experts_of_any_mix_of_adapters(quant: str | None, deterministic: bool) -> None:
    """Few tokens pair by pair, more in tiles of an expert's pairs; on experts of every form"""
    from tokenmill.ops.triton.build import build_ops

    if deterministic and quant is not None:
        pytest.skip("experts are expanded then")
    torch.manual_seed(0)
    count, hidden, inter, active, num_slots = 6, 512, 256, 3, 4

    def dense(raw: RawTensor) -> torch.Tensor:
        return dequantize(raw, torch.bfloat16).cuda()

    def raw(name: str, *shape: int) -> RawTensor:
        name = f"layers.0.experts.{name}.weight"
        if quant in ("MXFP4", "F8"):
            return raw_matrix(quant, shape, seed=len(name), name=name)
        if quant is not None:
            return RawTensor(name, shape, random_blocks(shape, quant, torch.Generator().manual_seed(1)), quant)
        return RawTensor(name, shape, torch.randn(shape) * 0.03)

    gate, up, down = (
        raw("gate", count, inter, hidden),
        raw("up", count, inter, hidden),
        raw("down", count, hidden, inter),
    )
    ops = build_ops(deterministic=deterministic)
    packed = ops.pack_experts(gate, up, down, dense)
    exact = REFERENCE_OPS.pack_experts(gate, up, down, lambda one: dequantize(one).cuda())
    shape, like = ExpertsShape(count, hidden, inter, is_gated=True), torch.empty(0, device="cuda")
    held = ops.low_rank.hold_experts(shape, num_slots, 40, like.bfloat16())
    reference = ReferenceLowRankOps().hold_experts(shape, num_slots, 40, like)
    assert held is not None
    for slot in range(1, num_slots):  # the last one has nothing
        rank, has_gain = (16, 40, 3)[slot - 1], slot == 2

        def low_rank(rows: int, columns: int, rank: int = rank, has_gain: bool = has_gain) -> LowRank:
            a, b = torch.randn(rank, columns) * 0.05, torch.randn(rows, rank) * 0.05
            return LowRank(a.bfloat16().float(), b.bfloat16().float(), torch.randn(rows) * 0.1 if has_gain else None)

        parts = [(low_rank(inter, hidden), low_rank(inter, hidden), low_rank(hidden, inter)) for _ in range(count)]
        for one in (held, reference):
            one.put(slot, parts)
    for num_tokens in (1, 3, 17, 64, 65, 300, 1500):
        x, slots = (
            torch.randn(num_tokens, hidden, device="cuda").bfloat16(),
            torch.randint(0, 5, (num_tokens,)).int().cuda(),
        )
        weights, ids = REFERENCE_OPS.route(torch.randn(num_tokens, count, device="cuda"), Routing(active))
        found = held.run(x, weights, ids, packed, "silu", ops.low_rank.plan(slots))
        wanted = reference.run(x.float(), weights, ids, exact, "silu", ReferenceLowRankOps().plan(slots))
        error = relative_error(found, wanted)
        assert error < (0.06 if quant == "F8" and num_tokens > 32 else 0.012), (num_tokens, error)


@pytest.mark.parametrize("title", OF_EXPERTS)
def test_models_with_adapters_of_experts_answer_as_on_a_cpu(title: str, shared_dir: Path, tmp_path: Path) -> None:
    """Scores of a prompt, and tokens drawn in captured graphs, beside rows without an adapter"""
    case = CASES[title]
    adapter = write_adapter(tmp_path, case["config"], case["shapes"])
    prompt, params = (
        RECORDED["prompt"],
        SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=1, ignore_eos=True),
    )
    results = []
    for settings in ({"device": "cpu"}, {"device": "cuda"}, {"device": "cuda", "deterministic": True}):
        llm = LLM(
            model_folder(shared_dir, title), adapters={"a": adapter}, dtype="float32", num_blocks=60, max_running=4,
            max_context=96, token_budget=64, **settings,
        )  # fmt: skip
        both = llm.generate([prompt, prompt, prompt], params, adapter=["a", None, "a"], progress=False)
        scores = [[one.logprob for one in answer.prompt_logprobs or [] if one is not None] for answer in both]
        results.append((torch.tensor(scores), [answer.outputs[0].token_ids for answer in both]))
    (expected, tokens), *others = results
    assert not torch.equal(expected[0], expected[1]), "the adapter changes nothing"
    for scores, found in others:
        assert (scores - expected).abs().max() < 1e-3
        assert (
            sum(one == other for one, other in zip(found, tokens, strict=True)) >= 2
        )  # a close call may fall either way
