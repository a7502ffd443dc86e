"""Small models of every kind that the native decoder supports, with random weights, beside torch models with the
same weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tokenmill.arch.compressed import Compression
from tokenmill.arch.indexer import BlockIndexer, Indexer
from tokenmill.arch.spec import (
    AttentionGate,
    Gqa,
    LayerSpec,
    Mla,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    QueryGrowth,
    RopeSpec,
    RoutingSpec,
    ShortConv,
    WindowedMqa,
)
from tokenmill.arch.streams import AltUp, HyperConnections
from tokenmill.arch.tensors import tensors_of
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.models.protocol import WeightReader
from tokenmill.models.rope import make_rope_table
from tokenmill.ops.batch import ForwardBatch, GroupTables
from tokenmill.ops.cpu import instruction_sets, is_available
from tokenmill.ops.cpu.decoder import NativeDecoder
from tokenmill.ops.cpu.native_weights import RankShard
from tokenmill.ops.cpu.packing import quantized_q8
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.weights.dequantize import dequantize

CPU = torch.device("cpu")
BLOCK = 16
BLOCKS_PER_ROW = 24
MAX_CONTEXT = 384
SETS = instruction_sets() if is_available()[0] else []
ATTENTION = Gqa(num_heads=6, num_kv_heads=2, head_dim=32, scale=32**-0.5, rope=RopeSpec(10000.0, 32))
LAYER = LayerSpec(ATTENTION, MlpSpec(96))
CONV = LayerSpec(ShortConv(64, 3), MlpSpec(96))
LATENT = LayerSpec(Mla(4, 24, 32, 16, 8, 16, 24**-0.5, RopeSpec(10000.0, 8)), MlpSpec(96))
LLAMA = ModelSpec("llama", 80, 64, (LAYER, LAYER), 1e-5, MAX_CONTEXT, tied_head=True)


def with_attention(**changes: object) -> ModelSpec:
    layer = replace(LAYER, mixer=replace(ATTENTION, **changes))  # type: ignore[arg-type]
    return replace(LLAMA, layers=(layer, LAYER))


def _indexed(top_k: int, dim: int = 16) -> LayerSpec:
    return replace(LATENT, mixer=replace(LATENT.mixer, indexer=Indexer(5, dim, top_k)))


def _windowed(compression: Compression | None, moe: MoeSpec | None = None, head_dim: int = 32) -> LayerSpec:
    mixer = WindowedMqa(4, head_dim, 24, 10, head_dim**-0.5, RopeSpec(10000.0, 8), 2, 16, compression=compression)
    return LayerSpec(mixer, moe or MlpSpec(96, "silu_to_10"), streams=HyperConnections(3, 4))


def _sharing(layer: int) -> LayerSpec:
    return replace(LATENT, mixer=replace(LATENT.mixer, shares_index_of=layer))


ALTUP = replace(LAYER, norms="both", input_width=24, streams=AltUp(3, 8))
LOOKED_UP = MoeSpec(4, 2, MlpSpec(48), RoutingSpec("sqrt_softplus", epsilon=1e-20, table_rows=80), shared=MlpSpec(48))

VARIANTS = {
    "llama": LLAMA,
    "window": with_attention(window=20),
    "softcaps": replace(with_attention(softcap=5.0), logit_softcap=3.0),
    "qk_norm": with_attention(qk_norm="head"),
    "biases": with_attention(qkv_bias=True, out_bias=True),
    "sinks": with_attention(has_sinks=True),
    "slopes": with_attention(slopes=(0.5, 0.3, 0.25, 0.1, 0.06, 0.01), rope=None),
    "odd_heads": with_attention(num_heads=5, num_kv_heads=1, head_dim=8, rope=RopeSpec(10000.0, 4)),
    "no_rope": with_attention(rope=None),
    "many_heads": with_attention(num_heads=30, num_kv_heads=1, head_dim=16, rope=RopeSpec(500.0, 16)),
    "post_norms": replace(LLAMA, layers=(replace(LAYER, norms="both"), LAYER), embedding_scale=8.0),
    "parallel_norm": replace(
        LLAMA, norm=NormSpec("layer", has_bias=True), layers=(
            replace(LAYER, is_parallel=True, has_parallel_norm=True, mlp=MlpSpec(72, "relu", is_gated=False)), LAYER),
    ),
    "norm_without_weight": replace(LLAMA, norm=NormSpec("layer", has_weight=False)),
    "clip": with_attention(qkv_clip=0.5),
    "xielu": replace(LLAMA, layers=(replace(LAYER, mlp=MlpSpec(72, "xielu", is_gated=False)), LAYER)),
    "positions": replace(LLAMA, num_positions=MAX_CONTEXT, has_embed_norm=True, embedding_scale=3.0),
    "gelu": replace(LLAMA, layers=(replace(LAYER, mlp=MlpSpec(96, "gelu_tanh", bias=True)),)),
    "gelu_exact": replace(LLAMA, layers=(replace(LAYER, mlp=MlpSpec(50, "gelu")),)),
    "experts": replace(LLAMA, layers=(replace(LAYER, mlp=MoeSpec(5, 2, MlpSpec(48))), LAYER)),
    "own_head": replace(LLAMA, tied_head=False),
    "norm_of_all_heads": with_attention(qk_norm="all"),
    "norm_after_rope": with_attention(qk_norm="head_after_rope", query_growth=QueryGrowth(0.3, 16)),
    "l2_after_rope": with_attention(qk_norm="l2_after_rope", window=24, is_chunked=True),
    "gate": with_attention(gate=AttentionGate(), qkv_bias=True),
    "gate_per_head": with_attention(gate=AttentionGate("softplus", is_per_head=True)),
    "narrow_values": with_attention(value_dim=20, value_scale=0.7, has_sinks=True, window=24),
    "wide_values": with_attention(value_dim=48, gate=AttentionGate(), qk_norm="head"),
    "value_is_key": with_attention(value_is_key=True, has_value_norm=True, qk_norm="head"),
    "shared_keys": replace(
        LLAMA, layers=(LAYER, replace(LAYER, mixer=replace(ATTENTION, shares_kv_of=0)), LAYER)
    ),
    "blocks": with_attention(qk_norm="head", gate=AttentionGate(), block_indexer=BlockIndexer(2, 40, 16, 3)),
    "blocks_all": replace(LLAMA, layers=(replace(LAYER, mixer=replace(
        ATTENTION, value_dim=20, block_indexer=BlockIndexer(2, 32, 32, 2, num_local=2))),) * 2),
    "norms_after": replace(LLAMA, layers=(replace(LAYER, norms="after"), LAYER)),
    "layer_norm": replace(LLAMA, norm=NormSpec("layer", has_bias=True), layers=(replace(LAYER, norms="both"), LAYER)),
    "parallel": replace(
        LLAMA, norm=NormSpec("layer"), layers=(replace(LAYER, is_parallel=True), LAYER), logit_scale=0.3
    ),
    "multipliers": replace(
        LLAMA, layers=(replace(LAYER, residual_scale=0.4), replace(LAYER, has_scale=True)), tied_head=False,
        has_head_bias=True,
    ),
    "clamped": replace(LLAMA, layers=(replace(LAYER, mlp=MlpSpec(96, "clamped_silu_16")), replace(LAYER, mlp=MoeSpec(
        5, 2, MlpSpec(48, "clamped_silu_7"), shared=MlpSpec(48, "clamped_silu_16"))))),
    "ungated": replace(LLAMA, layers=(replace(LAYER, mlp=MlpSpec(72, "relu2", is_gated=False, bias=True)), LAYER)),
    "layer_inputs": replace(LLAMA, layers=(replace(LAYER, input_width=24), replace(LAYER, input_width=24))),
    "shared_gate": replace(LLAMA, layers=(replace(LAYER, mlp=MoeSpec(
        5, 2, MlpSpec(48), RoutingSpec(renormalize=False), shared=MlpSpec(40), has_shared_gate=True)), LAYER)),
    "sigmoid_groups": replace(LLAMA, layers=(replace(LAYER, mlp=MoeSpec(
        8, 3, MlpSpec(48), RoutingSpec("sigmoid", epsilon=1e-6, has_choice_bias=True, num_groups=4, kept_groups=2,
        scale=1.7), shared=MlpSpec(32))), LAYER)),
    "sqrt_softplus": replace(LLAMA, layers=(replace(LAYER, mlp=MoeSpec(
        6, 2, MlpSpec(48), RoutingSpec("sqrt_softplus", has_router_bias=True, num_groups=3, kept_groups=2,
        group_score="best"))), LAYER)),
    "bias_on_logits": replace(LLAMA, layers=(replace(LAYER, mlp=MoeSpec(
        6, 2, MlpSpec(48), RoutingSpec("sigmoid", has_choice_bias=True, is_bias_on_logits=True))), LAYER)),
    "sparse_mixer": replace(LLAMA, layers=(replace(LAYER, norms_feed_after=True, mlp=MoeSpec(
        6, 2, MlpSpec(48), RoutingSpec(renormalize=False, jitter=0.1))), LAYER)),
    "biased_experts": replace(LLAMA, layers=(replace(LAYER, mlp=MoeSpec(
        5, 2, MlpSpec(48, "swiglu_oai", bias=True), RoutingSpec(has_router_bias=True))), LAYER)),
    "latent_experts": replace(LLAMA, layers=(replace(LAYER, mlp=MoeSpec(
        5, 2, MlpSpec(48, "relu2", is_gated=False), RoutingSpec("sigmoid"), latent_size=32)), LAYER)),
    "weighted_input": replace(LLAMA, layers=(replace(LAYER, mlp=MoeSpec(
        4, 1, MlpSpec(48), RoutingSpec("sigmoid", renormalize=False, weights_input=True))), LAYER)),
    "side_by_side": replace(LLAMA, layers=(replace(LAYER, norms="both", side_experts=MoeSpec(
        5, 2, MlpSpec(48), RoutingSpec(has_input_norm=True, has_expert_scales=True))), LAYER)),
    "large_heads": with_attention(
        num_heads=3, num_kv_heads=1, head_dim=512, rope=RopeSpec(10000.0, 512, num_angles=64)
    ),
    "sparse": replace(LLAMA, layers=(_indexed(12), LAYER, _indexed(12))),
    "latent_gates": replace(LLAMA, layers=(
        replace(LATENT, mixer=replace(LATENT.mixer, gate=AttentionGate(is_per_head=True))),
        replace(_indexed(12), mixer=replace(_indexed(12).mixer, gate=AttentionGate())))),
    "shared_index": replace(LLAMA, layers=(_indexed(9, 20), LATENT, _sharing(0), _indexed(30, 20), _sharing(3))),
    "altup": replace(LLAMA, input_vocab_size=60, layers=(
        replace(ALTUP, mlp=MlpSpec(72, "gelu_tanh", sparsity=0.7)), ALTUP,
        replace(ALTUP, mixer=replace(ATTENTION, shares_kv_of=0)))),
    "compressed": replace(LLAMA, layers=(
        _windowed(None, LOOKED_UP), _windowed(Compression(8)),
        _windowed(Compression(4, overlaps=True, indexer=Indexer(5, 16, 6)), LOOKED_UP))),
    "compressed_odd": replace(LLAMA, hidden_size=40, layers=(
        _windowed(Compression(4, overlaps=True, indexer=Indexer(3, 12, 3)), head_dim=20),
        _windowed(None, head_dim=20))),
    "conv": replace(LLAMA, layers=(CONV, LAYER, CONV, replace(CONV, mixer=ShortConv(64, 4, bias=True)), LAYER)),
    "conv_last": replace(LLAMA, layers=(LAYER, CONV)),
    "conv_odd": replace(LLAMA, hidden_size=40, layers=(replace(CONV, mixer=ShortConv(40, 5), norms="both"), LAYER)),
    "conv_experts": replace(LLAMA, layers=(replace(CONV, mlp=MoeSpec(5, 2, MlpSpec(48))), LAYER)),
}  # fmt: skip


@dataclass(frozen=True)
class RandomWeights:
    tensors: dict[str, RawTensor]

    def get(self, name: str) -> RawTensor:
        return self.tensors[name]


def random_weights(spec: ModelSpec, quantised: bool = False) -> RandomWeights:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in tensors_of(spec).items():
        values = torch.randn(tensor.shape, generator=generator)
        if name.endswith("expert_table"):
            tensors[name] = RawTensor(name, tensor.shape, (100 * values).long() % 4)
            continue
        if tensor.kind == "vector":
            around = -0.1 if name.endswith("act_eps") else 1.0
            tensors[name] = RawTensor(name, tensor.shape, around * (1 + 0.1 * values))
            continue
        values *= 1.5 * tensor.shape[-1] ** -0.5
        if quantised and tensor.shape[-1] % 32 == 0:
            blocks = quantized_q8(values.flatten(0, -2)).view(*tensor.shape[:-1], -1)
            tensors[name] = RawTensor(name, tensor.shape, blocks, "Q8_0")
        else:
            tensors[name] = RawTensor(name, tensor.shape, values)
    return RandomWeights(tensors)


def native_model(
    spec: ModelSpec,
    weights: WeightReader,
    isa: str = "",
    threads: int = 2,
    activation_bits: str = "8",
    max_context: int = MAX_CONTEXT,
    shard: RankShard | None = None,
    window: object = None,
) -> NativeDecoder:
    tables = {rope: make_rope_table(rope, max_context, CPU) for rope in spec.ropes}
    ropes = {rope: (table.cos, table.sin) for rope, table in tables.items()}
    return NativeDecoder(
        spec,
        weights,
        ropes,
        dequantize,
        threads,
        instruction_set=isa,
        activation_bits=activation_bits,
        shard=shard,
        window=window,
    )


def torch_model(spec: ModelSpec, weights: WeightReader) -> Decoder:
    return Decoder(spec, Loader(weights, REFERENCE_OPS, torch.float32, CPU), MAX_CONTEXT)


def layout_of(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> KVLayout:
    return KVLayout.from_spec(spec, CacheDtypes(str(dtype).removeprefix("torch.")))


def storage_for(spec: ModelSpec, rows: int, dtype: torch.dtype = torch.float32) -> KVStorage:
    layout = layout_of(spec, dtype)
    return KVStorage(layout, 1 + len(layout.groups) * rows * BLOCKS_PER_ROW, BLOCK, CPU)


def batch_of(
    spec: ModelSpec, rows: list[tuple[int, list[int], int]], dtype: torch.dtype = torch.float32
) -> ForwardBatch:
    """Build a batch that wants logits of every token. rows: (sequence, new tokens, tokens already in the cache)."""
    layout = layout_of(spec, dtype)
    ids = [token for _, tokens, _ in rows for token in tokens]
    positions = [start + i for _, tokens, start in rows for i in range(len(tokens))]
    counts = [len(tokens) for _, tokens, _ in rows]
    contexts = [start + len(tokens) for _, tokens, start in rows]
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    tables = tuple(_group(rows, group, layout) for group in range(len(layout.groups)))
    return ForwardBatch(
        torch.tensor(ids),
        torch.tensor(positions),
        starts,
        torch.tensor(contexts, dtype=torch.int32),
        tables,
        torch.arange(len(ids)),
        BLOCK,
        max(counts),
        max(contexts),
    )


def _group(rows: list[tuple[int, list[int], int]], group: int, layout: KVLayout) -> GroupTables:
    first = [1 + (row * len(layout.groups) + group) * BLOCKS_PER_ROW for row, _, _ in rows]
    # a row's blocks are in reverse order, so that a block table that is ignored changes the result
    scale = layout.rows_per_block[group]
    tables = [[scale * (base + BLOCKS_PER_ROW - 1 - i) for i in range(BLOCKS_PER_ROW)] for base in first]
    slots = [
        table[(start + i) // BLOCK] * BLOCK + (start + i) % BLOCK
        for table, (_, tokens, start) in zip(tables, rows, strict=True)
        for i in range(len(tokens))
    ]
    return GroupTables(torch.tensor(tables, dtype=torch.int32), torch.tensor(slots))


def tokens_for(spec: ModelSpec, count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, spec.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def all_logits(
    model: NativeDecoder | Decoder,
    spec: ModelSpec,
    tokens: list[int],
    cuts: list[int],
    kv_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the logits of all tokens, fed in chunks of the given sizes."""
    storage, start, parts = storage_for(spec, 1, kv_dtype), 0, []
    for size in cuts:
        batch = batch_of(spec, [(0, tokens[start : start + size], start)], kv_dtype)
        parts.append(model.logits(model.forward(batch, storage)))
        start += size
    return torch.cat(parts)
