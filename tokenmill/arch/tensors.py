"""The tensors a model is made of, in our own names, and where each of them lies in a checkpoint.

    tensors_of    per model: the tensors its spec asks for (the names are drawn at `TensorSpec`)
    Rule          per family: our name pattern → their name pattern (+ what to do with it)
    TensorSource  per model: our name → the checkpoint tensors it is made of, ready to read

Loaders and cost functions know only our names. Transformations are all on whole rows, so that quantised rows take part:

    fused        theirs holds several of ours, rows one after another (Phi-3's qkv_proj)
    {e}          one of theirs per expert, stacked into one of ours
    add          a constant added to each value (Gemma stores a norm's weight minus one)
    unit_axis    theirs has an axis of length one that ours has not (the channel axis of a depthwise convolution)
    interleaved  rows of each head alternate between the two halves of the rotation (GGUF's llama files);
                 ours has the first half, then the second
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, ModelSpec, MoeSpec, ShortConv, TensorSpec

# ── the tensors of a spec ──────────────────────────────────────────────────────────────────────────


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


# ── where they lie in a checkpoint ─────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Rule:
    pattern: str  # theirs, with {i} for the layer and {e} for the expert
    fused: tuple[str, ...] = ()  # our parts, in the order of their rows in the fused tensor
    add: float = 0.0
    interleaved: bool = False
    unit_axis: int | None = None


Rules = Mapping[str, Rule]


@dataclass(frozen=True)
class TensorSource:
    """One of our tensors, out of the checkpoint's. With several `names` they are stacked along a new first axis."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # each of theirs
    rows: tuple[int, int] | None = None  # which of its rows are ours (the axis before the last, or the only one)
    add: float = 0.0
    unit_axis: int | None = None  # of theirs, which is dropped
    interleaved_heads: int = 0  # 0: rows are in our order already
    rotary_dim: int = 0


def sources_of(spec: ModelSpec, rules: Rules) -> dict[str, TensorSource]:
    return {name: _source(spec, rules, name, tensor.shape) for name, tensor in tensors_of(spec).items()}


def _source(spec: ModelSpec, rules: Rules, name: str, shape: tuple[int, ...]) -> TensorSource:
    if not name.startswith("layers."):
        return TensorSource((rules[name].pattern,), shape, add=rules[name].add)
    _, index, part = name.split(".", 2)
    layer, rule = spec.layers[int(index)], rules["layers.{i}." + part]
    source = TensorSource((rule.pattern.replace("{i}", index),), shape, add=rule.add)
    if rule.interleaved:
        source = _interleaved(source, layer, part)
    if rule.unit_axis is not None:
        at = rule.unit_axis
        source = replace(source, shape=(*shape[:at], 1, *shape[at:]), unit_axis=at)
    if rule.fused:
        source = _fused(source, layer, rule, part)
    if "{e}" in rule.pattern:
        source = _per_expert(source)
    return source


def _interleaved(source: TensorSource, layer: LayerSpec, part: str) -> TensorSource:
    attention = layer.mixer
    if not isinstance(attention, Gqa) or attention.rope is None:
        return source
    heads = attention.num_heads if part.startswith("q") else attention.num_kv_heads
    return replace(source, interleaved_heads=heads, rotary_dim=attention.rope.rotary_dim)


def _fused(source: TensorSource, layer: LayerSpec, rule: Rule, part: str) -> TensorSource:
    """
    theirs:  [ q rows ... | k rows ... | v rows ... ]
    ours:                 ^start       ^end            for k
    """
    ours = part.removeprefix("experts.").split(".")[0]
    sizes = {name: _num_rows(layer, name) for name in rule.fused}
    start = sum(sizes[name] for name in rule.fused[: rule.fused.index(ours)])
    axis = -2 if part.endswith(".weight") else -1
    shape = list(source.shape)
    shape[axis] = sum(sizes.values())
    return replace(source, shape=tuple(shape), rows=(start, start + sizes[ours]))


def _num_rows(layer: LayerSpec, part: str) -> int:
    attention, mlp = layer.mixer, layer.mlp
    expert = mlp.expert if isinstance(mlp, MoeSpec) else mlp
    assert isinstance(expert, MlpSpec)
    sizes = {"gate": expert.intermediate_size, "up": expert.intermediate_size}
    if isinstance(attention, Gqa):
        sizes |= {"q": attention.q_size, "k": attention.kv_size, "v": attention.kv_size}
    return sizes[part]


def _per_expert(source: TensorSource) -> TensorSource:
    names = tuple(source.names[0].replace("{e}", str(expert)) for expert in range(source.shape[0]))
    return replace(source, names=names, shape=source.shape[1:])


# ── names that most families share ─────────────────────────────────────────────────────────────────

HF_ATTENTION: Rules = {
    f"layers.{{i}}.{ours}.{kind}": Rule(f"model.layers.{{i}}.self_attn.{ours}_proj.{kind}")
    for ours in ("q", "k", "v", "o")
    for kind in ("weight", "bias")
}

HF_MLP: Rules = {
    f"layers.{{i}}.{ours}.{kind}": Rule(f"model.layers.{{i}}.mlp.{ours}_proj.{kind}")
    for ours in ("gate", "up", "down")
    for kind in ("weight", "bias")
}

HF_QK_NORM: Rules = {
    "layers.{i}.q_norm.weight": Rule("model.layers.{i}.self_attn.q_norm.weight"),
    "layers.{i}.k_norm.weight": Rule("model.layers.{i}.self_attn.k_norm.weight"),
}

HF_LLAMA: Rules = {
    "embed.weight": Rule("model.embed_tokens.weight"),
    "layers.{i}.attn_norm.weight": Rule("model.layers.{i}.input_layernorm.weight"),
    **HF_ATTENTION,
    "layers.{i}.mlp_norm.weight": Rule("model.layers.{i}.post_attention_layernorm.weight"),
    **HF_MLP,
    "final_norm.weight": Rule("model.norm.weight"),
    "head.weight": Rule("lm_head.weight"),
}

# Gemma: post_attention_layernorm really is after attention, and every norm is stored minus one.
HF_GEMMA: Rules = {
    **HF_LLAMA,
    "layers.{i}.attn_norm.weight": Rule("model.layers.{i}.input_layernorm.weight", add=1.0),
    "layers.{i}.attn_post_norm.weight": Rule("model.layers.{i}.post_attention_layernorm.weight", add=1.0),
    "layers.{i}.mlp_norm.weight": Rule("model.layers.{i}.pre_feedforward_layernorm.weight", add=1.0),
    "layers.{i}.mlp_post_norm.weight": Rule("model.layers.{i}.post_feedforward_layernorm.weight", add=1.0),
    "layers.{i}.q_norm.weight": Rule("model.layers.{i}.self_attn.q_norm.weight", add=1.0),
    "layers.{i}.k_norm.weight": Rule("model.layers.{i}.self_attn.k_norm.weight", add=1.0),
    "final_norm.weight": Rule("model.norm.weight", add=1.0),
}

_GGUF_PARTS = {
    "attn_norm.weight": "attn_norm.weight",
    "q.weight": "attn_q.weight",
    "q.bias": "attn_q.bias",
    "k.weight": "attn_k.weight",
    "k.bias": "attn_k.bias",
    "v.weight": "attn_v.weight",
    "v.bias": "attn_v.bias",
    "o.weight": "attn_output.weight",
    "o.bias": "attn_output.bias",
    "q_norm.weight": "attn_q_norm.weight",
    "k_norm.weight": "attn_k_norm.weight",
    "attn_post_norm.weight": "post_attention_norm.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "gate.weight": "ffn_gate.weight",
    "gate.bias": "ffn_gate.bias",
    "up.weight": "ffn_up.weight",
    "up.bias": "ffn_up.bias",
    "down.weight": "ffn_down.weight",
    "down.bias": "ffn_down.bias",
    "router.weight": "ffn_gate_inp.weight",
    "experts.gate.weight": "ffn_gate_exps.weight",
    "experts.up.weight": "ffn_up_exps.weight",
    "experts.down.weight": "ffn_down_exps.weight",
    "mlp_post_norm.weight": "post_ffw_norm.weight",
}

GGUF: Rules = {
    "embed.weight": Rule("token_embd.weight"),
    **{f"layers.{{i}}.{ours}": Rule(f"blk.{{i}}.{theirs}") for ours, theirs in _GGUF_PARTS.items()},
    "final_norm.weight": Rule("output_norm.weight"),
    "head.weight": Rule("output.weight"),
}

# llama.cpp rotates neighbouring pairs for this architecture, so its converter reorders the rows of q and k.
GGUF_LLAMA: Rules = {
    **GGUF,
    **{
        f"layers.{{i}}.{part}.{kind}": replace(GGUF[f"layers.{{i}}.{part}.{kind}"], interleaved=True)
        for part in ("q", "k")
        for kind in ("weight", "bias")
    },
}

# Tensors that carry facts of the architecture, read into the spec rather than as weights.
GGUF_FACTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
