"""Codes of a table (nf4, fp4, IQ4) and integers in act order multiplied in their 4 bits, on a real GPU"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.group_quantized import write_twins
from tests.support.large_model import relative_error
from tests.support.quantised_models import CONFIGS, WRITERS
from tests.support.table_matrices import act_order, table_matrix
from tokenmill import LLM, SamplingParams
from tokenmill.arch.unproven import VARIABLE
from tokenmill.ops.compose import MODES
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.dequantize import dequantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(autouse=True)
def unproven_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


KINDS = [("NF4", 2), ("FP4", 2), ("NF4", 1), ("FP4", 4), ("IQ4_NL", 1), ("IQ4_XS", 1)]


def dense(raw: RawTensor) -> torch.Tensor:
    return dequantize(raw, torch.bfloat16).cuda()


@pytest.mark.parametrize(("quant", "blocks_per_scale"), KINDS)
def test_products_of_any_number_of_rows(quant: str, blocks_per_scale: int) -> None:
    """Two matrices stacked, whose rows are no whole tiles; and expanded, they are the maker's bit for bit."""
    from tokenmill.ops.triton.build import build_ops
    from tokenmill.ops.triton.launch.capabilities import keeps_fp4_on
    from tokenmill.ops.triton.quant.packed_table import TableMatrix, dequantize_table

    if not keeps_fp4_on(torch.device("cuda"), torch.bfloat16):
        pytest.skip("this GPU does not keep them")
    torch.manual_seed(0)
    ops, num_in = build_ops(), 2304 if blocks_per_scale < 4 else 2176
    num_in = 2304 if quant == "IQ4_XS" else num_in
    raws = [table_matrix(quant, (num_out, num_in), num_out, blocks_per_scale) for num_out in (1536, 576)]
    bias = torch.randn(2112, device="cuda").bfloat16()
    packed = ops.pack_linear(raws, bias, dense)
    assert isinstance(packed.packed, TableMatrix)
    exact = torch.cat([dequantize(raw) for raw in raws])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize_table(packed.packed, slice(None), dtype).cpu(), exact.to(dtype))
    exact = exact.cuda()
    for num_rows, mode in product((1, 2, 8, 9, 17, 32, 33, 64, 100, 128, 300, 512, 700, 2000), MODES):
        x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16)
        error = relative_error(ops.linear(x, packed, mode), x.float() @ exact.T + bias.float())
        assert error < 0.004, (num_rows, mode, error)


@pytest.mark.parametrize(
    ("bits", "is_symmetric", "group"), [(4, True, 128), (4, False, 128), (4, True, 32), (8, True, 128)]
)
def test_act_order_of_any_number_of_rows(bits: int, is_symmetric: bool, group: int) -> None:
    from tokenmill.ops.triton.build import build_ops
    from tokenmill.ops.triton.quant.quantized import OrderedMatrix

    torch.manual_seed(0)
    order, ops = torch.randperm(2048), build_ops()
    raws = [act_order(bits, size, order, is_symmetric=is_symmetric, group=group) for size in (1024, 512)]
    packed = ops.pack_linear(raws, None, dense)
    assert isinstance(packed.packed, OrderedMatrix)
    exact = torch.cat([raw.data for raw in raws]).float().cuda()
    for num_rows, mode in product((1, 8, 32, 40, 128, 300, 2000), MODES):
        x = torch.randn(num_rows, 2048, device="cuda", dtype=torch.bfloat16)
        error = relative_error(ops.linear(x, packed, mode), x.float() @ exact.T)
        assert error < 0.004, (num_rows, mode, error)


def test_every_cut_of_hopper_s_kernel() -> None:
    """Also with more splits than there are spans, of which some have nothing to do, and blocks of rows."""
    from tokenmill.ops.triton.build import build_ops
    from tokenmill.ops.triton.launch.capabilities import capabilities_of

    if not capabilities_of(torch.device("cuda")).has_gluon:
        pytest.skip("only on Hopper")
    from tokenmill.ops.triton.quant.hopper_gemm_fp4 import DenseFp4Config, hopper_fp4_linear

    torch.manual_seed(0)
    raw = table_matrix("NF4", (264, 1152), 1, 2)
    matrix, exact = build_ops().pack_linear([raw], None, dense).packed, dequantize(raw).cuda()
    usual = [DenseFp4Config(8, 1), DenseFp4Config(128, 1, ahead=1), DenseFp4Config(256, 1, 128, 8, ring=4)]
    for num_rows, cut, splits in product((7, 190), usual, (1, 2, 5, 16)):
        x = torch.randn(num_rows, 1152, device="cuda", dtype=torch.bfloat16)
        found = hopper_fp4_linear(x, matrix, None, replace(cut, splits=splits))
        assert relative_error(found, x.float() @ exact.T) < 0.004, (num_rows, cut, splits)


@pytest.mark.parametrize("kind", ["nf4", "gptq act order"])
def test_a_checkpoint_scores_like_its_values(kind: str, tmp_path: Path) -> None:
    """A whole model in captured steps and prompts, beside the reference that computes its values in float32"""
    plain, _ = write_twins(tmp_path, "awq", hidden=256, group=128, symmetric=False)
    stored, values = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        stored[name] = values[name] = weight
        if name.endswith("_proj.weight"):
            parts, values[name] = WRITERS[kind](weight.float())
            del stored[name]
            stem = name.removesuffix(".weight")
            stored |= {stem + ending: part.contiguous() for ending, part in parts.items()}
    config = json.loads((plain / "config.json").read_text())
    for folder, tensors, extra in (("values", values, {}), ("stored", stored, {"quantization_config": CONFIGS[kind]})):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps(config | extra))
    params = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    prompt = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(0)).tolist()

    def scores(folder: str, device: str, dtype: str) -> torch.Tensor:
        llm = LLM(
            str(tmp_path / folder), device=device, backend="reference" if device == "cpu" else "triton", dtype=dtype,
            max_context=64, max_running=2, token_budget=64, num_blocks=20,
        )  # fmt: skip
        (found,) = llm.generate([prompt], params, progress=False)
        assert found.error is None and found.prompt_logprobs is not None
        return torch.tensor([info.logprob for info in found.prompt_logprobs if info is not None])

    expected = scores("values", "cpu", "float32")
    error = relative_error(scores("stored", "cuda", "bfloat16"), expected)
    print(f"{kind}: error of logprobs {error:.5f}")
    assert error < 1e-2
    assert relative_error(scores("stored", "cuda", "float32"), expected) < 1e-3
