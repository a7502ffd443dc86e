"""Every kernel against the reference ops, in Triton's interpreter on a CPU. Run as a program: the interpreter is chosen
when Triton is first imported, and must not reach other tests.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from dataclasses import replace
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"

from unittest.mock import patch

import torch

from tokenmill.arch.gguf_types import GGML_TYPE_BY_NAME
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.packed_formats import Stored, packed_int_format
from tokenmill.arch.spec import MlpSpec, MoeSpec, TensorSpec
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.loading import Loader
from tokenmill.ops.batch import ForwardBatch, GroupTables, LayerCache
from tokenmill.ops.cpu.packing import quantized_q8
from tokenmill.ops.interface import AttentionArgs, ExpertsWeight, LinearWeight
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference import REFERENCE_OPS as PLAIN
from tokenmill.ops.reference.kv_rounding import rounded
from tokenmill.ops.triton.attention.dense_prefill import dense_prefill_attention
from tokenmill.ops.triton.batch.decode_inputs import NO_ROW, RING_SIZE, change_tables, gather_inputs, publish_tokens
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.gemm import epilogues, gemv, splitk
from tokenmill.ops.triton.launch.kernel import compile_beside
from tokenmill.ops.triton.moe import gemv_int as moe_gemv_int
from tokenmill.ops.triton.moe import grouped_gemm as moe_grouped_gemm
from tokenmill.ops.triton.quant import packed_int, quantized
from tokenmill.ops.triton.sampling.argmax import argmax
from tokenmill.runner import memory
from tokenmill.runner.decode_graphs import DecodeGraphs
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.runner.pinned_inputs import PinnedStepInputs, RowTables
from tokenmill.runner.warmup import WarmUp
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.dummy import dummy_weights, random_blocks

OPS = build_ops()
CACHE_ERROR = {torch.int8: 0.01, torch.float8_e4m3fn: 0.1}  # of one vector; the interpreter cuts fp8 off
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 90, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False,
    "hidden_act": "silu", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
}  # fmt: skip


def same(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (ours.shape, theirs.shape, ours.dtype)
    difference = float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-12))
    assert difference < tolerance, difference


def check_norms() -> None:
    for rows, size in ((3, 48), (1, 200)):
        x, residual, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
        same(OPS.rms_norm(x, weight, 1e-5), PLAIN.rms_norm(x, weight, 1e-5))
        for ours, theirs in zip(
            OPS.add_rms_norm(x, residual, weight, 1e-5), PLAIN.add_rms_norm(x, residual, weight, 1e-5), strict=True
        ):
            same(ours, theirs)


def check_activations() -> None:
    x = torch.randn(3, 2 * 1100)
    for kind in ("silu", "gelu", "gelu_tanh"):
        same(OPS.act_mul(x, kind), PLAIN.act_mul(x, kind))


def check_gates_of_many_rows() -> None:
    """Whole tiles of rows, lines and columns, and parts of them."""
    for rows, inter, hidden, kind in ((150, 136, 80, "silu"), (128, 128, 64, "gelu_tanh")):
        x, matrix = torch.randn(rows, hidden), torch.randn(2 * inter, hidden)
        same(epilogues.gated_product(x, matrix, kind), PLAIN.act_mul(x @ matrix.T, kind))
    weight = LinearWeight(2 * inter, hidden, matrix)
    assert OPS.gated_linear is not None and OPS.add_linear is not None
    same(OPS.gated_linear(x, weight, "silu"), PLAIN.act_mul(x @ matrix.T, "silu"))
    assert OPS.add_linear(x, weight, torch.zeros(rows, 2 * inter)) is None, "these are few rows"
    x, total = torch.randn(1024, hidden).bfloat16(), torch.randn(1024, 2 * inter).bfloat16()
    expected = total.float() + x.float() @ matrix.bfloat16().float().T
    added = OPS.add_linear(x, LinearWeight(2 * inter, hidden, matrix.bfloat16()), total)
    assert added is total
    same(added, expected.bfloat16(), tolerance=1e-3)


def check_place(heads: int, kv_heads: int, dim: int, rotary: int, has_norm: bool) -> None:
    tokens, block = 3, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    angles = (torch.randn(tokens, rotary // 2), torch.randn(tokens, rotary // 2)) if rotary else None
    norms = (torch.randn(dim), torch.randn(dim)) if has_norm else None
    slots = torch.tensor([9, 4, 11])
    caches = [LayerCache(torch.zeros(3, kv_heads, block, dim), torch.zeros(3, kv_heads, block, dim)) for _ in range(2)]
    assert OPS.norm_rope_write_kv is not None
    queries = OPS.norm_rope_write_kv(qkv, caches[0], slots, norms, 1e-6, angles)
    q, k, v = (part.view(tokens, -1, dim) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
    if norms:
        q, k = PLAIN.rms_norm(q, norms[0], 1e-6), PLAIN.rms_norm(k, norms[1], 1e-6)
    if angles:
        q, k = PLAIN.rotate(q, *angles), PLAIN.rotate(k, *angles)
    PLAIN.write_kv(caches[1], k, v, slots)
    same(queries, q)
    same(caches[0].keys, caches[1].keys)
    same(caches[0].values, caches[1].values)


def paged_batch(lengths: list[tuple[int, int]], block: int) -> ForwardBatch:
    """(queries, context) of each row, on scattered blocks"""
    width = max(-(-context // block) for _, context in lengths)
    ids = list(range(1, 1 + width * len(lengths)))
    random.Random(0).shuffle(ids)
    tables = torch.tensor(ids, dtype=torch.int32).view(len(lengths), width)
    counts = torch.tensor([queries for queries, _ in lengths])
    none = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        token_ids=none,
        positions=none,
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int(),
        context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32),
        groups=(GroupTables(tables, none),),
        logit_rows=none,
        block_size=block,
        max_query_len=int(counts.max()),
        max_context_len=max(context for _, context in lengths),
        num_single=next((i for i, (queries, _) in enumerate(lengths) if queries > 1), len(lengths)),
    )


def cache_of(num_blocks: int, kv_heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    vectors = torch.randn(2, num_blocks, kv_heads, 16, dim)
    if dtype == torch.float32:
        return LayerCache(*vectors)
    numbers, scales = rounded(vectors, dtype)
    return LayerCache(*numbers, *scales)


def check_attention(
    heads: int, kv_heads: int, dim: int, args: AttentionArgs, dtype: torch.dtype = torch.float32
) -> None:
    for lengths in ([(1, 90), (1, 3), (1, 200)], [(1, 70), (37, 37), (5, 50)]):
        batch = paged_batch(lengths, 16)
        cache = cache_of(1 + batch.groups[0].block_tables.numel(), kv_heads, dim, dtype)
        queries = torch.randn(sum(count for count, _ in lengths), heads, dim)
        found = [ops.attention(queries, cache, ops.plan_attention(batch, 0, args.window), args) for ops in (OPS, PLAIN)]
        same(*found, tolerance=1e-4)


def check_prompts(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Whole prompts of one length, gathered and attended densely."""
    batch = paged_batch([(21, 21), (21, 21)], 16)
    tables = batch.groups[0].block_tables
    cache, args = cache_of(1 + tables.numel(), kv_heads, dim, dtype), AttentionArgs(0.3)
    queries = torch.randn(42, heads, dim)
    found = dense_prefill_attention(queries.view(2, 21, heads, dim), cache, tables, args).flatten(0, 1).flatten(1)
    same(found, PLAIN.attention(queries, cache, PLAIN.plan_attention(batch, 0, None), args), tolerance=1e-4)


def check_fp8_by_bits() -> None:
    """As on GPUs without such numbers: every one there is comes back as itself, what lies between as its nearest."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (torch.rand(63 * 30) - 0.5) * 2.0 ** torch.randint(-9, 10, (63 * 30,))
    values = torch.cat((every[every.isfinite()][:252], between)).view(-1, 63)
    vectors = torch.nn.functional.pad(values, (1, 0), value=448.0)  # so that the scale is 1
    numbers = torch.zeros(2, len(values), 1, 1, 64).to(torch.float8_e4m3fn)
    cache = LayerCache(*numbers, *torch.zeros(2, len(values), 1, 1))
    assert OPS.norm_rope_write_kv is not None
    with patch("tokenmill.ops.triton.attention.kv_dtypes.has_fp8", lambda device: False):
        OPS.norm_rope_write_kv(vectors.repeat(1, 3), cache, torch.arange(len(values)), None, 1e-6, None)
        check_rounded_caches(torch.float8_e4m3fn, AttentionArgs(0.3))
    assert torch.equal(cache.keys.float().view(-1, 64), vectors.to(torch.float8_e4m3fn).float())


def check_rounded_caches(dtype: torch.dtype, args: AttentionArgs) -> None:
    """Decoding rows, chunks, whole prompts, placing and attending at once"""
    check_attention(2, 1, 16, args, dtype)
    check_fresh_attention(2, 1, 16, 8, args, dtype)
    check_prompts(4, 2, 16, dtype)


def check_fresh_attention(
    heads: int, kv_heads: int, dim: int, rotary: int, args: AttentionArgs, dtype: torch.dtype = torch.float32
) -> None:
    """Placing and attending at once: as one after the other, for rows of which one only fills up."""
    contexts, block = [90, 0, 1, 65, 200], 16
    batch = paged_batch([(1, context) for context in contexts], block)
    tables = batch.groups[0].block_tables
    first = cache_of(1 + tables.numel(), kv_heads, dim, dtype)
    caches = [first, LayerCache(*(part.clone() for part in vars(first).values() if part is not None))]
    newest = (batch.context_lens.long() - 1).clamp(min=0)
    slots = tables.long().gather(1, (newest // block).unsqueeze(1)).squeeze(1) * block + newest % block
    slots[1] = 0  # the null block
    qkv = torch.randn(len(contexts), (heads + 2 * kv_heads) * dim)
    angles = (torch.randn(5, rotary // 2), torch.randn(5, rotary // 2)) if rotary else None
    norms = (torch.randn(dim), torch.randn(dim)) if rotary else None
    assert OPS.fused_decode_attention is not None and OPS.norm_rope_write_kv is not None
    plan = replace(OPS.plan_attention(batch, 0, args.window), max_context=1200)  # so that it is split often
    found = OPS.fused_decode_attention(qkv, caches[0], norms, 1e-6, angles, plan, args)
    queries = OPS.norm_rope_write_kv(qkv, caches[1], slots, norms, 1e-6, angles)
    filled = replace(batch, context_lens=batch.context_lens.clamp(min=1))
    expected = PLAIN.attention(queries, caches[1], PLAIN.plan_attention(filled, 0, args.window), args)
    assert found is not None and not found[1].any()
    is_row = batch.context_lens > 0
    # The newest key is not rounded before it is attended to, if it is only rounded to be kept.
    same(found[is_row], expected[is_row], tolerance=CACHE_ERROR.get(dtype, 1e-4))
    for ours, theirs in zip(vars(caches[0]).values(), vars(caches[1]).values(), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            same(ours[1:].float(), theirs[1:].float())


def check_products() -> None:
    for num_out, num_in in ((48, 256), (72, 384)):
        matrix, bias = torch.randn(num_out, num_in), torch.randn(num_out)
        four, eight, blocks = quantized.to_int4(matrix), quantized.to_fp8(matrix), quantized.to_int8(matrix)
        same(quantized.expanded(four), matrix, tolerance=0.12)
        same(quantized.expanded(eight), matrix, tolerance=0.04)
        same(
            packed_int.dequantize_packed(four.words, four.scales, four.span, 4, torch.float32), quantized.expanded(four)
        )
        as_blocks = dequantize(RawTensor("", matrix.shape, quantized_q8(matrix), "Q8_0"))
        same(packed_int.dequantize_packed(blocks.words, blocks.scales, blocks.span, 8, torch.float32), as_blocks)
        same(as_blocks, matrix, tolerance=0.006)
        for rows in (1, 3, 16):
            x = torch.randn(rows, num_in)
            if rows == 1:
                same(gemv.gemv_linear(x, matrix, bias, gemv.GemvConfig(16, 128, 4, near=8)), x @ matrix.T + bias)
            for splits in (1, 3):
                same(
                    splitk.splitk_linear(x, matrix, bias, splitk.SplitKConfig(64, 128, splits, 2)), x @ matrix.T + bias
                )
            same(quantized.packed_int_linear(x, four, bias), x @ quantized.expanded(four).T + bias, tolerance=1e-4)
            same(quantized.packed_int_linear(x, blocks, bias), x @ as_blocks.T + bias, tolerance=1e-4)
            same(quantized.fp8_linear(x, eight, None), x @ quantized.expanded(eight).T, tolerance=0.01)


def random_raw(quant: str, num_in: int, same_scales: int, num_out: int = 24) -> RawTensor:
    """Blocks of which each, or so many together, have scales of their own"""
    blocks = random_blocks((num_out, num_in), quant, torch.Generator().manual_seed(1))
    if quant in ("Q4_0", "Q4_1"):
        each = blocks.view(-1, same_scales, GGML_TYPE_BY_NAME[quant].block_bytes)
        drawn = (torch.rand(len(each), 1, 1) * 0.01 + 0.001) * torch.tensor([1.0, -6.5])
        num_bytes = 2 if quant == "Q4_0" else 4
        each[:, :, :num_bytes] = drawn.half().view(torch.uint8)[:, :, :num_bytes]
    return RawTensor("a.weight", (num_out, num_in), blocks, quant, same_scales)


def check_kept_blocks(quants: tuple[str, ...], num_in: int, bits: tuple[int, ...], same_scales: int = 1) -> None:
    """A file's blocks are multiplied as they are, by as many rows as may come, and looked up; formats may be mixed."""
    raws = [random_raw(quant, num_in, same_scales) for quant in quants]
    dense, bias = partial(dequantize, dtype=torch.float16), torch.randn(24 * len(raws))
    packed = OPS.pack_linear(raws, bias, dense)
    pieces = [piece.packed for piece in packed.packed] if isinstance(packed.packed, tuple) else [packed.packed]
    assert tuple(piece.bits for piece in pieces) == bits
    forms = [packed_int_format(raw.name, raw.shape, Stored(str(raw.quant), same_scales)) for raw in raws]
    planned = sum(form.num_bytes(24 * num_in) for form in forms if form is not None)
    twice = sum(piece.row_scales.nbytes for piece in pieces if piece.row_scales is not None)
    assert planned == sum(piece.words.nbytes + piece.scales.nbytes for piece in pieces) + twice
    matrix = torch.cat([dequantize(raw) for raw in raws])
    for rows in (0, 1, 9, 40, 130):
        x = torch.randn(rows, num_in)
        same(OPS.linear(x, packed), x @ matrix.T + bias, tolerance=1e-3)
    ids = torch.tensor([7, 0, 23, 7])
    same(OPS.embed(ids, OPS.pack_embedding(raws[0], dense)).float(), dequantize(raws[0])[ids], tolerance=1e-3)
    assert torch.equal(OPS.pack_linear(raws, None, dequantize).packed, matrix), (
        "float32 is for those who want every bit"
    )


def before_a_wall(tensor: torch.Tensor) -> torch.Tensor:
    """A copy behind whose last byte nothing can be read: whoever does ends the process."""
    size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    region = mmap.mmap(-1, size + mmap.PAGESIZE)
    wall = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(region)) + size)
    assert ctypes.CDLL(None).mprotect(wall, mmap.PAGESIZE, 0) == 0
    copy = torch.frombuffer(region, dtype=tensor.dtype, count=tensor.numel(), offset=size - tensor.nbytes)
    return copy.view(tensor.shape).copy_(tensor)


def check_shares_without_columns() -> None:
    """More splits than spans: some programs have nothing to multiply, and read no scales behind the last ones."""
    for quant, num_in, row_counts in (("Q4_1", 576, (2,)), ("Q4_1", 1536, (1, 2))):
        raw = random_raw(quant, num_in, 1)
        packed = OPS.pack_linear([raw], None, partial(dequantize, dtype=torch.float16))
        packed = replace(packed, packed=replace(packed.packed, scales=before_a_wall(packed.packed.scales)))
        for num_rows in row_counts:
            x = torch.randn(num_rows, num_in, dtype=torch.float16)
            same(OPS.linear(x, packed).float(), x.float() @ dequantize(raw).T, 2e-3)


def check_best() -> None:
    logits = torch.randn(5, 9000)
    logits[1, 7000] = logits[1, 20] = 9.0
    logits[2, 8999] = 9.0
    logits[3, 4100], logits[4, 3] = float("nan"), float("inf")
    tokens, values = argmax(logits)
    assert tokens.tolist() == [int(logits[0].argmax()), 20, 8999, -1, -1]
    assert values[:3].equal(logits.amax(1)[:3]) and values[3:].isnan().all()
    assert argmax(logits.bfloat16())[0].tolist()[1:] == [20, 8999, -1, -1]


def check_experts() -> None:
    num_experts, hidden, inter, k = 5, 32, 24, 2
    packed = ExpertsWeight(
        num_experts, (torch.randn(num_experts, 2 * inter, hidden), torch.randn(num_experts, hidden, inter))
    )
    for tokens in (2, 19):
        x, logits = torch.randn(tokens, hidden), torch.randn(tokens, num_experts)
        for renormalize in (True, False):
            ours, theirs = OPS.route(logits, k, renormalize), PLAIN.route(logits, k, renormalize)
            same(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])
        same(OPS.experts(x, *ours, packed, "silu"), PLAIN.experts(x, *ours, packed, "silu"))


def check_few_tokens_experts(num_tokens: int, num_experts: int, *, renormalize: bool) -> None:
    """Norm, router and experts in one op. Two experts have equal logits: the first one counts."""
    hidden, inter, k = 48, 40, 3
    x, residual, norm = torch.randn(num_tokens, hidden), torch.randn(num_tokens, hidden), torch.rand(hidden) + 0.5
    router = torch.randn(num_experts, hidden) * 0.3
    router[3] = router[1]
    packed = ExpertsWeight(
        num_experts, (torch.randn(num_experts, 2 * inter, hidden), torch.randn(num_experts, hidden, inter))
    )
    spec = MoeSpec(num_experts, k, MlpSpec(inter, "silu"), renormalize=renormalize)
    assert OPS.add_norm_experts is not None
    done = OPS.add_norm_experts(x, residual, norm, 1e-5, LinearWeight(num_experts, hidden, router), packed, spec)
    assert done is not None
    normed, total = PLAIN.add_rms_norm(x, residual, norm, 1e-5)
    weights, ids = PLAIN.route(normed @ router.T, k, renormalize)
    same(done[0], PLAIN.experts(normed, weights, ids, packed, "silu"), tolerance=1e-4)
    same(done[1], total)


def check_word_experts(
    quants: tuple[str | None, ...],
    hidden: int,
    inter: int,
    *,
    k: int = 2,
    quantization: str = "none",
    is_fused: bool = True,
) -> None:
    """Experts as a file has them quantised, or rounded while they load: alone, as few, and sorted."""
    ops, num_experts = build_ops(quantization), 3
    shapes = {"gate": (num_experts, inter, hidden), "up": (num_experts, inter, hidden)}
    raws = []
    for (part, shape), quant in zip({**shapes, "down": (num_experts, hidden, inter)}.items(), quants, strict=True):
        drawn = random_blocks(shape, quant, torch.Generator().manual_seed(3)) if quant else torch.randn(shape) * 0.05
        raws.append(RawTensor(f"layers.0.experts.{part}.weight", shape, drawn, quant))
    packed = ops.pack_experts(raws[0], raws[1], raws[2], partial(dequantize, dtype=torch.float16))
    exact = PLAIN.pack_experts(raws[0], raws[1], raws[2], dequantize)
    if quantization != "none":
        rounded_ones = tuple(
            quantized.expanded(one).float().view(num_experts, -1, one.num_columns) for one in packed.packed
        )
        for ours, theirs in zip(rounded_ones, exact.packed, strict=True):
            same(ours, theirs, tolerance=0.15)
        exact = ExpertsWeight(num_experts, rounded_ones)
    formats = {raw.name: Stored(raw.quant) for raw in raws if raw.quant is not None}
    kept = [part for one in packed.packed for part in (one if isinstance(one, tuple) else (one,))]
    taken = sum(one.words.nbytes + one.scales.nbytes for one in kept)
    spec = MoeSpec(num_experts, k, MlpSpec(inter, "silu"), renormalize=True)
    planned = [TensorSpec(raw.name, raw.shape, "linear") for raw in raws]
    assert taken == sum(memory._kept_bytes(one, 2, quantization, formats.get(one.name)) for one in planned)
    router, norm = torch.randn(num_experts, hidden) * 0.3, torch.rand(hidden) + 0.5
    for tokens in (1, 6):
        x, residual = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
        normed, _ = PLAIN.add_rms_norm(x, residual, norm, 1e-5)
        chosen = PLAIN.route(normed @ router.T, k, True)
        expected = PLAIN.experts(normed, *chosen, exact, "silu")
        same(ops.experts(normed, *chosen, packed, "silu"), expected, tolerance=2e-3)
        if quantization != "none":
            continue  # the same kernels, and the interpreter takes its time
        assert ops.add_norm_experts is not None
        weight = LinearWeight(num_experts, hidden, router)
        done = ops.add_norm_experts(x, residual, norm, 1e-5, weight, packed, spec)
        assert (done is not None) == (is_fused and tokens == 1)
        if done is not None:
            same(done[0], expected, tolerance=2e-3)


def check_seats() -> None:
    """Every place of the ring has its turn, and the next step finds the tokens of the one before."""
    tables = torch.randint(1, 99, (2, 4, 5), dtype=torch.int32)
    newest = torch.tensor([7, 8, 9, 10])
    letters = PinnedStepInputs(4, torch.device("cpu"))
    with patch("torch.cuda.Event"):
        for number in range(2 * RING_SIZE + 1):
            before = newest.tolist()
            arrived = letters.write(3, [2, 0], [17, 6], [-1, 55], [3, number], [0.1, number / 7])
            found = gather_inputs(3, letters.mailbox, tables, newest, 4)
            assert found.rows.tolist() == [2, 0, NO_ROW] and found.indices.tolist() == [3, number, 0]
            assert found.uniforms.tolist()[:2] == [0.1, number / 7]
            assert found.token_ids.tolist() == [before[2], 55, 0] and found.contexts.tolist() == [18, 7, 0]
            publish_tokens(found, torch.tensor([41 + number, 42, 43]), letters.mailbox, newest)
            assert arrived.tolist() == [41 + number, 42, 43] and newest.tolist() == [42, 8, 41 + number, 10]
            if number % 5:  # or else interrupted right behind the launch
                letters.launched()
    expected = [[int(tables[g, 2, 4]) * 4 + 1, int(tables[g, 0, 1]) * 4 + 2, 0] for g in range(2)]
    assert found.slots.tolist() == expected
    assert torch.equal(found.tables[:, 0], tables[:, 2]) and torch.equal(found.tables[:, 1, :2], tables[:, 0, :2])
    publish_tokens(gather_inputs(3, letters.mailbox, tables, newest, 4), None, letters.mailbox, newest)
    assert int(letters.mailbox.turn) == 2 and newest.tolist() == [42, 8, 41 + number, 10]


def check_lookups() -> None:
    tables, numbers = torch.randn(2, 9, 20), torch.tensor([3, 8, 0, 3, 5])
    assert torch.equal(OPS.gather_rows(tables, numbers), PLAIN.gather_rows(tables, numbers))
    weight = LinearWeight(9, 20, tables[0].bfloat16())
    assert torch.equal(OPS.embed(numbers, weight), PLAIN.embed(numbers, weight))


def check_tables() -> None:
    rows = RowTables(2, 4, 300, torch.device("cpu"))
    expected = torch.zeros(2, 4, 300, dtype=torch.int32)
    with patch("torch.cuda.Event"):
        for number in range(RING_SIZE + 1):
            blocks = list(range(1 + number, 291))  # more than a program takes, and fewer
            rows.change([(1, 2, 7, blocks), (0, 3, 299, [number])])
            expected[1, 2, 7 : 7 + len(blocks)], expected[0, 3, 299] = torch.tensor(blocks), number
            assert torch.equal(rows.tables, expected)
        rows.change([])


def check_compiling() -> None:
    """Nothing runs while kernels are only compiled, and a model gets through all its kinds of steps."""
    tables = torch.zeros(3, dtype=torch.int32)
    compile_beside(lambda: change_tables(torch.tensor([[0, 1]] * 2), tables)).join()
    assert not tables.any()
    spec = spec_from_hf(MOE)
    model = Decoder(spec, Loader(dummy_weights(spec), OPS, torch.float32, torch.device("cpu")), 200)
    storage = KVStorage(model.layout, 1, 16, torch.float32, torch.device("cpu"))
    with patch("torch.cuda.graph_pool_handle"):  # graphs themselves only a GPU can capture
        graphs = DecodeGraphs(model, storage, DeviceSampler(90, 6, storage.device), 6, 13, 200)
    warm_up = WarmUp(model, storage, graphs, 6, 200)
    errands: list[str] = []
    warm_up.compile_first(64, lambda: errands.append("done"))
    assert errands == ["done"]
    warm_up.compile_rest()
    assert not storage.keys.any(), "a kernel ran"


def main() -> None:
    torch.manual_seed(0)
    check_compiling()
    check_norms()
    check_activations()
    check_place(4, 2, 20, 20, has_norm=False)
    check_place(3, 1, 16, 8, has_norm=True)
    check_place(2, 2, 16, 0, has_norm=False)
    check_attention(4, 2, 20, AttentionArgs(0.3))
    check_attention(2, 1, 16, AttentionArgs(0.3, window=23, softcap=2.0, sinks=torch.randn(2)))
    check_fresh_attention(4, 2, 20, 20, AttentionArgs(0.3))
    check_fresh_attention(2, 1, 16, 0, AttentionArgs(0.3, window=23, softcap=2.0, sinks=torch.randn(2)))
    for dtype in (torch.int8, torch.float8_e4m3fn):
        check_rounded_caches(dtype, AttentionArgs(0.3, window=23, softcap=2.0, sinks=torch.randn(2)))
    check_fp8_by_bits()
    check_products()
    check_kept_blocks(("Q4_0", "Q4_0"), 256, (4,))
    check_kept_blocks(("Q4_1", "Q4_K"), 512, (4,))
    check_kept_blocks(("Q4_1",), 384, (4,), same_scales=4)
    check_kept_blocks(("Q4_0", "Q4_0"), 256, (4,), same_scales=4)
    check_kept_blocks(("Q4_1",), 192, (8,), same_scales=2)
    check_kept_blocks(("Q4_K", "Q4_K", "Q6_K"), 256, (4, 8))
    check_kept_blocks(("Q5_0", "Q5_1", "Q5_K", "Q8_0"), 256, (8, 8, 8))
    check_shares_without_columns()
    check_experts()
    check_few_tokens_experts(1, 9, renormalize=True)
    check_few_tokens_experts(3, 4, renormalize=False)
    with patch.multiple(moe_gemv_int, PROGRAMS=8, LINES=32):
        check_word_experts(("Q4_K", "Q4_K", "Q8_0"), 256, 64, k=1)
        check_word_experts(("Q5_0", "Q5_0", "Q5_1"), 64, 64)
        check_word_experts(("Q8_0", "Q8_0", "Q4_1"), 64, 128, k=1)
    with patch.multiple(moe_grouped_gemm, EXPANDING_PAIRS=0, EXPANDED_BYTES=2 * 256 * 128 * 4):  # two experts at a time
        check_word_experts((None, None, None), 128, 128, quantization="int4")
    check_word_experts(("Q4_K", "Q6_K", "Q5_0"), 256, 64, is_fused=False)
    check_seats()
    check_tables()
    check_lookups()
    check_best()
    check_gates_of_many_rows()
    print("all kernels agree with the reference")


if __name__ == "__main__":
    main()
