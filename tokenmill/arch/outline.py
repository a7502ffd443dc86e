"""Model outlines: the sizes that determine a model's memory and compute cost, layer by layer.

Every `ModelSpec` has an outline, and costs are computed from outlines only. For models that the engine does not run,
`outlines.py` reads an outline from the config, so that the planner can size them too.

    a layer    matrices used by every token  │  matrices of routed experts, of which a token uses some     │  vectors
               kept per token (KV)           │  multiply-adds per query-key pair                           │  window
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.spec import (
    Gqa,
    LayerSpec,
    MixerSpec,
    Mla,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    ShortConv,
    WindowedMqa,
)
from tokenmill.arch.tensors import end_tensors, layer_tensors


@dataclass(frozen=True)
class LayerOutline:
    """The sizes of one layer, as counts of values, not bytes."""

    linear: int  # parameters of matrices that every token is multiplied with
    vectors: int  # norms, biases
    kv_values: int  # cached per token
    pair_values: int  # heads × (key width + value width)
    num_heads: int
    num_kv_heads: int  # number of parts that tensor parallelism can split the KV cache into
    width: int  # of the widest activations between its matrices
    window: int | None = None
    experts: int = 0  # parameters of all routed experts
    num_experts: int = 0
    num_active: int = 0
    state_values: int = 0  # cached per sequence, whatever its length (recurrent layers, short convolutions)

    @property
    def total(self) -> int:
        return self.linear + self.experts + self.vectors

    @property
    def active_experts(self) -> int:
        return self.experts * self.num_active // self.num_experts if self.experts else 0


@dataclass(frozen=True)
class ModelOutline:
    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerOutline, ...]
    tied_head: bool
    max_context: int
    dtype: str = "bfloat16"
    end_vectors: int = 0  # norms outside the layers, bias of the head
    end_matrices: int = 0  # further matrices outside the layers that every token is multiplied with
    tables: int = 0  # further embeddings, whose rows are looked up: the layers' own, and those of positions

    @property
    def num_layers(self) -> int:
        return len(self.layers)


Model = ModelSpec | ModelOutline


def outline_of(model: Model) -> ModelOutline:
    return model if isinstance(model, ModelOutline) else _outline_of_spec(model)


@lru_cache(maxsize=64)
def _outline_of_spec(spec: ModelSpec) -> ModelOutline:
    known = {layer: _layer_outline(layer, spec.hidden_size, spec.norm) for layer in dict.fromkeys(spec.layers)}
    ends = _end_sizes(spec)
    return ModelOutline(
        spec.family,
        spec.vocab_size,
        spec.hidden_size,
        tuple(known[layer] for layer in spec.layers),
        spec.tied_head,
        spec.max_context,
        spec.dtype,
        ends["vector"],
        ends["linear"],
        ends["embedding"],
    )


def _end_sizes(spec: ModelSpec) -> dict[str, int]:
    """Return the parameters outside the layers by kind of tensor, other than the tokens' embedding and the head."""
    sizes = {"vector": 0, "linear": 0, "embedding": 0}
    for tensor in end_tensors(spec):
        if tensor.name not in ("embed.weight", "head.weight"):
            sizes[tensor.kind] += prod(tensor.shape)
    return sizes


def _layer_outline(layer: LayerSpec, hidden: int, norm: NormSpec) -> LayerOutline:
    sizes = {"linear": 0, "experts": 0, "vector": 0}
    for tensor in layer_tensors(layer, hidden, norm=norm):
        sizes["experts" if "experts." in tensor.name else tensor.kind] += prod(tensor.shape)
    mixer = _mixer_outline(layer.mixer)
    if layer.side_mixer is not None:
        side = _mixer_outline(layer.side_mixer)
        mixer = replace(mixer, width=mixer.width + side.width, state_values=side.state_values)
    moe = layer.mlp if isinstance(layer.mlp, MoeSpec) else layer.side_experts
    return replace(
        mixer,
        linear=sizes["linear"],
        vectors=sizes["vector"],
        width=max(mixer.width, 3 * (_inner_width(layer.mlp) + _inner_width(layer.side_experts))),
        experts=sizes["experts"],
        num_experts=moe.num_experts if moe else 0,
        num_active=moe.num_active if moe else 0,
    )


def _mixer_outline(mixer: MixerSpec) -> LayerOutline:
    match mixer:
        case Gqa():
            return _gqa_outline(mixer)
        case Mla():
            return _mla_outline(mixer)
        case WindowedMqa():
            return _windowed_outline(mixer)
        case ShortConv():
            return _conv_outline(mixer)
        case Recurrent():
            return _recurrent_outline(mixer)


def _gqa_outline(attention: Gqa) -> LayerOutline:
    """Return the outline of a layer with only this mixer, without its weights.

    Every query is counted as attending to all blocks, even if an indexer selects some: an upper bound.
    """
    index = attention.block_indexer
    kept, compared = (0, 0) if index is None else (index.head_dim, index.q_size)
    return LayerOutline(
        linear=0,
        vectors=0,
        kv_values=kept + (attention.kv_size + attention.v_size if attention.has_own_kv else 0),
        pair_values=attention.q_size + attention.out_size + compared,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        width=attention.q_size
        + attention.out_size
        + attention.kv_size
        + attention.v_size
        + attention.gate_size
        + compared,
        window=attention.window,
    )


def _mla_outline(mla: Mla) -> LayerOutline:
    """Return the outline of a layer with only this mixer, without its weights.

    Every query is counted as attending to all tokens, even if an indexer selects some: an upper bound.
    """
    absorbed = mla.num_heads * (mla.entry_size + mla.kv_rank)
    kept, compared = (0, 0) if mla.indexer is None else (mla.indexer.head_dim, mla.indexer.q_size)
    return LayerOutline(
        linear=0,
        vectors=0,
        kv_values=mla.entry_size + kept,
        pair_values=absorbed + compared,
        num_heads=mla.num_heads,
        num_kv_heads=1,
        width=2 * mla.q_size + mla.entry_size + absorbed + mla.out_size + compared + mla.gate_size,
    )


def _windowed_outline(mixer: WindowedMqa) -> LayerOutline:
    """Return the outline of a layer with only this mixer, without its weights.

    Each token is cached as its share of a compressed entry. The window and the inputs of entries have a constant size,
    so they count as a state. Without compression only the window is cached.
    """
    compression, dim = mixer.compression, mixer.head_dim
    pairs = 2 * mixer.q_size
    outline = LayerOutline(
        linear=0,
        vectors=0,
        kv_values=dim,
        pair_values=pairs,
        num_heads=mixer.num_heads,
        num_kv_heads=1,
        width=4 * mixer.q_size + sum(size for _, size in mixer.projected_parts) + mixer.out_size,
        window=mixer.window,
    )
    if compression is None:
        return outline
    index = 0 if compression.indexer is None else compression.indexer.head_dim
    inputs = compression.inputs_size(dim) + (compression.inputs_size(index) if index else 0)
    scored = 0 if compression.indexer is None else compression.indexer.q_size
    return replace(
        outline,
        kv_values=(dim + index) // compression.rate,
        pair_values=(pairs + scored) // compression.rate,
        window=None,
        state_values=mixer.window * dim + compression.reach * inputs,
    )


def _conv_outline(conv: ShortConv) -> LayerOutline:
    """Return the outline of a layer with only this mixer, without its weights. Its window of a few tokens counts as a
    state."""
    return LayerOutline(
        linear=0,
        vectors=0,
        kv_values=0,
        pair_values=0,
        num_heads=1,
        num_kv_heads=1,
        width=5 * conv.width,  # b, c and x, the inputs of the convolution and its output
        state_values=(conv.kernel - 1) * conv.width,
    )


def _recurrent_outline(mixer: Recurrent) -> LayerOutline:
    """Return the outline of a layer with only this mixer, without its weights."""
    state = mixer.value_heads * mixer.key_dim * mixer.value_dim
    inner = 0 if mixer.inner is None else mixer.inner.rank + 2 * mixer.key_dim + mixer.num_decays
    return LayerOutline(
        linear=0,
        vectors=0,
        kv_values=0,
        pair_values=0,
        num_heads=mixer.value_heads,
        num_kv_heads=mixer.key_heads,
        width=mixer.projected_size + mixer.conv_size + 2 * mixer.values_size + inner,
        state_values=state + (mixer.kernel - 1) * mixer.conv_size,
    )


def _inner_width(mlp: MlpSpec | MoeSpec | None) -> int:
    if mlp is None:
        return 0
    return mlp.num_active * mlp.expert.intermediate_size if isinstance(mlp, MoeSpec) else mlp.intermediate_size


# ── the two halves of a layer ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class MixerOutline:
    """Sizes of a layer's mixer (attention or recurrence)."""

    linear: int
    vectors: int = 0
    kv_values: int = 0
    pair_values: int = 0
    num_heads: int = 1
    num_kv_heads: int = 1
    width: int = 0
    window: int | None = None
    state_values: int = 0


@dataclass(frozen=True)
class FeedOutline:
    """Sizes of a layer's MLP or experts."""

    linear: int = 0
    vectors: int = 0
    width: int = 0
    experts: int = 0
    num_experts: int = 0
    num_active: int = 0


def layer(mixer: MixerOutline, feed: FeedOutline, norms: int) -> LayerOutline:
    """Combine a mixer and an MLP into a layer. `norms`: values of the norms around the two."""
    return LayerOutline(
        linear=mixer.linear + feed.linear,
        vectors=mixer.vectors + feed.vectors + norms,
        kv_values=mixer.kv_values,
        pair_values=mixer.pair_values,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        width=max(mixer.width, feed.width),
        window=mixer.window,
        experts=feed.experts,
        num_experts=feed.num_experts,
        num_active=feed.num_active,
        state_values=mixer.state_values,
    )


def grouped_attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    norms: int = 0,
    gates: bool = False,
    window: int | None = None,
) -> MixerOutline:
    """Return the sizes of grouped-query attention.

    `norms`: values of norms on queries and keys, or other vectors; `gates`: each query value has a gate.
    """
    q, kv = heads * head_dim, kv_heads * head_dim
    projected = q * (2 if gates else 1) + 2 * kv
    return MixerOutline(
        linear=hidden * projected + q * hidden,
        vectors=(projected if qkv_bias else 0) + (hidden if out_bias else 0) + norms,
        kv_values=2 * kv,
        pair_values=2 * q,
        num_heads=heads,
        num_kv_heads=kv_heads,
        width=2 * q + 2 * kv,
        window=window,
    )


def gated(hidden: int, inner: int) -> FeedOutline:
    return FeedOutline(linear=3 * hidden * inner, width=3 * inner)


def routed(
    hidden: int,
    inner: int,
    num_experts: int,
    num_active: int,
    *,
    shared: int = 0,
    matrices: int = 3,
    biases: int = 0,
    has_router_bias: bool = False,
) -> FeedOutline:
    """Return the sizes of routed experts.

    `shared`: inner width of the shared expert; `matrices`: 3 if gated, else 2; `biases`: bias values per expert.
    """
    return FeedOutline(
        linear=hidden * num_experts + matrices * hidden * shared,
        vectors=num_experts if has_router_bias else 0,
        width=3 * max(num_active * inner, shared),
        experts=num_experts * (matrices * hidden * inner + biases),
        num_experts=num_experts,
        num_active=num_active,
    )
