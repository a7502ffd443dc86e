"""A model's architecture as frozen data, without torch. Everything else derives from it: the tensors a checkpoint must
contain (`tensors.py`), its cost (`cost.py`), the cache layout, the shard plan, the planner's estimates and execution.

    ModelSpec = embedding → LayerSpec × L → final norm → head
    LayerSpec = norm → mixer → (norm) → + → norm → MLP or experts → (norm) → +      `norms`: which norms exist

The mixer is the part of a layer that combines tokens: grouped-query attention (`Gqa`), latent attention (`Mla`),
attention over compressed entries (`WindowedMqa`), a short convolution (`ShortConv`) or a recurrence (`Recurrent`, in
`recurrent.py`). Only the mixer defines what must be cached of earlier tokens (`cache_fields`, or `cache_parts` where it
is of several kinds) and how far back a token can see (`window`); cache, memory sizing and planner use its definition.

The readers refuse a variant that these fields cannot express, by name; it is never approximated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Literal

from tokenmill.arch.cache_parts import CacheField, CachePart
from tokenmill.arch.compressed import Compression
from tokenmill.arch.indexer import BlockIndexer, Indexer
from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.streams import Streams

Activation = Literal[
    "silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu_oai", "silu_to_10", "clamped_silu_4",
    "clamped_silu_5", "clamped_silu_7", "clamped_silu_16",
]  # fmt: skip
"""The activation of an MLP, act(gate) * up if gated. "relu2" is max(x, 0)²; "xielu", of Apertus, has learned numbers in
every layer (`ops/xielu.py`); "swiglu_oai", of gpt-oss, is g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7) and
u = up between -7 and 7; "silu_to_10", of DeepSeek V4, is silu(min(gate, 10)) * u with u = up between -10 and 10;
"clamped_silu_4" to "clamped_silu_16", of Step-3.5 and Ling 3, are min(silu(gate), n) * u with u = up between -n and n.
"""


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class LongRopeScaling:
    """Phi-3: a factor per frequency, one set for short and one for long contexts; cos and sin are multiplied by
    `mscale`."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context: int
    mscale: float


@dataclass(frozen=True)
class YarnScaling:
    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0  # multiplies cos and sin
    is_truncated: bool = True  # the ramp begins and ends at whole dimensions


@dataclass(frozen=True)
class FrequencyFactors:
    """Each frequency divided by its own factor (how GGUF files store Llama 3's scaling)."""

    factors: tuple[float, ...]  # rotary_dim / 2


RopeScaling = LinearScaling | Llama3Scaling | LongRopeScaling | YarnScaling | FrequencyFactors


@dataclass(frozen=True)
class RopeSpec:
    """Rotation of (x[i], x[i + rotary_dim/2]) pairs. Checkpoints with interleaved pairs are permuted at load."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    num_angles: int | None = None  # number of pairs that rotate, the others have angle zero (Gemma 4); None: all


# ── mixers ─────────────────────────────────────────────────────────────────────────────────────────────

QkNorm = Literal["head", "all", "head_after_rope", "l2_after_rope"]
"""How queries and keys are normed, always by RMSNorm: per head, over all heads of a token, per head after the rotation,
or per head after the rotation without a weight."""


@dataclass(frozen=True)
class QueryGrowth:
    """Scaling of queries with their position p, by 1 + beta * log(1 + floor((p + first) / length))."""

    beta: float
    length: int
    first: int = 0


@dataclass(frozen=True)
class AttentionGate:
    """A gate on attention's output, which is multiplied by function(gate(x)): one value per head, or per element."""

    function: Literal["sigmoid", "softplus"] = "sigmoid"
    is_per_head: bool = False


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention: groups of query heads share a key and value head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q·k
    rope: RopeSpec | None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNorm | None = None
    qkv_clip: float | None = None  # projected queries, keys and values are limited to ± this value
    window: int | None = None  # a token sees itself and the window-1 tokens before it
    softcap: float | None = None  # scores become cap * tanh(score / cap)
    has_sinks: bool = False  # one learned logit per head joins the softmax
    slopes: tuple[
        float, ...
    ] = ()  # ALiBi, per head: a score grows by slope * (key's position - query's); none: no bias
    is_chunked: bool = False  # a token sees only its own chunk of `window` tokens, not a sliding window
    value_dim: int | None = None  # if values have another width than keys
    value_scale: float = 1.0  # multiplies values
    value_is_key: bool = False  # values are the projected keys before norm and rotation
    has_value_norm: bool = False  # RMSNorm without a weight over each head of the values
    gate: AttentionGate | None = None
    query_growth: QueryGrowth | None = None
    shares_kv_of: int | None = None  # an earlier layer whose keys and values this one reads; it has none of its own
    block_indexer: BlockIndexer | None = None  # selects the blocks that are attended to; None: the whole context

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def v_size(self) -> int:
        return self.num_kv_heads * (self.value_dim or self.head_dim)

    @property
    def out_size(self) -> int:
        return self.num_heads * (self.value_dim or self.head_dim)

    @property
    def gate_size(self) -> int:
        if self.gate is None:
            return 0
        return self.num_heads if self.gate.is_per_head else self.out_size

    @property
    def has_own_kv(self) -> bool:
        return self.shares_kv_of is None

    @property
    def is_plain(self) -> bool:
        """Return whether keys and values are cached after at most a per-head norm and the rotation."""
        is_usual = self.qk_norm in (None, "head") and self.gate is None and self.query_growth is None
        is_usual = is_usual and self.qkv_clip is None
        has_usual_values = self.value_dim is None and self.value_scale == 1.0 and not self.has_value_norm
        return is_usual and has_usual_values and self.has_own_kv and self.block_indexer is None

    def cache_fields(self) -> tuple[CacheField, ...]:
        if not self.has_own_kv:
            return ()
        keys, values = (self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.value_dim or self.head_dim)
        return CacheField("keys", keys), CacheField("values", values)

    def cache_parts(self) -> tuple[CachePart, ...]:
        fields = self.cache_fields()
        own = (CachePart("paged", fields, self.window),) if fields else ()  # none: it reads another layer's fields
        return own if self.block_indexer is None else (*own, self.block_indexer.cache_part())


@dataclass(frozen=True)
class ShortConv:
    """LFM2's gated short convolution: out(c * conv(b * x)) with b, c and x projected from the layer's input.

    The convolution is causal and depthwise: each channel is a weighted sum of its last `kernel` inputs b * x. Later
    tokens therefore need the last kernel - 1 inputs. Each token caches its own, like a key: a window of `kernel` tokens
    over paged blocks.
    """

    width: int  # channels; the model's hidden size
    kernel: int  # taps
    bias: bool = False  # of both projections and of the convolution

    @property
    def window(self) -> int:
        return self.kernel

    def cache_fields(self) -> tuple[CacheField, ...]:
        return (CacheField("inputs", (self.width,), "compute"),)


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (DeepSeek): keys and values of all heads are projections of one short vector per
    token.

    Only that (normed) vector is cached, and one rotated key for all heads. A head's query has a part for each:
    [ nope_dim | rope_dim ]. The cache has one entry per token, [ kv_rank | rope_dim ].
    """

    num_heads: int
    q_rank: int | None  # width of the latent vector of queries; None: queries are projected directly
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float  # multiplies q·k
    rope: RopeSpec | None
    norm_eps: float = 1e-6  # of the latents, independent of the model's
    indexer: Indexer | None = None  # selects the tokens that are attended to; None: the whole context
    shares_index_of: int | None = None  # an earlier layer whose indexer's selection this one uses
    gate: AttentionGate | None = None

    @property
    def window(self) -> None:
        return None

    @property
    def is_sparse(self) -> bool:
        return self.indexer is not None or self.shares_index_of is not None

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def out_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def gate_size(self) -> int:
        if self.gate is None:
            return 0
        return self.num_heads if self.gate.is_per_head else self.out_size

    @property
    def entry_size(self) -> int:
        return self.kv_rank + self.rope_dim

    def cache_parts(self) -> tuple[CachePart, ...]:
        latents = CachePart("paged", (CacheField("latents", (self.entry_size,)),))
        return (latents,) if self.indexer is None else (latents, self.indexer.cache_part())


@dataclass(frozen=True)
class WindowedMqa:
    """Attention of DeepSeek V4: one key for all heads, which is also the value, a window, and compressed entries
    before it.

    Queries come from a latent vector; each head is normed without a weight. The last dimensions of queries and keys are
    rotated, in neighbouring pairs, and rotated back in the result. Each group of heads is projected to `out_rank`
    values, and all groups together to the stream.
    """

    num_heads: int
    head_dim: int
    q_rank: int
    window: int
    scale: float  # multiplies q·k
    rope: RopeSpec
    out_groups: int
    out_rank: int
    norm_eps: float = 1e-6
    compression: Compression | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def out_size(self) -> int:
        return self.out_groups * self.out_rank

    @property
    def projected_parts(self) -> tuple[tuple[str, int], ...]:
        """The input projections of the mixer and their row counts, in stacking order."""
        parts = [("q_down", self.q_rank), ("kv", self.head_dim)]
        if self.compression is not None:
            size = self.compression.num_series * self.head_dim
            parts += [("entry_values", size), ("entry_gates", size)]
            indexer = self.compression.indexer
            if indexer is not None:
                size = self.compression.num_series * indexer.head_dim
                parts += [("index_values", size), ("index_gates", size), ("index_weights", indexer.num_heads)]
        return tuple(parts)

    def cache_parts(self) -> tuple[CachePart, ...]:
        own = CachePart("paged", (CacheField("entries", (self.head_dim,)),), self.window)
        return (own,) if self.compression is None else (own, *self.compression.cache_parts(self.head_dim))


MixerSpec = Gqa | ShortConv | Mla | Recurrent | WindowedMqa


# ── the rest of a layer, and the model ─────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class MlpSpec:
    """An MLP: down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    is_gated: bool = True
    sparsity: float = 0.0  # the share of gates that is cut off, if they are normally distributed (Gemma 3n)

    @property
    def sparsity_cutoff(self) -> float | None:
        """The threshold below which gates are cut off, in standard deviations above their mean."""
        return NormalDist().inv_cdf(self.sparsity) if self.sparsity else None


@dataclass(frozen=True)
class RoutingSpec:
    """How a token's experts are chosen from the router's logits, and how they are weighted.

    scores = score(logits) → (+ choice bias → best groups) → best experts → weights = scores of those
    → divided by their sum (+ epsilon) → * scale (* each expert's own)

    With `jitter` (SparseMixer, Phi-3.5-MoE) the weight of each choice is its softmax over the experts not chosen before
    it whose logits are near its own: less by at most 2 * jitter times the larger magnitude.
    """

    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    renormalize: bool = True  # divide the weights of the chosen experts by their sum
    epsilon: float = 0.0  # added to that sum
    has_router_bias: bool = False
    has_choice_bias: bool = False  # a value per expert that affects the choice, not the weight
    num_groups: int = 1  # neighbouring experts form groups, of which the best are kept
    kept_groups: int = 1
    group_score: Literal["best", "two_best"] = "two_best"  # a group's score: its best, or the sum of its two best
    scale: float = 1.0
    has_expert_scales: bool = False
    has_input_norm: bool = False  # the router reads its own RMSNorm of the stream, divided by sqrt(hidden)
    weights_input: bool = False  # the weight multiplies an expert's input, not its output
    is_bias_on_logits: bool = False  # the choice bias is added to the logits, and the highest sums are chosen
    jitter: float | None = None  # SparseMixer: a weight is the softmax over the experts left that are near the choice
    table_rows: int = 0  # of the table that gives the experts of each token id; 0: the experts with the best scores


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts: each token goes through `num_active` of `num_experts` MLPs, weighted by the router."""

    num_experts: int
    num_active: int
    expert: MlpSpec
    routing: RoutingSpec = RoutingSpec()
    shared: MlpSpec | None = None  # every token also goes through this one
    has_shared_gate: bool = False  # its weight is the sigmoid of a further router row, not 1
    latent_size: int | None = None  # experts work on a projection of the stream to this width, and back

    @property
    def is_shared_like_experts(self) -> bool:
        """Return whether the shared MLP equals some further experts that every token uses with weight 1."""
        shared, expert = self.shared, self.expert
        if shared is None or self.has_shared_gate or self.latent_size is not None or self.routing.weights_input:
            return False
        is_alike = replace(shared, intermediate_size=expert.intermediate_size) == expert
        return is_alike and expert.is_gated and shared.intermediate_size % expert.intermediate_size == 0


FeedSpec = MlpSpec | MoeSpec
NormPlace = Literal["before", "after", "both"]


@dataclass(frozen=True)
class LayerSpec:
    mixer: MixerSpec
    mlp: FeedSpec | None  # None: the layer has only a mixer
    norms: NormPlace = "before"  # of mixer and MLP; a norm after is applied before the residual is added
    is_parallel: bool = False  # the MLP reads the same stream as the mixer; both results are added
    has_parallel_norm: bool = False  # a parallel MLP has its own norm of that stream, instead of the mixer's
    residual_scale: float = 1.0  # multiplies what is added to the stream
    side_experts: MoeSpec | None = None  # in parallel with the MLP, with their own norms before and after (Gemma 4)
    input_width: int = 0  # of the layer's own embedding of the token, which is added through a gate (Gemma 4)
    has_scale: bool = False  # the stream is multiplied by a weight at the layer's end
    side_mixer: Recurrent | None = None  # in parallel with the mixer, on the same normed stream; both are added
    streams: Streams | None = None  # if the model has several residual streams; the same in all layers
    norms_feed_after: bool = False  # the result of MLP or experts is normed, even where `norms` has no norm after
    factors: tuple[tuple[str, float], ...] = ()  # matrix name → factor that it is multiplied by when it is read

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        return (self.mixer,) if self.side_mixer is None else (self.mixer, self.side_mixer)

    @property
    def has_pre_norms(self) -> bool:
        return self.norms != "after"

    @property
    def has_post_norms(self) -> bool:
        return self.norms != "before"

    @property
    def has_mlp_post_norm(self) -> bool:
        return self.has_post_norms or self.norms_feed_after


@dataclass(frozen=True)
class NormSpec:
    """The norm of the residual stream in all layers: RMSNorm, or LayerNorm (which subtracts the mean)."""

    kind: Literal["rms", "layer"] = "rms"
    has_bias: bool = False
    has_weight: bool = True


RMS_NORM = NormSpec()


@dataclass(frozen=True)
class ModelSpec:
    family: str  # "llama", "qwen3", ...
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_context: int
    tied_head: bool
    embedding_scale: float = 1.0  # rounded to the compute dtype before it multiplies
    logit_softcap: float | None = None
    logit_scale: float = 1.0  # multiplies the logits, before they are capped
    has_head_bias: bool = False
    norm: NormSpec = RMS_NORM
    num_positions: int = 0  # rows of a learned embedding of positions, which is added to the tokens'; 0: none
    has_embed_norm: bool = False  # the embeddings are normed before the first layer
    input_vocab_size: int | None = None  # rows of the layers' own embeddings, if fewer; further tokens use row 0
    # (mixer, MLP): each layer's numbers in a checkpoint that counts mixers and MLPs as separate layers.
    layer_numbers: tuple[tuple[int, int], ...] = ()
    num_extra_layers: int = 0  # further layers of the checkpoint: MTP heads (see `arch/mtp.py`)
    joins_states: bool = False  # its input is the token's embedding joined with another model's previous state
    text_part_of: str = ""  # `model_type` of the multimodal checkpoint that contains it, see `text_parts.py`
    dtype: str = "float32"  # what the checkpoint stores, or "quantised"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = ""
    extra: dict[str, str] = field(default_factory=dict, compare=False, hash=False)  # shown by `tokenmill show` only

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[Gqa, ...]:
        """The `Gqa` mixers, in the order of their layers."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Gqa))

    @property
    def recurrences(self) -> tuple[Recurrent, ...]:
        """The distinct recurrent mixers of its layers."""
        mixers = (mixer for layer in self.layers for mixer in layer.mixers)
        return tuple(dict.fromkeys(mixer for mixer in mixers if isinstance(mixer, Recurrent)))

    @property
    def experts(self) -> tuple[MoeSpec, ...]:
        """The distinct sets of experts of its layers."""
        feeds = (feed for layer in self.layers for feed in (layer.mlp, layer.side_experts))
        return tuple(dict.fromkeys(feed for feed in feeds if isinstance(feed, MoeSpec)))

    @property
    def activations(self) -> frozenset[Activation]:
        """The activations of its MLPs and experts."""
        dense = (layer.mlp for layer in self.layers if isinstance(layer.mlp, MlpSpec))
        routed = (mlp for moe in self.experts for mlp in (moe.expert, moe.shared) if mlp is not None)
        return frozenset(mlp.activation for mlp in (*dense, *routed))

    @property
    def input_width(self) -> int:
        """The width of the layers' own embeddings; 0: there are none."""
        return max(layer.input_width for layer in self.layers)

    @property
    def streams(self) -> Streams | None:
        return self.layers[0].streams

    @property
    def growths(self) -> tuple[QueryGrowth, ...]:
        """The distinct position scalings of queries in its layers."""
        return tuple(dict.fromkeys(mixer.query_growth for mixer in self.attentions if mixer.query_growth is not None))

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct rotations of its layers."""
        mixers = (layer.mixer for layer in self.layers)
        ropes = (mixer.rope for mixer in mixers if isinstance(mixer, Gqa | Mla | WindowedMqa))
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model under Tokenmill's name.

    embed.weight                                       [vocab, hidden]
    layers.{i}.attn_norm.weight                        [hidden], before the mixer of any kind
    layers.{i}.{q,k,v}.weight  (.bias)                 [heads * head_dim, hidden]
    layers.{i}.{q_norm,k_norm}.weight                  [head_dim], or [heads * head_dim]
    layers.{i}.attn_gate.weight                        [heads, hidden], or as q's
    layers.{i}.sinks                                   [heads]
    layers.{i}.o.weight  (.bias)                       [hidden, heads * head_dim]
    layers.{i}.q_down.weight, .q_norm.weight           [q_rank, hidden], [q_rank], of latent attention
    layers.{i}.q_up.weight, or .q.weight               [heads * head_dim, q_rank], or [heads * head_dim, hidden]
    layers.{i}.kv_down.weight, .kv_norm.weight         [kv_rank + rope_dim, hidden], [kv_rank]
    layers.{i}.kv_up.weight                            [heads * (nope_dim + value_dim), kv_rank], and attn_gate
    layers.{i}.index_q.weight                          [index heads * index_dim, q_rank], of an indexer
    layers.{i}.{index_k,index_weights}.weight          [index_dim, hidden], [index heads, hidden]
    layers.{i}.index_k_norm.weight  (.bias)            [index_dim]
    layers.{i}.kv.weight, .out_groups.weight           [head_dim, hidden], [groups * out_rank, heads * dim / groups]
    layers.{i}.{entry,index}_{values,gates}.weight     [1 or 2 * dim, hidden]
    layers.{i}.{entry,index}_bias, .{entry,index}_norm.weight   [rate, 1 or 2 * dim], [dim]
    layers.{i}.conv_in.weight  (.bias)                 [3 * hidden, hidden], rows of b, then c, then x
    layers.{i}.conv.weight  (.bias)                    [hidden, kernel], oldest tap first
    layers.{i}.conv_out.weight  (.bias)                [hidden, hidden]
    layers.{i}.ssm_{q,k}.weight, layers.{i}.ssm_{v,z}.weight   [keys, hidden], [values, hidden]  (.bias each)
    layers.{i}.ssm_{b,a}.weight                        [value heads, hidden], b of the delta rule only
    layers.{i}.ssm_conv_{q,k,v}.weight  (.bias)        [channels, kernel], oldest tap first
    layers.{i}.{ssm_a_log,ssm_dt_bias,ssm_d}           [value heads]; of Mamba-1 [values, states], [values], [values]
    layers.{i}.{ssm_inner,ssm_step}.weight             [rank + 2 states, values], [values, rank], of Mamba-1
    layers.{i}.ssm_{step,k,q}_norm.weight              [rank], [states], [states]
    layers.{i}.ssm_norm.weight                         [value_dim] or [values]
    layers.{i}.ssm_out.weight  (.bias)                 [hidden, values]
    layers.{i}.attn_post_norm.weight                   [hidden]
    layers.{i}.mlp_norm.weight                         [hidden]
    layers.{i}.{gate,up}.weight, layers.{i}.down.weight      [inter, hidden], [hidden, inter]
    layers.{i}.router.weight  (.bias)                  [experts, hidden]
    layers.{i}.{choice_bias,expert_scales}             [experts]
    layers.{i}.router_norm.weight                      [hidden]
    layers.{i}.expert_table                            [vocab, experts a token]
    layers.{i}.experts.{gate,up}.weight, .down.weight  [experts, inter, hidden], [experts, hidden, inter]
    layers.{i}.experts.{gate,up,down}.bias             [experts, inter], [experts, inter], [experts, hidden]
    layers.{i}.{latent_in,latent_out}.weight           [latent, hidden], [hidden, latent]
    layers.{i}.side.*                                  experts beside an MLP, with `side.norm`, `side.post_norm` and
                                                       `side.mlp_post_norm`, the MLP's own before the two are added
    layers.{i}.{input_gate,input_up}.weight            [width, hidden], [hidden, width]
    layers.{i}.input_norm.weight                       [hidden]
    layers.{i}.scale                                   [1]
    layers.{i}.{altup_router,altup_predict,altup_correct}.weight   [streams, hidden], [streams², streams], [streams]²
    layers.{i}.{attn,mlp}_connect.weight, _base, _scale   [(2 + streams) * streams, streams * hidden], [rows], [3]
    layers.{i}.altup_router_norm.weight, .altup_scale  [hidden] each
    layers.{i}.{branch_left,branch_right}.weight       [rank, hidden], [hidden, rank]
    layers.{i}.branch_norm.weight                      [hidden]
    layers.{i}.shared.{gate,up,down}.weight            as of an MLP
    layers.{i}.shared_gate.weight                      [1, hidden]
    layers.{i}.mlp_post_norm.weight                    [hidden]
    join.weight                                        [hidden, 2 * hidden], the embedding's columns first
    join_embed_norm.weight, join_state_norm.weight     [hidden] each
    final_norm.weight                                  [hidden]
    head.weight  (.bias)                               [vocab, hidden], absent when tied
    layer_inputs.embed.weight                          [vocab, layers * width]
    layer_inputs.project.weight                        [layers * width, hidden]
    layer_inputs.norm.weight                           [width]
    streams.{in,out}.{s}.weight                        [hidden, hidden], of all streams but the first
    streams_end.weight, _base, _scale                  [streams, streams * hidden], [streams], [1]

    Norm weights are always the plain multiplier (the reader adds Gemma's 1); LayerNorm may also have a `.bias`.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["embedding", "linear", "vector"]
