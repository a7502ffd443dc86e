"""A model as frozen data, no torch. Everything else derives from it: the tensors a checkpoint must hold
(`tensors.py`), its cost (`cost.py`), the layout of its cache, the shard plan, the planner's estimates and how it runs.

    ModelSpec = embedding → LayerSpec × L → final norm → head
    LayerSpec = norm → mixer → (post norm) → + → norm → MLP or experts → (post norm) → +

A mixer is the part of a layer in which tokens look at each other: grouped-query attention (`Gqa`) or a short
convolution (`ShortConv`). It alone knows what has to be kept of the tokens computed so far (`cache_fields`) and how far
back a token looks (`window`); cache, memory sizing and planner ask it and nothing else.

A variant that these fields cannot express is refused by the reader, by name; it is never approximated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]


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


# ── mixers ─────────────────────────────────────────────────────────────────────────────────────────────

CacheDtype = Literal["cache", "compute"]


@dataclass(frozen=True)
class CacheField:
    """One tensor that a layer keeps of its tokens.

    `shape` is what one token leaves behind; its last axis is a vector, which has one scale where a value takes a byte.
    `dtype` "cache" is the one that the engine is told to keep keys and values in; "compute" is that of activations, for
    values that must come back exactly as they were computed. A layout replaces both by real types.
    """

    name: str
    shape: tuple[int, ...]
    dtype: CacheDtype | str = "cache"


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
    qk_norm: bool = False  # RMSNorm over head_dim on q and k, before rope
    window: int | None = None  # a token sees itself and the window-1 tokens before it
    softcap: float | None = None  # scores become cap * tanh(score / cap)
    has_sinks: bool = False  # one learned logit per head joins the softmax

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def cache_fields(self) -> tuple[CacheField, ...]:
        shape = (self.num_kv_heads, self.head_dim)
        return CacheField("keys", shape), CacheField("values", shape)


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


MixerSpec = Gqa | ShortConv


# ── the rest of a layer, and the model ─────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class MlpSpec:
    """down(act(gate(x)) * up(x))"""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True)
class MoeSpec:
    """Each token goes through `num_active` of `num_experts` gated MLPs, weighted by a softmax over the router."""

    num_experts: int
    num_active: int
    expert: MlpSpec
    renormalize: bool  # weights of the chosen experts sum to one
    shared: MlpSpec | None = None  # every token goes through this one too
    has_shared_gate: bool = False  # weighted by the sigmoid of one more row of the router, not by 1


@dataclass(frozen=True)
class LayerSpec:
    mixer: MixerSpec
    mlp: MlpSpec | MoeSpec
    post_norms: bool = False  # Gemma: norms after mixer and MLP too, before the residual is added


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
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct rotations of its layers."""
        return tuple(dict.fromkeys(mixer.rope for mixer in self.attentions if mixer.rope is not None))


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model in our own naming.

    embed.weight                                       [vocab, hidden]
    layers.{i}.attn_norm.weight                        [hidden], before the mixer, whichever it is
    layers.{i}.{q,k,v}.weight  (.bias)                 [heads * head_dim, hidden]
    layers.{i}.{q_norm,k_norm}.weight                  [head_dim]
    layers.{i}.sinks                                   [heads]
    layers.{i}.o.weight  (.bias)                       [hidden, heads * head_dim]
    layers.{i}.conv_in.weight  (.bias)                 [3 * hidden, hidden], rows of b, then c, then x
    layers.{i}.conv.weight  (.bias)                    [hidden, kernel], oldest tap first
    layers.{i}.conv_out.weight  (.bias)                [hidden, hidden]
    layers.{i}.attn_post_norm.weight                   [hidden]
    layers.{i}.mlp_norm.weight                         [hidden]
    layers.{i}.{gate,up}.weight, layers.{i}.down.weight      [inter, hidden], [hidden, inter]
    layers.{i}.router.weight                           [experts, hidden]
    layers.{i}.experts.{gate,up}.weight, .down.weight  [experts, inter, hidden], [experts, hidden, inter]
    layers.{i}.shared.{gate,up,down}.weight            as of an MLP
    layers.{i}.shared_gate.weight                      [1, hidden]
    layers.{i}.mlp_post_norm.weight                    [hidden]
    final_norm.weight                                  [hidden]
    head.weight                                        [vocab, hidden], absent when tied

    Norm weights are always the plain multiplier (a reader adds Gemma's 1).
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["embedding", "linear", "vector"]
