"""A model as frozen data, no torch. Everything else derives from it: the tensors a checkpoint must hold
(`tensors.py`), its cost (`cost.py`), the layout of its cache, the shard plan, the planner's estimates and how it runs.

    ModelSpec = embedding → LayerSpec × L → final norm → head
    LayerSpec = norm → mixer → (norm) → + → norm → MLP or experts → (norm) → +      `norms` says where norms stand

A mixer is the part of a layer in which tokens look at each other: grouped-query attention (`Gqa`), latent attention
(`Mla`), attention over compressed entries (`WindowedMqa`), a short convolution (`ShortConv`) or a recurrence
(`Recurrent`, in `recurrent.py`). It alone knows what has to be kept of the tokens computed so far (`cache_fields`, or
`cache_parts` where it is of several kinds) and how far back a token looks (`window`); cache, memory sizing and planner
ask it and nothing else.

A variant that these fields cannot express is refused by the reader, by name; it is never approximated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Literal

from tokenmill.arch.cache_parts import CacheField, CachePart
from tokenmill.arch.compressed import Compression
from tokenmill.arch.indexer import Indexer
from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.streams import Streams

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai", "silu_to_10"]
"""What a gated MLP multiplies with: act(gate) * up. "relu2" is max(x, 0)²; "swiglu_oai", of gpt-oss, is
g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7) and u = up between -7 and 7; "silu_to_10", of DeepSeek V4, is
silu(min(gate, 10)) * u with u = up between -10 and 10."""


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
    """Phi-3: a factor per frequency, one set for short and one for long contexts; cos and sin times `mscale`."""

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
    """Each frequency divided by its own factor (how GGUF files carry Llama 3's scaling)."""

    factors: tuple[float, ...]  # rotary_dim / 2


RopeScaling = LinearScaling | Llama3Scaling | LongRopeScaling | YarnScaling | FrequencyFactors


@dataclass(frozen=True)
class RopeSpec:
    """Rotation of (x[i], x[i + rotary_dim/2]) pairs. Checkpoints with interleaved pairs are permuted at load."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    num_angles: int | None = None  # Gemma 4: only so many pairs turn, the others have an angle of zero; None: all


# ── mixers ─────────────────────────────────────────────────────────────────────────────────────────────

QkNorm = Literal["head", "all", "head_after_rope", "l2_after_rope"]
"""How queries and keys are normed: each head alone, all heads of a token together, each head behind the rotation, or
each head behind the rotation without a weight. RMSNorm in all cases."""


@dataclass(frozen=True)
class QueryGrowth:
    """Queries grow with their position p: times 1 + beta * log(1 + floor((p + first) / length))."""

    beta: float
    length: int
    first: int = 0


@dataclass(frozen=True)
class AttentionGate:
    """What attention puts out is multiplied by function(gate(x)): one number a head, or one each."""

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
    window: int | None = None  # a token sees itself and the window-1 tokens before it
    softcap: float | None = None  # scores become cap * tanh(score / cap)
    has_sinks: bool = False  # one learned logit per head joins the softmax
    is_chunked: bool = False  # the window begins anew at its multiples: a token sees those of its own chunk only
    value_dim: int | None = None  # where values have another width than keys
    value_scale: float = 1.0  # multiplies values
    value_is_key: bool = False  # the values are what is projected to keys, before it is normed and rotated
    has_value_norm: bool = False  # RMSNorm without a weight over each head of the values
    gate: AttentionGate | None = None
    query_growth: QueryGrowth | None = None
    shares_kv_of: int | None = None  # a layer before, whose keys and values this one reads; it has none of its own

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
        """True where nothing is done between projections and cache but norm each head and rotate it."""
        is_usual = self.qk_norm in (None, "head") and self.gate is None and self.query_growth is None
        has_usual_values = self.value_dim is None and self.value_scale == 1.0 and not self.has_value_norm
        return is_usual and has_usual_values and self.has_own_kv

    def cache_fields(self) -> tuple[CacheField, ...]:
        if not self.has_own_kv:
            return ()
        keys, values = (self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.value_dim or self.head_dim)
        return CacheField("keys", keys), CacheField("values", values)


@dataclass(frozen=True)
class ShortConv:
    """LFM2's gated short convolution: out(c * conv(b * x)) with b, c and x projected from the layer's input.

    The convolution is causal and depthwise: each channel is a weighted sum of its last `kernel` inputs b * x. What
    later tokens need is therefore the last kernel - 1 inputs, and each token keeps its own, like a key: a window of
    `kernel` tokens over paged blocks.
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
    """Multi-head latent attention (DeepSeek): keys and values of all heads are projections of one short vector a token.

    Only that vector is kept (normed), and beside it a key for all heads that is rotated; a head's query has a part for
    either:  [ nope_dim | rope_dim ]. The cache is one entry a token, [ kv_rank | rope_dim ].
    """

    num_heads: int
    q_rank: int | None  # width of the latent vector that queries are made of; None: they are projected directly
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float  # multiplies q·k
    rope: RopeSpec | None
    norm_eps: float = 1e-6  # of the latents, whatever the model's own is
    indexer: Indexer | None = None  # chooses the tokens that are looked at; None: all of the context are
    shares_index_of: int | None = None  # a layer before, whose indexer's choice holds for this one too

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
    def entry_size(self) -> int:
        return self.kv_rank + self.rope_dim

    def cache_parts(self) -> tuple[CachePart, ...]:
        latents = CachePart("paged", (CacheField("latents", (self.entry_size,)),))
        return (latents,) if self.indexer is None else (latents, self.indexer.cache_part())


@dataclass(frozen=True)
class WindowedMqa:
    """Attention of DeepSeek V4: one key for all heads, which is the value too, a window, and compressed entries behind.

    Queries come from a latent vector; each head's is normed without a weight. The last numbers of queries and keys are
    rotated, in neighbouring pairs, and turned back in the result. Heads are projected group by group to `out_rank`
    numbers each, and those together to the stream.
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
        """The matrices in front of the mixer and their rows, in the order in which they are stacked."""
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
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate"""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    is_gated: bool = True
    sparsity: float = 0.0  # the share of gates that is cut off, were they normally distributed (Gemma 3n)

    @property
    def sparsity_cutoff(self) -> float | None:
        """Standard deviations above the mean below which gates are cut off"""
        return NormalDist().inv_cdf(self.sparsity) if self.sparsity else None


@dataclass(frozen=True)
class RoutingSpec:
    """How a token's experts are chosen from the router's logits, and how they are weighted.

    scores = score(logits) → (+ choice bias → best groups) → best experts → weights = scores of those
    → divided by their sum (+ epsilon) → * scale (* each expert's own)
    """

    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    renormalize: bool = True  # weights of the chosen experts sum to one
    epsilon: float = 0.0  # added to that sum
    has_router_bias: bool = False  # of the router's product
    has_choice_bias: bool = False  # a number per expert that counts for the choice, not for the weight
    num_groups: int = 1  # neighbouring experts form groups, of which the best are kept
    kept_groups: int = 1
    group_score: Literal["best", "two_best"] = "two_best"  # what a group is judged by: its best, or the sum of two
    scale: float = 1.0
    has_expert_scales: bool = False
    has_input_norm: bool = False  # the router reads an RMSNorm of the stream of its own, over sqrt(hidden)
    weights_input: bool = False  # an expert's input is weighted, not its output
    table_rows: int = 0  # experts are looked up by token in a table of so many; 0: those with the best scores are taken


@dataclass(frozen=True)
class MoeSpec:
    """Each token goes through `num_active` of `num_experts` MLPs, weighted as the router says."""

    num_experts: int
    num_active: int
    expert: MlpSpec
    routing: RoutingSpec = RoutingSpec()
    shared: MlpSpec | None = None  # every token goes through this one too
    has_shared_gate: bool = False  # weighted by the sigmoid of one more row of the router, not by 1
    latent_size: int | None = None  # experts work on a projection of the stream to so many numbers, and back

    @property
    def is_shared_like_experts(self) -> bool:
        """True where the shared MLP is as some more experts would be that every token has with weight 1."""
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
    mlp: FeedSpec | None  # None: nothing is fed behind the mixer
    norms: NormPlace = "before"  # of mixer and MLP; what stands after is applied before the residual is added
    is_parallel: bool = False  # the MLP reads the same normed stream as the mixer; both results are added
    residual_scale: float = 1.0  # multiplies what is added to the stream
    side_experts: MoeSpec | None = None  # beside the MLP, with norms before and after of their own (Gemma 4)
    input_width: int = 0  # of the layer's own embedding of the token, which is added through a gate (Gemma 4)
    has_scale: bool = False  # the stream is multiplied by a number at the layer's end
    side_mixer: Recurrent | None = None  # beside the mixer: reads the same normed stream, both results are added
    streams: Streams | None = None  # around it, where there are several; the same in all layers of a model
    factors: tuple[tuple[str, float], ...] = ()  # what matrices, by name, are multiplied by when they are read

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        return (self.mixer,) if self.side_mixer is None else (self.mixer, self.side_mixer)

    @property
    def has_pre_norms(self) -> bool:
        return self.norms != "after"

    @property
    def has_post_norms(self) -> bool:
        return self.norms != "before"


@dataclass(frozen=True)
class NormSpec:
    """RMSNorm, or LayerNorm (which subtracts the mean), perhaps with a bias: of the stream, in every layer"""

    kind: Literal["rms", "layer"] = "rms"
    has_bias: bool = False


RMS_NORM = NormSpec()


@dataclass(frozen=True)
class ModelSpec:
    family: str  # "llama", "qwen3", ... for people; nothing branches on it
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
    input_vocab_size: int | None = None  # rows of the layers' own embeddings, where tokens beyond have the first's
    layer_numbers: tuple[tuple[int, int], ...] = ()  # where a checkpoint counts mixers and MLPs as layers: of each both
    num_extra_layers: int = 0  # of the checkpoint, beside these: heads that predict further tokens (see `arch/mtp.py`)
    joins_states: bool = False  # what enters is each token's embedding and another model's state before it, joined
    dtype: str = "float32"  # what the checkpoint stores, or "quantised"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = ""
    extra: dict[str, str] = field(default_factory=dict, compare=False, hash=False)  # facts for `show` only

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[Gqa, ...]:
        """The mixers that are attention, in the order of their layers."""
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
    def input_width(self) -> int:
        """The width of the embeddings that each layer has for itself; 0: there are none."""
        return max(layer.input_width for layer in self.layers)

    @property
    def streams(self) -> Streams | None:
        return self.layers[0].streams

    @property
    def growths(self) -> tuple[QueryGrowth, ...]:
        """The distinct ways in which queries of its layers grow."""
        return tuple(dict.fromkeys(mixer.query_growth for mixer in self.attentions if mixer.query_growth is not None))

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct rotations of its layers."""
        mixers = (layer.mixer for layer in self.layers)
        ropes = (mixer.rope for mixer in mixers if isinstance(mixer, Gqa | Mla | WindowedMqa))
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model in our own naming.

    embed.weight                                       [vocab, hidden]
    layers.{i}.attn_norm.weight                        [hidden], before the mixer, whichever it is
    layers.{i}.{q,k,v}.weight  (.bias)                 [heads * head_dim, hidden]
    layers.{i}.{q_norm,k_norm}.weight                  [head_dim], or all heads' numbers
    layers.{i}.attn_gate.weight                        [heads, hidden], or as q's
    layers.{i}.sinks                                   [heads]
    layers.{i}.o.weight  (.bias)                       [hidden, heads * head_dim]
    layers.{i}.q_down.weight, .q_norm.weight           [q_rank, hidden], [q_rank], of latent attention
    layers.{i}.q_up.weight, or .q.weight               [heads * head_dim, q_rank], or [heads * head_dim, hidden]
    layers.{i}.kv_down.weight, .kv_norm.weight         [kv_rank + rope_dim, hidden], [kv_rank]
    layers.{i}.kv_up.weight                            [heads * (nope_dim + value_dim), kv_rank]
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
    layers.{i}.{ssm_a_log,ssm_dt_bias,ssm_d}           [value heads]
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

    Norm weights are always the plain multiplier (a reader adds Gemma's 1); LayerNorm may have a `.bias` beside it.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["embedding", "linear", "vector"]
