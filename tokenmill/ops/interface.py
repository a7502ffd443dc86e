"""The arithmetic a model is made of, as a table of plain functions that every backend fills in the same way.

Shapes: T tokens of a step, H hidden size, heads * D query size, kv_heads * D key size. A function returns new tensors
unless it says otherwise. Weights reach a function in the form that the same backend's `pack_*` made of them; nobody
else looks inside. What a step has in common for all layers of a KV group is worked out once, by `plan_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tokenmill.arch.spec import Activation, MoeSpec
from tokenmill.ops.batch import ForwardBatch, LayerCache, Mode
from tokenmill.ops.raw import RawTensor

Dense = Callable[[RawTensor], torch.Tensor]
"""Plain values of a raw tensor, in the compute dtype on the device."""


@dataclass(frozen=True)
class LinearWeight:
    """A matrix [rows, columns] packed by one backend; `packed` is that backend's own affair."""

    rows: int
    columns: int
    packed: Any
    bias: torch.Tensor | None = None  # [rows]


@dataclass(frozen=True)
class ExpertsWeight:
    """Gated MLPs of all experts of a layer, packed by one backend."""

    num_experts: int
    packed: Any


@dataclass(frozen=True)
class AttentionArgs:
    """What distinguishes one layer's attention from another's, beside its tensors."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # float32 [heads]


class Linear(Protocol):
    def __call__(self, x: torch.Tensor, weight: LinearWeight, mode: Mode = "eager") -> torch.Tensor:
        """x [T, columns] → [T, rows]; `mode` may change which kernel multiplies, never what is multiplied."""
        ...


class GatedLinear(Protocol):
    def __call__(
        self, x: torch.Tensor, weight: LinearWeight, activation: Activation, mode: Mode = "eager"
    ) -> torch.Tensor:
        """act_mul(linear(x))"""
        ...


class NormRopeWriteKv(Protocol):
    def __call__(
        self,
        qkv: torch.Tensor,
        cache: LayerCache,
        slots: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """qkv [T, (heads + 2 kv_heads) * D], norms of q and k [D] each, (cos, sin): q and k are normed and rotated,
        keys and values written into the cache; returns queries [T, heads, D]."""
        ...


class FusedDecodeAttention(Protocol):
    def __call__(
        self,
        qkv: torch.Tensor,
        cache: LayerCache,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
        plan: Any,
        args: AttentionArgs,
    ) -> torch.Tensor | None:
        """attention(place_qkv(qkv, ...), ...); None where nothing is won by it"""
        ...


class AddNormExperts(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        router: LinearWeight,
        packed: ExpertsWeight,
        spec: MoeSpec,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(experts(y, *route(linear(y, router))), x + residual) with y = rms_norm(x + residual); None where nothing is
        won by it"""
        ...


@dataclass(frozen=True)
class FusedNormOps:
    """A layer told as what happens to the residual stream, where norms and gates can do something for the products
    behind them. A stream has the residual stream as `total` [T, H], and its norm in the form that products like best;
    that, and what a gated product returns, are a backend's own affair.
    """

    can_multiply: Callable[[LinearWeight], bool]
    """Asked once of every matrix that the stream meets."""
    takes: Callable[[int], bool]
    """Asked once a step, with its number of tokens."""
    join: Callable[[torch.Tensor, Any, torch.Tensor, float], Any]
    """(x [T, H], stream or None, weight, eps) → the stream with x added, and its norm"""
    normed_linear: Callable[[Any, LinearWeight, Mode], torch.Tensor]
    """linear(norm)"""
    gated_linear: Callable[[Any, LinearWeight, Activation, Mode], Any]
    """act_mul(linear(norm))"""
    any_linear: Callable[[Any, LinearWeight, Mode], torch.Tensor]
    """linear(x), of a tensor or of a gated product"""


@dataclass(frozen=True)
class Ops:
    name: str
    # ── weights, once at load ──
    pack_linear: Callable[[Sequence[RawTensor], torch.Tensor | None, Dense], LinearWeight]
    """Matrices with the same input, stacked by rows in the order given; bias [all rows] or None."""
    pack_embedding: Callable[[RawTensor, Dense], LinearWeight]
    """A matrix that `embed` reads rows of; tied models multiply by it too."""
    pack_experts: Callable[[RawTensor, RawTensor, RawTensor, Dense], ExpertsWeight]
    """gate and up [experts, inter, H], down [experts, H, inter]."""
    # ── once a step and KV group ──
    plan_attention: Callable[[ForwardBatch, int, int | None], Any]
    """(batch, group, window) → what `attention` of this group's layers reads."""
    gather_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(tables [K, N, W], numbers [T]) → [K, T, W]: each token's row of every table"""
    # ── every layer ──
    embed: Callable[[torch.Tensor, LinearWeight], torch.Tensor]
    """ids [T] → [T, H]"""
    linear: Linear
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    """(x [..., N], weight [N], eps); computed in float32, returned in x's dtype."""
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    """(x, residual, weight, eps) → (rms_norm(x + residual), x + residual)"""
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(x [T, heads, D], cos, sin [T, rotary / 2] float32): pairs (x[i], x[i + rotary / 2]) turn, the rest stays."""
    write_kv: Callable[[LayerCache, torch.Tensor, torch.Tensor, torch.Tensor], None]
    """(cache, keys, values [T, kv_heads, D], slots [T]); writes into the cache."""
    attention: Callable[[torch.Tensor, LayerCache, Any, AttentionArgs], torch.Tensor]
    """queries [T, heads, D] over the paged context → [T, heads * D]"""
    act_mul: Callable[[torch.Tensor, Activation], torch.Tensor]
    """[T, 2 * inter], gate then up → act(gate) * up"""
    route: Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]
    """(router logits [T, experts], k, renormalize) → float32 weights [T, k], int64 expert ids [T, k]"""
    experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExpertsWeight, Activation], torch.Tensor]
    """(x [T, H], weights, ids, packed, activation) → weighted sum of the chosen experts [T, H]"""
    softcap: Callable[[torch.Tensor, float], torch.Tensor]
    """cap * tanh(x / cap)"""
    # ── several of the above in one pass, where a backend can ──
    norm_rope_write_kv: NormRopeWriteKv | None = None
    fused_decode_attention: FusedDecodeAttention | None = None
    gated_linear: GatedLinear | None = None
    add_linear: Callable[[torch.Tensor, LinearWeight, torch.Tensor], torch.Tensor | None] | None = None
    """(x, weight, residual) → residual + linear(x), written over the residual; None where nothing is won by it"""
    add_norm_experts: AddNormExperts | None = None
    argmax: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    """Logits of any precision [L, vocab] → see `BestLogits` of models"""
    stream: FusedNormOps | None = None
