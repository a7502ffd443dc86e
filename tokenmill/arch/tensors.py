"""The tensors a model is made of, in our own names, derived from its spec alone (the names are drawn at `TensorSpec`).

Checkpoint formats are mapped onto these by `rules.py`; loaders and cost functions know only these.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, ModelSpec, MoeSpec, ShortConv, TensorSpec


def tensors_of(spec: ModelSpec) -> dict[str, TensorSpec]:
    return {tensor.name: tensor for tensor in _tensors(spec)}


def _tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    yield TensorSpec("embed.weight", (spec.vocab_size, spec.hidden_size), "embedding")
    for index, layer in enumerate(spec.layers):
        yield from layer_tensors(layer, spec.hidden_size, f"layers.{index}.")
    yield TensorSpec("final_norm.weight", (spec.hidden_size,), "vector")
    if not spec.tied_head:
        yield TensorSpec("head.weight", (spec.vocab_size, spec.hidden_size), "linear")


def layer_tensors(layer: LayerSpec, hidden: int, prefix: str = "") -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "attn_norm.weight", (hidden,), "vector")
    yield from _attention(layer.mixer, hidden, prefix) if isinstance(layer.mixer, Gqa) else _conv(layer.mixer, prefix)
    if layer.post_norms:
        yield TensorSpec(prefix + "attn_post_norm.weight", (hidden,), "vector")
    yield TensorSpec(prefix + "mlp_norm.weight", (hidden,), "vector")
    if isinstance(layer.mlp, MoeSpec):
        yield from _experts(layer.mlp, hidden, prefix)
    else:
        yield from _mlp(layer.mlp, hidden, prefix)
    if layer.post_norms:
        yield TensorSpec(prefix + "mlp_post_norm.weight", (hidden,), "vector")


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[TensorSpec]:
    yield TensorSpec(name + ".weight", (rows, columns), "linear")
    if bias:
        yield TensorSpec(name + ".bias", (rows,), "vector")


def _attention(attention: Gqa, hidden: int, prefix: str) -> Iterator[TensorSpec]:
    yield from _linear(prefix + "q", attention.q_size, hidden, attention.qkv_bias)
    yield from _linear(prefix + "k", attention.kv_size, hidden, attention.qkv_bias)
    yield from _linear(prefix + "v", attention.kv_size, hidden, attention.qkv_bias)
    if attention.qk_norm:
        yield TensorSpec(prefix + "q_norm.weight", (attention.head_dim,), "vector")
        yield TensorSpec(prefix + "k_norm.weight", (attention.head_dim,), "vector")
    if attention.has_sinks:
        yield TensorSpec(prefix + "sinks", (attention.num_heads,), "vector")
    yield from _linear(prefix + "o", hidden, attention.q_size, attention.out_bias)


def _conv(conv: ShortConv, prefix: str) -> Iterator[TensorSpec]:
    yield from _linear(prefix + "conv_in", 3 * conv.width, conv.width, conv.bias)
    yield TensorSpec(prefix + "conv.weight", (conv.width, conv.kernel), "vector")
    if conv.bias:
        yield TensorSpec(prefix + "conv.bias", (conv.width,), "vector")
    yield from _linear(prefix + "conv_out", conv.width, conv.width, conv.bias)


def _mlp(mlp: MlpSpec, hidden: int, prefix: str) -> Iterator[TensorSpec]:
    yield from _linear(prefix + "gate", mlp.intermediate_size, hidden, mlp.bias)
    yield from _linear(prefix + "up", mlp.intermediate_size, hidden, mlp.bias)
    yield from _linear(prefix + "down", hidden, mlp.intermediate_size, mlp.bias)


def _experts(moe: MoeSpec, hidden: int, prefix: str) -> Iterator[TensorSpec]:
    experts, inter = moe.num_experts, moe.expert.intermediate_size
    yield TensorSpec(prefix + "router.weight", (experts, hidden), "linear")
    yield TensorSpec(prefix + "experts.gate.weight", (experts, inter, hidden), "linear")
    yield TensorSpec(prefix + "experts.up.weight", (experts, inter, hidden), "linear")
    yield TensorSpec(prefix + "experts.down.weight", (experts, hidden, inter), "linear")
    if moe.shared is not None:
        yield from _mlp(moe.shared, hidden, prefix + "shared.")
    if moe.has_shared_gate:
        yield TensorSpec(prefix + "shared_gate.weight", (1, hidden), "vector")
