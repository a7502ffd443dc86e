"""Recurrent mixers as data: gated DeltaNet, Mamba-2 and Mamba-1, whose memory is one matrix per head instead of keys
and values.

Per value head, with q and k of its key head, a state S [key_dim, value_dim] and a decay e^g in (0, 1]:

    S_t = e^{g_t} S_{t-1} + k_t u_tᵀ          o_t = q_t S_t

    delta (gated DeltaNet)   u_t = β_t (v_t - k_t e^{g_t} S_{t-1})     q and k have length one, q over √key_dim
    ssd   (Mamba-2)          u_t = dt_t v_t, and d · v_t is added to o_t

q, k and v come from a causal depthwise convolution followed by silu. Decay and step are computed from one value per
token and head: g = -e^{a_log} · dt with dt = softplus(a + dt_bias), or, with a lowest g,
g = lowest · sigmoid(e^{a_log} · (a + dt_bias)). The output is normed and gated by z.

With a decay per channel, e^g and G are vectors over the channels of a key, and channel c of the sum k_t·k_j is weighted
by e^{G_tc - G_jc}.

Within a chunk of 64 tokens the recurrence unrolls (G: sum of g since the chunk began, S the state there):

    u_t = β_t (v_t - e^{G_t} k_t S - Σ_{j<t} e^{G_t - G_j} (k_t·k_j) u_j)
    o_t = e^{G_t} q_t S + Σ_{j<=t} e^{G_t - G_j} (q_t·k_j) u_j
    S'  = e^{G_64} S + Σ_j e^{G_64 - G_j} k_j u_jᵀ

So each token stores a cell (its convolution input, k, u, G) for the rest of its chunk, and one state is written per
chunk.

Mamba-1 ("scan") has a decay per key and value channel, which does not unroll: with one head, a rate A per state n and
channel c, and a step dt per channel,

    S_t[n, c] = e^{A[n, c] dt_t[c]} S_{t-1}[n, c] + k_t[n] dt_t[c] v_t[c]       o_t = q_t S_t + d v_t

Only v is projected from the layer's input and convolved; a (before its own projection to dt), k and q are projected
from v after that. A cell stores dt instead of G, and a step goes through the chunk's cells again, from the state before
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenmill.arch.cache_parts import CacheField, CachePart

RecurrentRule = Literal["delta", "ssd", "scan"]


@dataclass(frozen=True)
class OutputNorm:
    """RMSNorm of a recurrent mixer's output, over `groups` equal parts of it."""

    groups: int
    is_shared: bool  # one weight for all groups
    gates_first: bool  # norm(o * silu(z)) instead of norm(o) * silu(z)
    gate: Literal["silu", "sigmoid"] = "silu"
    eps: float | None = None  # None: the model's


@dataclass(frozen=True)
class InnerProjection:
    """Mamba-1's projection of v, after its convolution, to a, k and q; a is projected to a step of each channel."""

    rank: int  # of a
    norm: Literal["weighted", "plain"] | None = None  # RMSNorm of each of the three, with or without a weight
    eps: float | None = None  # of those norms; None: the model's


@dataclass(frozen=True)
class Recurrent:
    rule: RecurrentRule
    key_heads: int  # Mamba-2 calls them groups
    value_heads: int  # a multiple of the key heads
    key_dim: int  # of a head; Mamba-2's state size
    value_dim: int
    kernel: int  # taps of the convolution
    norm: OutputNorm | None  # None: o * silu(z)
    conv_bias: bool = False
    bias: bool = False  # of the projections
    step_limits: tuple[float, float] | None = None  # dt is clamped to these
    gate_scale: float = 1.0  # multiplies z
    step_scale: float = 1.0  # multiplies the projected a
    part_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)  # multiply the projected q, k and v
    out_scale: float = 1.0  # multiplies the mixer's output
    is_tiled: bool = False  # value head h reads key head h % key_heads (GGUF's Qwen3.5), not h // (heads of each)
    has_channel_decays: bool = False  # one decay per channel of a key (Kimi), not per head
    strength_scale: float = 1.0  # multiplies β
    lowest_decay: float | None = None  # the lowest g, below zero; None: it has no limit
    inner: InnerProjection | None = None  # of the scan, which has one head; its key_dim is the number of states

    @property
    def gates_by_sigmoid(self) -> bool:
        return self.norm is not None and self.norm.gate == "sigmoid"

    @property
    def num_decays(self) -> int:
        if self.inner is not None:
            return self.values_size
        return self.value_heads * self.key_dim if self.has_channel_decays else self.value_heads

    @property
    def keys_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: q, then k, then v."""
        return sum(size for _, size in self.conv_parts)

    @property
    def projected_parts(self) -> tuple[tuple[str, int], ...]:
        """The input projections of the mixer and their row counts, in stacking order."""
        if self.inner is not None:
            return ("v", self.values_size), ("z", self.values_size)
        parts = (("q", self.keys_size), ("k", self.keys_size), ("v", self.values_size), ("z", self.values_size))
        step = (("b", self.value_heads), ("a", self.num_decays)) if self.rule == "delta" else (("a", self.num_decays),)
        return parts + step

    @property
    def conv_parts(self) -> tuple[tuple[str, int], ...]:
        """The convolution's weights and their channel counts."""
        keys = () if self.inner is not None else (("conv_q", self.keys_size), ("conv_k", self.keys_size))
        return *keys, ("conv_v", self.values_size)

    @property
    def projected_size(self) -> int:
        return sum(size for _, size in self.projected_parts)

    def cache_parts(self) -> tuple[CachePart, CachePart]:
        decays = (self.value_heads, self.key_dim) if self.has_channel_decays else (self.num_decays,)
        cells = (
            CacheField("conv_inputs", (self.conv_size,), "compute"),
            CacheField("cell_keys", (self.key_heads, self.key_dim), "compute"),
            CacheField("cell_updates", (self.value_heads, self.value_dim), "compute"),
            CacheField("cell_decays", decays, "float32"),
        )
        state = (
            CacheField("state", (self.value_heads, self.key_dim, self.value_dim), "float32"),
            CacheField("conv_tail", (self.kernel - 1, self.conv_size), "compute"),
        )
        return CachePart("cells", cells), CachePart("state", state)
