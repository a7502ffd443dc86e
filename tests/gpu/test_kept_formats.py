"""Files' own formats on a real GPU: products with them, and models of them, as of the same weights expanded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.support.gguf_families import FAMILIES, SMALL, VOCABULARY
from tests.support.group_quantized import write_twins
from tests.support.large_model import SPEC, logits, relative_error
from tests.support.triton_inputs import other_raw
from tokenmill import LLM, SamplingParams
from tokenmill.arch.block_formats import OTHER_TYPES
from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.packed_formats import StoredFormat, packed_int_format
from tokenmill.arch.spec import MlpSpec, MoeSpec
from tokenmill.models.linear import Loader
from tokenmill.ops.blocks import FORMATS
from tokenmill.ops.compose import MODES
from tokenmill.ops.interface import LinearWeight, Routing
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.dummy import DummyWeights, dummy_weights, random_blocks
from tokenmill.weights.gguf_write import write_gguf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0"])
def test_products_of_any_number_of_rows(quant: str) -> None:
    from tokenmill.ops.triton.build import build_ops
    from tokenmill.ops.triton.gemm.linear import PackedIntMatrix

    def dense(raw: RawTensor) -> torch.Tensor:
        return dequantize(raw, torch.bfloat16).cuda()

    torch.manual_seed(0)
    num_out, num_in = 1544, 2048
    ops, generator = build_ops(), torch.Generator().manual_seed(0)
    raw = RawTensor("a.weight", (num_out, num_in), random_blocks((num_out, num_in), quant, generator), quant)
    packed, exact = ops.pack_linear([raw], None, dense), dequantize(raw).cuda()
    assert isinstance(packed.packed, PackedIntMatrix)
    for num_rows in (1, 8, 17, 32, 33, 64, 100, 128, 200, 256, 300, 512, 700):
        x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16)
        error = relative_error(ops.linear(x, packed), x.float() @ exact.T)
        assert error < 0.004, (num_rows, error)
    ids = torch.tensor([3, 500, 3], device="cuda")
    assert relative_error(ops.embed(ids, ops.pack_embedding(raw, dense)), exact[ids]) < 0.003


def test_fp8_with_one_scale_a_row() -> None:
    """As a checkpoint has it. Many rows are rounded to fp8 too."""
    from tokenmill.ops.triton.build import build_ops
    from tokenmill.ops.triton.quant.quantized import Fp8Matrix

    torch.manual_seed(0)
    ops, num_out, num_in = build_ops(), 1536, 2048
    raw = other_raw("F8", num_in, num_out)
    scales = (torch.rand(num_out, 1, 1) * 0.01 + 0.001).view(torch.uint8)
    raw.data.view(num_out, num_in // 32, 36)[:, :, :4] = scales
    raw = replace(raw, blocks_per_scale=num_in // 32)
    packed = ops.pack_linear([raw, raw], None, lambda raw: dequantize(raw, torch.bfloat16).cuda())
    assert isinstance(packed.packed, Fp8Matrix)
    exact = dequantize(raw).cuda().repeat(2, 1)
    for num_rows, mode in product((1, 8, 32, 33, 100, 300), MODES):
        x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16)
        error = relative_error(ops.linear(x, packed, mode), x.float() @ exact.T)
        assert error < (0.004 if num_rows <= 32 else 0.04), (num_rows, mode, error)


def test_blocks_are_expanded_there_as_on_a_cpu() -> None:
    """To the bit, in pieces of some rows."""
    shape, generator = (2100, 2304), torch.Generator().manual_seed(0)
    raws = [other_raw(quant, shape[1], shape[0]) for quant in OTHER_TYPES]
    known = FORMATS.keys() - OTHER_TYPES.keys()
    raws += [RawTensor("a.weight", shape, random_blocks(shape, quant, generator), quant) for quant in known]
    for raw, dtype in product(raws, (torch.float32, torch.bfloat16)):
        found = Loader(dummy_weights(SPEC), REFERENCE_OPS, dtype, torch.device("cuda")).dense(raw)
        assert found.is_cuda and torch.equal(found.cpu(), dequantize(raw, dtype)), (raw.quant, dtype)


@pytest.mark.parametrize("quant", ["Q4_K", "Q8_0"])
def test_wide_strips_with_any_number_of_splits(quant: str) -> None:
    """Also with more splits than there are spans, of which some have nothing to do, and blocks of rows."""
    from tokenmill.ops.triton.gemm.product import Product
    from tokenmill.ops.triton.launch.capabilities import capabilities_of
    from tokenmill.ops.triton.quant.quantized import packed_from_blocks

    gpu = capabilities_of(torch.device("cuda"))
    if not gpu.has_gluon:
        pytest.skip("only on Hopper")
    from tokenmill.ops.triton.quant.hopper_gemm_int import hopper_int_linear, pick_hopper_int_config

    torch.manual_seed(0)
    num_out, num_in = 264, 2304
    blocks = random_blocks((num_out, num_in), quant, torch.Generator().manual_seed(0))
    if quant == "Q8_0":  # of which each has a scale of its own, then
        each = blocks.view(-1, GGML_TYPE_BY_NAME[quant].block_bytes)
        each[:, :2] = (torch.rand(len(each), 1) * 0.01 + 0.001).half().view(torch.uint8)
    form = packed_int_format("a.weight", (num_out, num_in), StoredFormat(quant))
    assert form is not None
    matrix = packed_from_blocks(blocks.cuda(), quant, form)
    exact = dequantize(RawTensor("a.weight", (num_out, num_in), blocks, quant)).cuda()
    bias = torch.randn(num_out, device="cuda", dtype=torch.bfloat16) if quant == "Q8_0" else None
    form_of_product = matrix.form(torch.bfloat16)
    cuts = [pick_hopper_int_config(Product(rows, 28672, num_in, form_of_product, gpu)) for rows in (64, 128, 256)]
    for num_rows, usual, splits in product((34, 190), cuts, (1, 2, 5, 9, 16)):
        cut = replace(usual, splits=splits)
        x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16)
        found = hopper_int_linear(x, matrix, bias, cut)
        expected = x.float() @ exact.T + (0.0 if bias is None else bias.float())
        assert relative_error(found, expected) < 0.004, (num_rows, cut)


def experts_raw(quants: tuple[str | None, ...], num_experts: int, hidden: int, inter: int) -> list[RawTensor]:
    """Gates, ups and downs; where there is no format, plain ones"""
    found: list[RawTensor] = []
    for part, quant in zip(("gate", "up", "down"), quants, strict=True):
        shape = (num_experts, hidden, inter) if part == "down" else (num_experts, inter, hidden)
        drawing = torch.Generator().manual_seed(len(found))
        values = random_blocks(shape, quant, drawing) if quant else torch.randn(shape, generator=drawing) * 0.02
        found.append(RawTensor(f"layers.0.experts.{part}.weight", shape, values, quant))
    return found


@pytest.mark.parametrize(
    ("quants", "quantization"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), "none"), (("Q8_0", "Q6_K", "Q4_0"), "none"), ((None, None, None), "int4"),
        (("IQ4_XS", "IQ4_XS", "IQ4_NL"), "none"),
    ],
)  # fmt: skip
def test_experts_of_any_number_of_tokens(quants: tuple[str | None, ...], quantization: str) -> None:
    from tokenmill.ops.triton.build import build_ops
    from tokenmill.ops.triton.moe.gemv import add_norm_experts, kind_of

    torch.manual_seed(0)
    ops, num_experts, hidden, inter, k = build_ops(quantization), 8, 2048, 768, 4
    gate, up, down = experts_raw(quants, num_experts, hidden, inter)
    packed = ops.pack_experts(gate, up, down, lambda raw: dequantize(raw, torch.bfloat16).cuda())
    exact = REFERENCE_OPS.pack_experts(gate, up, down, lambda raw: dequantize(raw).cuda())
    router = (torch.randn(num_experts, hidden, device="cuda") * 0.05).bfloat16()
    weight, spec = (
        LinearWeight(num_experts, hidden, router),
        MoeSpec(num_experts, k, MlpSpec(inter, "silu")),
    )
    norm = torch.rand(hidden, device="cuda") + 0.5
    limit = 0.25 if quantization == "int4" else 0.01  # of the rounding itself
    for tokens in (1, 3, 20, 600):
        x, residual = torch.randn(2, tokens, hidden, device="cuda").bfloat16()
        normed, _ = REFERENCE_OPS.add_rms_norm(x, residual, norm, 1e-6)
        chosen = ops.route(normed.float() @ router.float().T, Routing(k, spec.routing))
        expected = REFERENCE_OPS.experts(normed.float(), *chosen, exact, "silu")
        assert relative_error(ops.experts(normed, *chosen, packed, "silu"), expected) < limit, tokens
        assert (kind_of(packed) != "mixed") == (quants[0] == quants[1])
        if tokens < 5 and quants[0] == quants[1]:
            result = add_norm_experts(x, residual, norm, 1e-6, weight, packed, Routing(k, spec.routing), "silu").result
            assert relative_error(result, expected) < limit, tokens


def test_a_mixture_s_file_answers_as_its_reference(tmp_path: Path) -> None:
    """A GGUF file whose experts stay quantised; its prompt's scores, and tokens that are decoded."""
    pytest.importorskip("gguf")
    wide = {"hidden_size": 256, "moe_intermediate_size": 128, "model_type": "qwen3_moe"}
    spec = spec_from_hf({**SMALL, **FAMILIES["qwen3_moe"], **wide})
    vocabulary = {**VOCABULARY, "tokenizer.ggml.scores": [0.0, 0.0, 0.0]}
    write_gguf(tmp_path / "a.gguf", spec, dummy_weights(spec, quant="Q4_0"), vocabulary)
    params = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=1, ignore_eos=True)
    prompt = torch.randint(0, 90, (40,), generator=torch.Generator().manual_seed(0)).tolist()

    def scores(**how: str) -> torch.Tensor:
        llm = LLM(str(tmp_path / "a.gguf"), max_context=64, max_running=2, token_budget=64, num_blocks=20, **how)
        (found,) = llm.generate([prompt], params, progress=False)
        assert found.error is None and found.prompt_logprobs is not None and len(found.outputs[0].token_ids) == 6
        return torch.tensor([info.logprob for info in found.prompt_logprobs if info is not None])

    expected = scores(device="cpu", backend="reference", dtype="float32")
    assert relative_error(scores(device="cuda", dtype="bfloat16"), expected) < 1e-2


@dataclass(frozen=True)
class Mixed:
    """As Q4_K_M files are: some matrices have more bits than those that they are stacked with."""

    most: DummyWeights
    some: DummyWeights

    def names(self) -> list[str]:
        return self.most.names()

    def check(self) -> None: ...

    def get(self, name: str) -> RawTensor:
        return (self.some if ".v." in name or ".0.down." in name or "head" in name else self.most).get(name)


def test_logits_are_as_close_to_float32_as_of_expanded_weights() -> None:
    source = Mixed(dummy_weights(SPEC, quant="Q4_K"), dummy_weights(SPEC, quant="Q6_K"))
    exact = logits("reference", torch.float32, source=source)
    plain = relative_error(logits("reference", torch.bfloat16, source=source), exact)
    ours = relative_error(logits("triton", torch.bfloat16, source=source), exact)
    print(f"error of logits: expanded {plain:.4f}, as they are {ours:.4f}")
    assert ours < 1.2 * plain


def test_a_grouped_checkpoint_scores_like_its_plain_twin(tmp_path: Path) -> None:
    """In words on the GPU, and in float32, for which it is expanded."""
    twin, packed = write_twins(tmp_path, "awq", hidden=256, group=128, symmetric=False)
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    prompt = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(0)).tolist()

    def scores(folder: Path, device: str, dtype: str) -> torch.Tensor:
        backend = "reference" if device == "cpu" else "triton"
        llm = LLM(
            str(folder), device=device, backend=backend, dtype=dtype, max_context=64, max_running=2, token_budget=64,
            num_blocks=20,
        )  # fmt: skip
        (found,) = llm.generate([prompt], params, progress=False)
        assert found.error is None and found.prompt_logprobs is not None
        return torch.tensor([info.logprob for info in found.prompt_logprobs if info is not None])

    expected = scores(twin, "cpu", "float32")
    assert relative_error(scores(packed, "cuda", "float32"), expected) < 1e-3
    assert relative_error(scores(packed, "cuda", "float16"), expected) < 1e-2
