"""The tensors of a model under Tokenmill's own names, and the checkpoint tensors that each is read from.

    tensors_of    per model: the tensors that its spec requires (names are listed at `TensorSpec`)
    Rule          per family: our name pattern → the checkpoint's name pattern (+ how to convert it)
    TensorSource  per model: our name → the checkpoint tensors that it is made of, ready to read

Loaders and cost functions use only our names. "Ours" is a tensor of Tokenmill's naming, "theirs" one of the checkpoint.
Conversions work on whole rows, so that they apply to quantised rows too:

    fused        theirs contains several of ours, one after another by rows (Phi-3's qkv_proj), or repeated so for each
                 key head (Falcon's query_key_value)
    woven        theirs contains several of ours alternating: by rows (gpt-oss's gate and up), or by heads
    {e}          one of theirs per expert, stacked into one of ours
    is_joined    theirs is one matrix with the rows of all experts one after another, ours has a matrix per expert
    add          a constant added to each value (Gemma stores a norm's weight minus one)
    transposed   theirs has rows and columns exchanged (unquantised only)
    unit_axis    theirs has an axis of length one that ours lacks (the channel axis of a depthwise convolution)
    interleaved  rows of each head alternate between the two halves of the rotation (GGUF's llama files);
                 ours has the first half, then the second
    is_swapped   rows of each head have the second half of the rotation first (nanochat)
    values       theirs has each head's keys, transposed; another tensor has its values (GGUF's latent attention)
    minus_exp    theirs is -e^ours (GGUF's decays of recurrent layers)
    in_groups    theirs has a row for each group of a recurrent mixer, ours is one vector
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from tokenmill.arch.compressed import Compression
from tokenmill.arch.indexer import BlockIndexer, Indexer
from tokenmill.arch.recurrent import InnerProjection, Recurrent
from tokenmill.arch.spec import (
    RMS_NORM,
    Gqa,
    LayerSpec,
    MixerSpec,
    Mla,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    ShortConv,
    TensorSpec,
    WindowedMqa,
)
from tokenmill.arch.streams import AltUp, HyperConnections, Streams
from tokenmill.errors import UnsupportedModel

# ── the tensors of a spec ──────────────────────────────────────────────────────────────────────────


def tensors_of(spec: ModelSpec) -> dict[str, TensorSpec]:
    return {tensor.name: tensor for tensor in _tensors(spec)}


def _tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    yield from _first_tensors(spec)
    for index, layer in enumerate(spec.layers):
        yield from layer_tensors(layer, spec.hidden_size, f"layers.{index}.", spec.norm)
    yield from _last_tensors(spec)


def end_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    """Yield the tensors outside the layers."""
    yield from _first_tensors(spec)
    yield from _last_tensors(spec)


def _first_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    yield TensorSpec("embed.weight", (spec.vocab_size, spec.hidden_size), "embedding")
    if spec.num_positions:
        yield TensorSpec("positions.weight", (spec.num_positions, spec.hidden_size), "embedding")
    if spec.has_embed_norm:
        yield from _norm("embed_norm", spec.hidden_size, spec.norm)
    if spec.input_width:
        yield from _layer_inputs(spec)
    if spec.streams is not None:
        yield from _stream_ends(spec.streams, spec.hidden_size)
    if spec.joins_states:
        yield from _linear("join", spec.hidden_size, 2 * spec.hidden_size, False)
        yield from _norm("join_embed_norm", spec.hidden_size, spec.norm)
        yield from _norm("join_state_norm", spec.hidden_size, spec.norm)


def _last_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    yield from _norm("final_norm", spec.hidden_size, spec.norm)
    if not spec.tied_head:
        yield TensorSpec("head.weight", (spec.vocab_size, spec.hidden_size), "linear")
    if spec.has_head_bias:
        yield TensorSpec("head.bias", (spec.vocab_size,), "vector")


def _layer_inputs(spec: ModelSpec) -> Iterator[TensorSpec]:
    """Yield the tensors of the layers' own token embeddings."""
    width = spec.num_layers * spec.input_width
    yield TensorSpec("layer_inputs.embed.weight", (spec.input_vocab_size or spec.vocab_size, width), "embedding")
    yield TensorSpec("layer_inputs.project.weight", (width, spec.hidden_size), "linear")
    yield TensorSpec("layer_inputs.norm.weight", (spec.input_width,), "vector")


def layer_tensors(layer: LayerSpec, hidden: int, prefix: str = "", norm: NormSpec = RMS_NORM) -> Iterator[TensorSpec]:
    if layer.has_pre_norms:
        yield from _norm(prefix + "attn_norm", hidden, norm)
    for mixer in layer.mixers:
        yield from _mixer(mixer, hidden, prefix)
    if layer.has_post_norms:
        yield from _norm(prefix + "attn_post_norm", hidden, norm)
    if layer.mlp is None:
        return
    if layer.has_pre_norms and (layer.has_parallel_norm or not layer.is_parallel):
        yield from _norm(prefix + "mlp_norm", hidden, norm)
    yield from _feed(layer.mlp, hidden, prefix)
    if layer.side_experts is not None:
        for name in ("norm", "post_norm", "mlp_post_norm"):
            yield from _norm(f"{prefix}side.{name}", hidden, norm)
        yield from _experts(layer.side_experts, hidden, prefix + "side.")
    if layer.has_mlp_post_norm:
        yield from _norm(prefix + "mlp_post_norm", hidden, norm)
    if layer.input_width:
        yield from _linear(prefix + "input_gate", layer.input_width, hidden, False)
        yield from _linear(prefix + "input_up", hidden, layer.input_width, False)
        yield from _norm(prefix + "input_norm", hidden, norm)
    if layer.has_scale:
        yield TensorSpec(prefix + "scale", (1,), "vector")
    match layer.streams:
        case AltUp():
            yield from _altup(layer.streams, hidden, prefix)
        case HyperConnections():
            for part in ("attn", "mlp"):
                yield from _connection(
                    f"{prefix}{part}_connect", layer.streams.num_coefficients, 3, layer.streams, hidden
                )


def _stream_ends(streams: Streams, hidden: int) -> Iterator[TensorSpec]:
    if isinstance(streams, HyperConnections):
        yield from _connection("streams_end", streams.num_streams, 1, streams, hidden)
        return
    for side, number in product(("in", "out"), range(streams.num_streams - 1)):
        yield from _linear(f"streams.{side}.{number}", hidden, hidden, False)


def _connection(name: str, rows: int, scales: int, streams: HyperConnections, hidden: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (rows, streams.num_streams * hidden), "vector")
    yield TensorSpec(f"{name}_base", (rows,), "vector")
    yield TensorSpec(f"{name}_scale", (scales,), "vector")


def _altup(altup: AltUp, hidden: int, prefix: str) -> Iterator[TensorSpec]:
    count = altup.num_streams
    yield from _norm(prefix + "altup_router_norm", hidden)
    for name, shape in (("router", (count, hidden)), ("predict", (count**2, count)), ("correct", (count, count))):
        yield TensorSpec(f"{prefix}altup_{name}.weight", shape, "vector")
    if altup.has_output_scale:
        yield TensorSpec(prefix + "altup_scale", (hidden,), "vector")
    yield from _linear(prefix + "branch_left", altup.branch_rank, hidden, False)
    yield from _linear(prefix + "branch_right", hidden, altup.branch_rank, False)
    yield from _norm(prefix + "branch_norm", hidden)


def _mixer(mixer: MixerSpec, hidden: int, prefix: str) -> Iterator[TensorSpec]:
    match mixer:
        case Gqa():
            yield from _attention(mixer, hidden, prefix)
        case Mla():
            yield from _latent_attention(mixer, hidden, prefix)
        case WindowedMqa():
            yield from _windowed(mixer, hidden, prefix)
        case ShortConv():
            yield from _conv(mixer, prefix)
        case Recurrent():
            yield from _recurrent(mixer, hidden, prefix + "ssm_")


def _norm(name: str, size: int, norm: NormSpec = RMS_NORM) -> Iterator[TensorSpec]:
    if norm.has_weight:
        yield TensorSpec(name + ".weight", (size,), "vector")
    if norm.has_bias:
        yield TensorSpec(name + ".bias", (size,), "vector")


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[TensorSpec]:
    yield TensorSpec(name + ".weight", (rows, columns), "linear")
    if bias:
        yield TensorSpec(name + ".bias", (rows,), "vector")


def _attention(attention: Gqa, hidden: int, prefix: str) -> Iterator[TensorSpec]:
    yield from _linear(prefix + "q", attention.q_size, hidden, attention.qkv_bias)
    if attention.has_own_kv:
        yield from _linear(prefix + "k", attention.kv_size, hidden, attention.qkv_bias)
    if attention.has_own_kv and not attention.value_is_key:
        yield from _linear(prefix + "v", attention.v_size, hidden, attention.qkv_bias)
    if attention.gate is not None:
        yield from _linear(prefix + "attn_gate", attention.gate_size, hidden, attention.qkv_bias)
    if attention.block_indexer is not None:
        yield from _block_indexer(attention.block_indexer, hidden, prefix + "index_")
    if attention.qk_norm is not None and attention.qk_norm != "l2_after_rope":
        is_joint = attention.qk_norm == "all"
        yield from _norm(prefix + "q_norm", attention.q_size if is_joint else attention.head_dim)
        if attention.has_own_kv:
            yield from _norm(prefix + "k_norm", attention.kv_size if is_joint else attention.head_dim)
    if attention.has_sinks:
        yield TensorSpec(prefix + "sinks", (attention.num_heads,), "vector")
    yield from _linear(prefix + "o", hidden, attention.out_size, attention.out_bias)


def _latent_attention(mla: Mla, hidden: int, prefix: str) -> Iterator[TensorSpec]:
    if mla.q_rank is None:
        yield from _linear(prefix + "q", mla.q_size, hidden, False)
    else:
        yield from _linear(prefix + "q_down", mla.q_rank, hidden, False)
        yield from _norm(prefix + "q_norm", mla.q_rank)
        yield from _linear(prefix + "q_up", mla.q_size, mla.q_rank, False)
    yield from _linear(prefix + "kv_down", mla.entry_size, hidden, False)
    yield from _norm(prefix + "kv_norm", mla.kv_rank)
    yield from _linear(prefix + "kv_up", mla.num_heads * (mla.nope_dim + mla.value_dim), mla.kv_rank, False)
    if mla.indexer is not None:
        yield from _indexer(mla.indexer, mla.q_rank or hidden, hidden, prefix + "index_")
    if mla.gate is not None:
        yield from _linear(prefix + "attn_gate", mla.gate_size, hidden, False)
    yield from _linear(prefix + "o", hidden, mla.out_size, False)


def _indexer(indexer: Indexer, q_inputs: int, hidden: int, prefix: str) -> Iterator[TensorSpec]:
    yield from _linear(prefix + "q", indexer.q_size, q_inputs, False)
    yield from _linear(prefix + "k", indexer.head_dim, hidden, False)
    yield from _norm(prefix + "k_norm", indexer.head_dim, NormSpec("layer", has_bias=True))
    yield from _linear(prefix + "weights", indexer.num_heads, hidden, False)


def _block_indexer(indexer: BlockIndexer, hidden: int, prefix: str) -> Iterator[TensorSpec]:
    yield from _linear(prefix + "q", indexer.q_size, hidden, False)
    yield from _linear(prefix + "k", indexer.head_dim, hidden, False)
    yield from _norm(prefix + "q_norm", indexer.head_dim)
    yield from _norm(prefix + "k_norm", indexer.head_dim)


def _windowed(mixer: WindowedMqa, hidden: int, prefix: str) -> Iterator[TensorSpec]:
    for name, size in mixer.projected_parts:
        yield from _linear(prefix + name, size, hidden, False)
    yield from _norm(prefix + "q_norm", mixer.q_rank)
    yield from _linear(prefix + "q_up", mixer.q_size, mixer.q_rank, False)
    yield from _norm(prefix + "kv_norm", mixer.head_dim)
    yield TensorSpec(prefix + "sinks", (mixer.num_heads,), "vector")
    compression = mixer.compression
    if compression is not None:
        yield from _entries(compression, mixer.head_dim, prefix + "entry")
        if compression.indexer is not None:
            yield from _entries(compression, compression.indexer.head_dim, prefix + "index")
            yield from _linear(prefix + "index_q", compression.indexer.q_size, mixer.q_rank, False)
    yield from _linear(prefix + "out_groups", mixer.out_size, mixer.q_size // mixer.out_groups, False)
    yield from _linear(prefix + "o", hidden, mixer.out_size, False)


def _entries(compression: Compression, head_dim: int, name: str) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}_bias", (compression.rate, compression.num_series * head_dim), "vector")
    yield from _norm(f"{name}_norm", head_dim)


def _conv(conv: ShortConv, prefix: str) -> Iterator[TensorSpec]:
    yield from _linear(prefix + "conv_in", 3 * conv.width, conv.width, conv.bias)
    yield TensorSpec(prefix + "conv.weight", (conv.width, conv.kernel), "vector")
    if conv.bias:
        yield TensorSpec(prefix + "conv.bias", (conv.width,), "vector")
    yield from _linear(prefix + "conv_out", conv.width, conv.width, conv.bias)


def _recurrent(mixer: Recurrent, hidden: int, prefix: str) -> Iterator[TensorSpec]:
    for name, size in mixer.projected_parts:
        yield from _linear(prefix + name, size, hidden, mixer.bias)
    for name, size in mixer.conv_parts:
        yield TensorSpec(f"{prefix}{name}.weight", (size, mixer.kernel), "vector")
        if mixer.conv_bias:
            yield TensorSpec(f"{prefix}{name}.bias", (size,), "vector")
    if mixer.inner is not None:
        yield from _inner_projection(mixer, mixer.inner, prefix)
    else:
        yield TensorSpec(prefix + "a_log", (mixer.value_heads,), "vector")
    yield TensorSpec(prefix + "dt_bias", (mixer.num_decays,), "vector")
    if mixer.rule == "ssd":
        yield TensorSpec(prefix + "d", (mixer.value_heads,), "vector")
    if mixer.norm is not None:
        shared = mixer.values_size // mixer.norm.groups
        yield TensorSpec(prefix + "norm.weight", (shared if mixer.norm.is_shared else mixer.values_size,), "vector")
    yield from _linear(prefix + "out", hidden, mixer.values_size, mixer.bias)


def _inner_projection(mixer: Recurrent, inner: InnerProjection, prefix: str) -> Iterator[TensorSpec]:
    values, states = mixer.values_size, mixer.key_dim
    yield from _linear(prefix + "inner", inner.rank + 2 * states, values, False)
    yield from _linear(prefix + "step", values, inner.rank, False)
    yield TensorSpec(prefix + "a_log", (values, states), "vector")
    yield TensorSpec(prefix + "d", (values,), "vector")
    if inner.norm == "weighted":
        for name, size in (("step_norm", inner.rank), ("k_norm", states), ("q_norm", states)):
            yield from _norm(prefix + name, size)


def _feed(feed: MlpSpec | MoeSpec, hidden: int, prefix: str) -> Iterator[TensorSpec]:
    yield from _experts(feed, hidden, prefix) if isinstance(feed, MoeSpec) else _mlp(feed, hidden, prefix)


def _mlp(mlp: MlpSpec, hidden: int, prefix: str) -> Iterator[TensorSpec]:
    if mlp.is_gated:
        yield from _linear(prefix + "gate", mlp.intermediate_size, hidden, mlp.bias)
    yield from _linear(prefix + "up", mlp.intermediate_size, hidden, mlp.bias)
    yield from _linear(prefix + "down", hidden, mlp.intermediate_size, mlp.bias)
    if mlp.activation == "xielu":
        yield from (TensorSpec(prefix + name, (), "vector") for name in XIELU)


XIELU = ("act_alpha_p", "act_alpha_n", "act_beta", "act_eps")
"""The numbers of an "xielu" activation, in the order in which `xielu_curve` reads them."""


def _experts(moe: MoeSpec, hidden: int, prefix: str) -> Iterator[TensorSpec]:
    experts, width, routing = moe.num_experts, moe.latent_size or hidden, moe.routing
    yield from _linear(prefix + "router", experts, hidden, routing.has_router_bias)
    if routing.has_choice_bias:
        yield TensorSpec(prefix + "choice_bias", (experts,), "vector")
    if routing.table_rows:
        yield TensorSpec(prefix + "expert_table", (routing.table_rows, moe.num_active), "vector")
    if routing.has_expert_scales:
        yield TensorSpec(prefix + "expert_scales", (experts,), "vector")
    if routing.has_input_norm:
        yield from _norm(prefix + "router_norm", hidden)
    if moe.latent_size is not None:
        yield from _linear(prefix + "latent_in", moe.latent_size, hidden, False)
        yield from _linear(prefix + "latent_out", hidden, moe.latent_size, False)
    for tensor in _mlp(moe.expert, width, prefix + "experts."):
        yield TensorSpec(tensor.name, (experts, *tensor.shape), tensor.kind)
    if moe.shared is not None:
        yield from _mlp(moe.shared, hidden, prefix + "shared.")
    if moe.has_shared_gate:
        yield TensorSpec(prefix + "shared_gate.weight", (1, hidden), "vector")


# ── where they are in a checkpoint ─────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Rule:
    """The checkpoint's name of one of our tensors, and the conversion that it needs (see the top of this file)."""

    pattern: str  # theirs, with {i} for the layer, {e} for the expert, {s} for the stream
    fused: tuple[str, ...] = ()  # our parts, in the order of their rows in the fused tensor
    is_per_key_head: bool = False  # the fused rows repeat for each key head of attention or of a recurrent mixer
    num_blocks: int = 1  # the fused rows repeat so often (CodeGen's qkv_proj)
    skipped_rows: int = 0  # theirs begins with so many rows that are never used (OPT's positions)
    woven: tuple[str, ...] = ()  # our parts, in the order in which they alternate
    add: float = 0.0
    interleaved: bool = False
    is_swapped: bool = False  # theirs rotates the other way: each head has our second half first
    transposed: bool = False
    unit_axis: int | tuple[int, ...] | None = None
    times: str | None = None  # ours is theirs times this matrix, which has a row per channel of a recurrent key
    values: str | None = None  # pattern of the tensor with the heads' values
    minus_exp: bool = False
    in_groups: bool = False
    is_joined: bool = False


Rules = Mapping[str, Rule]


@dataclass(frozen=True)
class TensorSource:
    """The checkpoint tensors that one of ours is made of. Several `names` are stacked along a new first axis."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # of each of theirs
    stack_index: int | None = None  # index along their first axis that is ours
    rows: tuple[int, int] | None = None  # the range of their rows that is ours (the axis before the last, or the only)
    row_groups: int = 1  # their rows consist of so many equal groups; `rows` are those in each
    woven: tuple[int, int, int] | None = None  # (index, count, size): `count` parts alternate, `size` rows each
    transposed: bool = False
    is_vector: bool = False  # the last axis counts as rows: a bias, perhaps one per expert
    add: float = 0.0
    factor: float = 1.0
    unit_axes: tuple[int, ...] = ()  # axes of theirs that are dropped
    times: tuple[str, tuple[int, int]] | None = None  # name and shape of the matrix that theirs is multiplied with
    values: tuple[str, tuple[int, ...]] | None = None  # name and shape of the heads' values; `names` has their keys
    minus_exp: bool = False
    num_joined: int = 0  # theirs has the rows of so many of our matrices one after another
    is_flattened: bool = False  # theirs has rows, ours is one vector
    interleaved_heads: int = 0  # 0: rows are in our order already
    rotary_dim: int = 0
    rotary_start: int = 0  # the first of a head's rows that are rotated
    swapped_heads: int = 0  # heads whose halves are exchanged; 0: none


def sources_of(spec: ModelSpec, rules: Rules) -> dict[str, TensorSource]:
    return {name: _source(spec, rules, name, tensor.shape) for name, tensor in tensors_of(spec).items()}


def _source(spec: ModelSpec, rules: Rules, name: str, shape: tuple[int, ...]) -> TensorSource:
    if name.startswith("streams."):
        _, side, stream, _ = name.split(".")
        pattern = _rule(rules, f"streams.{side}.{{s}}.weight", spec).pattern
        if "{s}" in pattern:
            return TensorSource((pattern.replace("{s}", stream),), shape)
        others = spec.streams.num_streams - 1 if spec.streams is not None else 0
        return TensorSource((pattern,), (others, *shape), stack_index=int(stream))
    if not name.startswith("layers."):
        rule = _rule(rules, name, spec)
        number = spec.layer_numbers[0][0] if spec.layer_numbers else 0  # of an MTP head's layer
        source = TensorSource((rule.pattern.replace("{i}", str(number)),), shape, add=rule.add)
        if rule.skipped_rows:
            rows = (rule.skipped_rows, rule.skipped_rows + shape[0])
            source = replace(source, shape=(rows[1], *shape[1:]), rows=rows)
        return source
    _, index, part = name.split(".", 2)
    layer, rule = spec.layers[int(index)], _rule(rules, "layers.{i}." + part, spec)
    is_vector = not part.endswith(".weight")
    number = _checkpoint_layer(spec, int(index), part)
    source = TensorSource(
        (rule.pattern.replace("{i}", str(number)),),
        shape,
        is_vector=is_vector,
        add=rule.add,
        factor=dict(layer.factors).get(part.removesuffix(".weight"), 1.0),
        minus_exp=rule.minus_exp,
    )
    if rule.values is not None and isinstance(layer.mixer, Mla):
        return _by_heads(source, layer.mixer, rule.values.replace("{i}", str(number)))
    if rule.in_groups:
        groups = next(mixer.key_heads for mixer in layer.mixers if isinstance(mixer, Recurrent))
        source = replace(source, shape=(groups, shape[0] // groups), is_flattened=True)
    if rule.interleaved:
        source = _interleaved(source, layer, part)
    if rule.is_swapped and isinstance(layer.mixer, Gqa):
        mixer = layer.mixer
        source = replace(source, swapped_heads=mixer.num_heads if part.startswith("q") else mixer.num_kv_heads)
    if rule.fused:
        source = _fused(source, layer, rule, part)
    if rule.unit_axis is not None:
        axes = rule.unit_axis if isinstance(rule.unit_axis, tuple) else (rule.unit_axis,)
        padded = source.shape
        for at in axes:
            padded = (*padded[:at], 1, *padded[at:])
        source = replace(source, shape=padded, unit_axes=axes)
    if rule.times is not None and isinstance(layer.mixer, Recurrent):
        rank, name = layer.mixer.key_dim, rule.times.replace("{i}", str(number))
        source = replace(source, shape=(shape[0], rank), times=(name, (rank, shape[1])))
    if rule.woven:
        source = _woven(source, layer, rule, part)
    if rule.transposed:
        source = replace(source, shape=(*source.shape[:-2], source.shape[-1], source.shape[-2]), transposed=True)
    if rule.is_joined:
        count, num_rows, num_columns = source.shape
        source = replace(source, shape=(count * num_rows, num_columns), num_joined=count)
    if "{e}" in rule.pattern:
        source = _per_expert(source)
    return source


def _by_heads(source: TensorSource, mla: Mla, values: str) -> TensorSource:
    """
    theirs, of each head:  keys [kv_rank, nope_dim] | values [value_dim, kv_rank]
    ours:                  [nope_dim + value_dim, kv_rank], head after head
    """
    keys = (mla.num_heads, mla.kv_rank, mla.nope_dim)
    return replace(source, shape=keys, values=(values, (mla.num_heads, mla.value_dim, mla.kv_rank)))


def _checkpoint_layer(spec: ModelSpec, index: int, part: str) -> int:
    """Return the checkpoint's number of the layer with this part of our layer `index`."""
    if not spec.layer_numbers:
        return index
    mixer, fed = spec.layer_numbers[index]
    own = {tensor.name for tensor in _mixer(spec.layers[index].mixer, spec.hidden_size, "")}
    return mixer if part in own or part.startswith("attn_") else fed


def _rule(rules: Rules, name: str, spec: ModelSpec) -> Rule:
    if name not in rules:
        raise UnsupportedModel(f"{spec.family}: the checkpoint's name of the tensor {name!r} is not known")
    return rules[name]


def _interleaved(source: TensorSource, layer: LayerSpec, part: str) -> TensorSource:
    attention = layer.mixer
    if isinstance(attention, Mla) and attention.indexer is not None and part.startswith("index_"):
        heads = attention.indexer.num_heads if part.startswith("index_q") else 1
        return replace(source, interleaved_heads=heads, rotary_dim=attention.rope_dim)
    if isinstance(attention, Mla):
        heads, start = (1, attention.kv_rank) if part.startswith("kv") else (attention.num_heads, attention.nope_dim)
        return replace(source, interleaved_heads=heads, rotary_dim=attention.rope_dim, rotary_start=start)
    if not isinstance(attention, Gqa) or attention.rope is None:
        return source
    heads = attention.num_heads if part.startswith("q") else attention.num_kv_heads
    return replace(source, interleaved_heads=heads, rotary_dim=attention.rope.rotary_dim)


def _fused(source: TensorSource, layer: LayerSpec, rule: Rule, part: str) -> TensorSource:
    """
    theirs:  [ q rows ... | k rows ... | v rows ... ]
    ours:                 ^start       ^end            for k
    """
    ours, sizes = _own_name(part), _num_rows(layer, part)
    start = sum(sizes[name] for name in rule.fused[: rule.fused.index(ours)])
    axis = -1 if source.is_vector else -2
    shape = list(source.shape)
    shape[axis] = sum(sizes[name] for name in rule.fused)
    groups = rule.num_blocks
    if rule.is_per_key_head and isinstance(layer.mixer, Recurrent | Gqa):
        groups = layer.mixer.key_heads if isinstance(layer.mixer, Recurrent) else layer.mixer.num_kv_heads
    rows = (start // groups, (start + sizes[ours]) // groups)
    return replace(source, shape=tuple(shape), rows=rows, row_groups=groups)


def _woven(source: TensorSource, layer: LayerSpec, rule: Rule, part: str) -> TensorSource:
    """
    theirs, of gate and up:    g0 u0 g1 u1 ...            of queries and their gate:   q0 g0 q1 g1 ...   heads
    """
    ours, count, mixer = _own_name(part), len(rule.woven), layer.mixer
    size = mixer.head_dim if ours in ("q", "attn_gate") and isinstance(mixer, Gqa) else 1
    axis = -1 if source.is_vector else -2
    shape = list(source.shape)
    shape[axis] *= count
    return replace(source, shape=tuple(shape), woven=(rule.woven.index(ours), count, size))


def _own_name(part: str) -> str:
    """layers.3.side.experts.gate.weight → gate"""
    return part.split(".")[-2]


def _num_rows(layer: LayerSpec, part: str) -> dict[str, int]:
    """Return the row counts of the parts that may be fused with this one."""
    attention, feed = layer.mixer, layer.mlp
    if part.startswith("side.") and layer.side_experts is not None:
        feed = layer.side_experts
    mlp = feed.expert if isinstance(feed, MoeSpec) else feed
    if isinstance(feed, MoeSpec) and feed.shared is not None and "shared." in part:
        mlp = feed.shared
    sizes = {} if mlp is None else {"gate": mlp.intermediate_size, "up": mlp.intermediate_size}
    if isinstance(attention, Gqa):
        sizes |= {"q": attention.q_size, "k": attention.kv_size, "v": attention.v_size}
    for mixer in layer.mixers:
        if isinstance(mixer, Recurrent):
            sizes |= {f"ssm_{name}": size for name, size in (*mixer.projected_parts, *mixer.conv_parts)}
    return sizes


def _per_expert(source: TensorSource) -> TensorSource:
    names = tuple(source.names[0].replace("{e}", str(expert)) for expert in range(source.shape[0]))
    return replace(source, names=names, shape=source.shape[1:])


# ── names shared by most families ──────────────────────────────────────────────────────────────────

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

HF_SHARED_EXPERTS: Rules = {
    f"layers.{{i}}.shared.{part}.{kind}": Rule(f"model.layers.{{i}}.mlp.shared_experts.{part}_proj.{kind}")
    for part in ("gate", "up", "down")
    for kind in ("weight", "bias")
}

HF_SHARED_EXPERT: Rules = {
    f"layers.{{i}}.shared.{part}.weight": Rule(f"model.layers.{{i}}.mlp.shared_expert.{part}_proj.weight")
    for part in ("gate", "up", "down")
}

HF_UNGATED_MLP: Rules = {
    f"layers.{{i}}.{ours}.{kind}": Rule(f"model.layers.{{i}}.mlp.{theirs}.{kind}")
    for ours, theirs in (("up", "c_fc"), ("down", "c_proj"))
    for kind in ("weight", "bias")
}


def interleaved_pairs(rules: Rules) -> Rules:
    """Return the rules for a model that rotates neighbouring dimensions of q and k."""
    turned = [f"layers.{{i}}.{part}.{kind}" for part in ("q", "k") for kind in ("weight", "bias")]
    return {**rules, **{name: replace(rules[name], interleaved=True) for name in turned}}


def swapped_halves(rules: Rules) -> Rules:
    """Return the rules for a model that rotates q and k by negative angles: by ours with the halves exchanged."""
    turned = [f"layers.{{i}}.{part}.{kind}" for part in ("q", "k") for kind in ("weight", "bias")]
    return {**rules, **{name: replace(rules[name], is_swapped=True) for name in turned}}


# Norms only after attention and MLP, under the names that other families use for the norms before them.
HF_POST_NORMS: Rules = {
    "layers.{i}.attn_post_norm.weight": Rule("model.layers.{i}.post_attention_layernorm.weight"),
    "layers.{i}.mlp_post_norm.weight": Rule("model.layers.{i}.post_feedforward_layernorm.weight"),
}


def with_norm_biases(rules: Rules) -> Rules:
    """Return the rules with rules added for the biases of all norms of the residual stream."""
    of_heads = ("q_norm.weight", "k_norm.weight")
    norms = [name for name in rules if name.endswith("_norm.weight") and not name.endswith(of_heads)]
    return {**rules, **{_bias_of(name): Rule(_bias_of(rules[name].pattern)) for name in norms}}


def _bias_of(name: str) -> str:
    return name.removesuffix(".weight") + ".bias"


# Gemma: post_attention_layernorm is applied after attention here, and every norm's weight is stored minus one.
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
GGUF_LLAMA: Rules = interleaved_pairs(GGUF)

# Files that name the norm before the MLP like a norm after attention.
GGUF_OTHER_NORM: Rules = {"layers.{i}.mlp_norm.weight": Rule("blk.{i}.post_attention_norm.weight")}
GGUF_ROUTED: Rules = {
    "layers.{i}.choice_bias": Rule("blk.{i}.exp_probs_b.bias"),
    **{
        f"layers.{{i}}.shared.{part}.weight": Rule(f"blk.{{i}}.ffn_{part}_shexp.weight")
        for part in ("gate", "up", "down")
    },
}

GGUF_SHARED_GATE: Rules = {"layers.{i}.shared_gate.weight": Rule("blk.{i}.ffn_gate_inp_shexp.weight")}
# Newer files have the experts' gate and up matrices in one tensor.
GGUF_FUSED_EXPERTS: Rules = {
    f"layers.{{i}}.experts.{part}.weight": Rule("blk.{i}.ffn_gate_up_exps.weight", ("gate", "up"))
    for part in ("gate", "up")
}
# Mamba-2, with the parts of `families/bamba.py`.
_MAMBA_INPUTS = ("ssm_z", "ssm_v", "ssm_k", "ssm_q", "ssm_a")
_MAMBA_CONVOLVED = ("ssm_conv_v", "ssm_conv_k", "ssm_conv_q")
GGUF_MAMBA: Rules = {
    **{f"layers.{{i}}.{part}.weight": Rule("blk.{i}.ssm_in.weight", _MAMBA_INPUTS) for part in _MAMBA_INPUTS},
    **{
        f"layers.{{i}}.{part}.{kind}": Rule(f"blk.{{i}}.ssm_conv1d.{kind}", _MAMBA_CONVOLVED)
        for part in _MAMBA_CONVOLVED
        for kind in ("weight", "bias")
    },
    "layers.{i}.ssm_a_log": Rule("blk.{i}.ssm_a", minus_exp=True, unit_axis=1),
    "layers.{i}.ssm_dt_bias": Rule("blk.{i}.ssm_dt.bias"),
    "layers.{i}.ssm_d": Rule("blk.{i}.ssm_d", unit_axis=1),
    "layers.{i}.ssm_norm.weight": Rule("blk.{i}.ssm_norm.weight", in_groups=True),
    "layers.{i}.ssm_out.weight": Rule("blk.{i}.ssm_out.weight"),
}
# Mamba-1, with the parts of `families/jamba.py`.
_MAMBA1_INPUTS = ("ssm_v", "ssm_z")
GGUF_MAMBA1: Rules = {
    **{f"layers.{{i}}.{part}.weight": Rule("blk.{i}.ssm_in.weight", _MAMBA1_INPUTS) for part in _MAMBA1_INPUTS},
    **{f"layers.{{i}}.ssm_conv_v.{kind}": Rule(f"blk.{{i}}.ssm_conv1d.{kind}") for kind in ("weight", "bias")},
    "layers.{i}.ssm_inner.weight": Rule("blk.{i}.ssm_x.weight"),
    "layers.{i}.ssm_step.weight": Rule("blk.{i}.ssm_dt.weight"),
    "layers.{i}.ssm_dt_bias": Rule("blk.{i}.ssm_dt.bias"),
    "layers.{i}.ssm_a_log": Rule("blk.{i}.ssm_a", minus_exp=True),
    "layers.{i}.ssm_d": Rule("blk.{i}.ssm_d"),
    "layers.{i}.ssm_step_norm.weight": Rule("blk.{i}.ssm_dt_norm.weight"),
    "layers.{i}.ssm_k_norm.weight": Rule("blk.{i}.ssm_b_norm.weight"),
    "layers.{i}.ssm_q_norm.weight": Rule("blk.{i}.ssm_c_norm.weight"),
    "layers.{i}.ssm_out.weight": Rule("blk.{i}.ssm_out.weight"),
}
# Latent attention; newer files store the matrices of each head separately (GGUF_LATENT_HEADS).
GGUF_LATENT: Rules = {
    "layers.{i}.q.weight": Rule("blk.{i}.attn_q.weight", interleaved=True),
    "layers.{i}.q_down.weight": Rule("blk.{i}.attn_q_a.weight"),
    "layers.{i}.q_norm.weight": Rule("blk.{i}.attn_q_a_norm.weight"),
    "layers.{i}.q_up.weight": Rule("blk.{i}.attn_q_b.weight", interleaved=True),
    "layers.{i}.kv_down.weight": Rule("blk.{i}.attn_kv_a_mqa.weight", interleaved=True),
    "layers.{i}.kv_norm.weight": Rule("blk.{i}.attn_kv_a_norm.weight"),
    "layers.{i}.kv_up.weight": Rule("blk.{i}.attn_kv_b.weight"),
}
GGUF_LATENT_HEADS: Rules = {
    "layers.{i}.kv_up.weight": Rule("blk.{i}.attn_k_b.weight", values="blk.{i}.attn_v_b.weight")
}

# Tensors that describe the architecture; they are read into the spec rather than as weights.
GGUF_FACTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
