"""bfloat16 on the shapes of an 8B model: logits stay close to those of the float32 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.large_model import logits, relative_error
from tests.support.recurrent_rows import Sequences, projections
from tokenmill.arch.recurrent import OutputNorm, Recurrent
from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs, LinearWeight
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.ops.triton.build import build_ops
from tokenmill.runner.inputs import build_batch
from tokenmill.types import RowPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]


def test_logits_stay_as_close_to_float32_as_plain_bfloat16() -> None:
    exact = logits("reference", torch.float32)
    plain = relative_error(logits("reference", torch.bfloat16), exact)
    ours = relative_error(logits("triton", torch.bfloat16), exact)
    print(f"error of logits: plain bfloat16 {plain:.4f}, ours {ours:.4f}")
    assert ours < 1.2 * plain and ours < 0.03


def test_logits_in_one_order_of_adding_stay_as_close() -> None:
    exact = logits("reference", torch.float32)
    plain = relative_error(logits("reference", torch.bfloat16), exact)
    ours = relative_error(logits("triton", torch.bfloat16, deterministic=True), exact)
    print(f"error of logits: plain bfloat16 {plain:.4f}, deterministic {ours:.4f}")
    assert ours < 1.2 * plain and ours < 0.03


@pytest.mark.parametrize(("kv_dtype", "stated"), [(torch.int8, 0.04), (torch.float8_e4m3fn, 0.12)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_rounded_cache_changes_logits_within_the_stated_error(
    kv_dtype: torch.dtype, stated: float, deterministic: bool
) -> None:
    """Random weights, which amplify: two ways of adding in bfloat16 differ by 0.03 here."""
    exact = logits("triton", torch.bfloat16, deterministic=deterministic)
    error = relative_error(logits("triton", torch.bfloat16, kv_dtype, deterministic=deterministic), exact)
    print(f"error of logits, {kv_dtype} cache: {error:.4f}")
    assert 0 < error < stated


def test_whole_prompts_of_one_length_see_what_prompts_of_several_do() -> None:

    device, (fastest, plain) = torch.device("cuda"), (build_ops(), REFERENCE_OPS)
    keys, values = torch.randn(2, 140, 8, 16, 128, device=device, dtype=torch.bfloat16)
    tables = np.random.default_rng(0).permutation(np.arange(138, dtype=np.int32)).reshape(1, 2, 69)
    for lengths in ((1100, 1100), (1100, 1030)):
        rows = [RowPlan(row=row, start=0, token_ids=[0] * length) for row, length in enumerate(lengths)]
        batch = build_batch(rows, [[0], [0]], tables, 16, device)
        queries = torch.randn(sum(lengths), 32, 128, device=device, dtype=torch.bfloat16)
        args = AttentionArgs(128**-0.5)
        ours = fastest.attention(queries, LayerCache(keys, values), fastest.plan_attention(batch, 0, None), args)
        exact = LayerCache(keys.float(), values.float())
        expected = plain.attention(queries.float(), exact, plain.plan_attention(batch, 0, None), args)
        assert relative_error(ours, expected) < 0.01


@pytest.mark.parametrize("rows", [768, 1000])
def test_large_products_do_what_follows_them_too(rows: int) -> None:
    from tokenmill.ops.triton.gemm import linear
    from tokenmill.ops.triton.launch.capabilities import capabilities_of

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, gate_up, down, total = (
        normal(rows, 1096),
        normal(2 * 712, 1096) * 0.02,
        normal(520, 712) * 0.02,
        normal(rows, 520),
    )
    assert capabilities_of(x.device).is_hopper == (torch.cuda.get_device_capability()[0] == 9)
    inner = linear.gated_linear(x, LinearWeight(2 * 712, 1096, gate_up), "silu")
    assert relative_error(inner, REFERENCE_OPS.act_mul(x.float() @ gate_up.float().T, "silu")) < 0.005
    expected = total.float() + inner.float() @ down.float().T
    added = linear.add_linear(inner, LinearWeight(520, 712, down), total)
    assert added is total and relative_error(added, expected) < 0.005


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 33, 100])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336)])
def test_quantised_products_equal_those_of_the_expanded_matrix(rows: int, shape: tuple[int, int]) -> None:
    from tokenmill.ops.triton.gemm.linear import linear
    from tokenmill.ops.triton.quant import quantized

    matrix = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
    x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
    four, eight, blocks = quantized.to_int4(matrix), quantized.to_fp8(matrix), quantized.to_int8(matrix)
    assert relative_error(quantized.expanded(blocks).float(), matrix.float()) < 0.006
    assert relative_error(quantized.expanded(four), matrix.float()) < 0.12
    assert relative_error(quantized.expanded(eight), matrix.float()) < 0.04
    for packed in (four, blocks, eight):
        # Beyond a few rows the activations are rounded to fp8 too.
        rounding = 0.05 if packed is eight and rows > 32 else 0.01
        expected = x.float() @ quantized.expanded(packed).float().T
        assert relative_error(linear(x, LinearWeight(*shape, packed)), expected) < rounding


DELTA = Recurrent("delta", 4, 4, 128, 128, 4, OutputNorm(4, is_shared=True, gates_first=False))
CHANNELS = Recurrent(
    "delta", 4, 4, 128, 128, 4, OutputNorm(4, True, gates_first=False, gate="sigmoid"), has_channel_decays=True
)


@pytest.mark.parametrize("spec", [DELTA, CHANNELS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_recurrent_layers_compute_what_the_reference_does(
    spec: Recurrent, dtype: torch.dtype, tolerance: float
) -> None:
    """Two prompts in odd cuts, which meet ends of chunks, and a token of each behind them"""
    torch.manual_seed(0)
    device, found = torch.device("cuda"), []
    prompts = [projections(spec, count, dtype).to(device) for count in (138, 70)]
    runs = [Sequences.of(ops, spec, dtype, device=device) for ops in (build_ops(), REFERENCE_OPS)]
    for run in runs:
        parts = [run.feed({0: prompts[0][:100], 1: prompts[1][:41]}), run.feed({0: prompts[0][100:137]})]
        parts += [run.feed({1: prompts[1][41:69]}), run.feed({0: prompts[0][137:], 1: prompts[1][69:]})]
        found.append(torch.cat(parts))
    ours, theirs = (one.double() for one in found)
    assert float((ours - theirs).norm() / theirs.norm()) < tolerance
