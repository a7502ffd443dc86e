"""A model computed by the native kernels: packs the weights that the regions of its layers name, then every step is one
call.

The cache is the shared paged storage, but within a block the native kernels keep keys 16 tokens to a row
([block, head, group of 16 tokens, head_dim, 16]) and int8 numbers in fours (csrc/kernels/attention_int8.h): whole
blocks may be copied and moved, single tokens may not be read by other backends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.regions import (
    Experts,
    Feed,
    LayerRegions,
    Matrices,
    NormProject,
    ProjectAdd,
    SideBySide,
    layer_regions,
)
from tokenmill.arch.spec import Gqa, Mla, MlpSpec, ModelSpec, RopeSpec, ShortConv
from tokenmill.ops.batch import DrawingRows, DrawParams, ForwardBatch, LayerCache, Mode
from tokenmill.ops.cpu.availability import native
from tokenmill.ops.cpu.packing import Dense, PackedMatrices, Packer, Quantization, Weights

KEPT_LINES = 64  # of logits, whose memory is kept from step to step
OUTLIER_THRESHOLDS = {"8": math.inf, "mixed": 2.5, "16": 0.0}
"""Blocks of 32 activations keep 16 bits where their largest number is more than so many times the row's mean; where
some do, all do in the last layer and the head."""


class Storage(Protocol):
    def group(self, layer: int) -> int: ...

    def layer(self, number: int) -> LayerCache: ...

    def fields(self, layer: int) -> dict[str, torch.Tensor]: ...


RopeTables = Mapping[RopeSpec, tuple[torch.Tensor, torch.Tensor]]
"""cos and sin per rope, float32 [max_context, rotary_dim / 2]"""


class NativeDecoder:
    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        ropes: RopeTables,
        dense: Dense,
        threads: int,
        quantization: Quantization = "none",
        instruction_set: str = "",
        activation_bits: str = "8",
        kept: PackedMatrices | None = None,
    ) -> None:
        """`dense` expands tensors that have no packed form; `instruction_set` "" takes the best; `activation_bits` (a
        name of OUTLIER_THRESHOLDS) is how finely the inputs of quantised matrices are rounded; `kept` has matrices that
        were packed before, or takes those packed now."""
        self.spec = spec
        cap = spec.logit_softcap or 0.0
        self._decoder = native().Decoder(
            hidden=spec.hidden_size,
            vocab=spec.vocab_size,
            eps=spec.norm_eps,
            embedding_scale=spec.embedding_scale,
            logit_softcap=cap,
            threads=threads,
            outlier_threshold=OUTLIER_THRESHOLDS[activation_bits],
            isa=instruction_set,
        )
        self._parts = _Parts(weights, dense, Packer(weights, dense, quantization, threads, kept))
        self._cache_owner: object = None
        self._logits = torch.empty(0, spec.vocab_size)
        rope_numbers = {rope: self._decoder.add_rope(cos, sin) for rope, (cos, sin) in ropes.items()}
        for number, layer in enumerate(spec.layers):
            self._add_layer(layer_regions(layer, number), rope_numbers)
        self._add_ends()

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes read from memory in a step of one token."""
        return int(self._decoder.weight_bytes)

    def forward(self, batch: ForwardBatch, storage: Storage) -> torch.Tensor:
        """Feeds the batch's tokens, writes their keys and values; normed hidden states [L, H] of `logit_rows`."""
        self._bind(storage)
        hidden = torch.empty(batch.logit_rows.shape[0], self.spec.hidden_size)
        self._decoder.forward(
            batch.token_ids,
            batch.positions,
            batch.query_starts,
            batch.context_lens,
            [group.block_tables for group in batch.groups],
            [group.slots for group in batch.groups],
            batch.logit_rows,
            hidden,
        )
        return hidden

    def logits(self, hidden: torch.Tensor, mode: Mode = "eager") -> torch.Tensor:
        """[L, H] → float32 [L, vocab]"""
        out = torch.empty(hidden.shape[0], self.spec.vocab_size)
        self._decoder.logits(hidden.contiguous(), out)
        return out

    def best_logits(self, hidden: torch.Tensor, mode: Mode = "eager") -> tuple[torch.Tensor, torch.Tensor]:
        """The best tokens and their logits, without writing all of them down."""
        places, values = torch.empty(hidden.shape[0], dtype=torch.int64), torch.empty(hidden.shape[0])
        self._decoder.best_logits(hidden.contiguous(), places, values)
        return places, values

    @property
    def direct(self) -> NativeDecoder:
        return self

    @property
    def kernel_s(self) -> float:
        """Seconds spent in kernels so far, by their own clock."""
        return float(self._decoder.kernel_s)

    def greedy_next(self, rows: DrawingRows, storage: Storage) -> list[int]:
        self._bind(storage)
        tokens: list[int] = self._decoder.best_next(*rows)
        return tokens

    def draw_next(self, rows: DrawingRows, params: DrawParams, storage: Storage) -> list[int]:
        self._bind(storage)
        tokens: list[int] = self._decoder.draw_next(*rows, *params)
        return tokens

    def logits_next(self, rows: DrawingRows, storage: Storage) -> torch.Tensor:
        self._bind(storage)
        out = self._room_for(sum(rows.num_wanted))
        self._decoder.logits_next(*rows, out)
        return out

    def _room_for(self, num_lines: int) -> torch.Tensor:
        """[num_lines, vocab]; fresh pages for megabytes of logits would cost more than some of the arithmetic."""
        if num_lines > KEPT_LINES:
            return torch.empty(num_lines, self.spec.vocab_size)
        if num_lines > len(self._logits):
            self._logits = torch.empty(num_lines, self.spec.vocab_size)
        return self._logits[:num_lines]

    def _bind(self, storage: Storage) -> None:
        """Tells the kernels where the cache lies; once, unless it moves."""
        if self._cache_owner is storage:
            return
        for number in range(self.spec.num_layers):
            group, fields = storage.group(number), storage.fields(number)
            if "inputs" in fields:
                self._decoder.bind_conv_cache(number, group, fields["inputs"])
                continue
            cache = storage.layer(number)
            self._decoder.bind_cache(number, group, cache.keys, cache.values, cache.key_scales, cache.value_scales)
        self._cache_owner = storage

    def _add_ends(self) -> None:
        embedding = self._parts.linear("embed")
        self._decoder.set_embedding(embedding)
        self._decoder.set_head(embedding if self.spec.tied_head else self._parts.linear("head"))
        self._decoder.set_final_norm(self._parts.norm("final_norm"))

    def _add_layer(self, regions: LayerRegions, ropes: Mapping[RopeSpec, int]) -> None:
        """The regions of a layer as the arguments of one call."""
        project, attend, add, feed = regions.project, regions.attend, regions.add, regions.feed
        common = {
            "attn_norm": self._parts.norm(project.norm),
            "attn_post_norm": self._parts.norm(add.post_norm),
            **self._feed(feed),
        }
        match attend.mixer:
            case Gqa() as mixer:
                self._decoder.add_layer(**common, **self._attention(project, mixer, attend.name, add, ropes))
            case ShortConv() as mixer:
                self._decoder.add_conv_layer(**common, **self._convolution(project, mixer, attend.name, add))
            case Mla() | Recurrent():
                raise AssertionError("refused by `unsupported_reason`")

    def _feed(self, feed: Feed) -> dict[str, Any]:
        assert not isinstance(feed, SideBySide), "refused by `unsupported_reason`"
        norms = {"mlp_norm": self._parts.norm(feed.norm), "mlp_post_norm": self._parts.norm(feed.post_norm)}
        if isinstance(feed, Experts):
            return {**norms, "mlp": None, "moe": self._parts.moe(feed)}
        return {**norms, "mlp": self._parts.mlp(feed.gate_up, feed.down, feed.spec), "moe": None}

    def _attention(
        self, project: NormProject, attention: Gqa, name: str, add: ProjectAdd, ropes: Mapping[RopeSpec, int]
    ) -> dict[str, Any]:
        q, k, v = self._parts.linears(project.projection)
        (o,) = self._parts.linears(add.projection)
        return {
            "q": q,
            "k": k,
            "v": v,
            "o": o,
            "q_norm": self._parts.norm(f"{name}.q_norm" if attention.qk_norm else None),
            "k_norm": self._parts.norm(f"{name}.k_norm" if attention.qk_norm else None),
            "sinks": self._parts.vector(f"{name}.sinks") if attention.has_sinks else None,
            "heads": attention.num_heads,
            "kv_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            "scale": attention.scale,
            "window": attention.window or 0,
            "softcap": attention.softcap or 0.0,
            "rope": -1 if attention.rope is None else ropes[attention.rope],
        }

    def _convolution(self, project: NormProject, conv: ShortConv, name: str, add: ProjectAdd) -> dict[str, Any]:
        (conv_in,), (conv_out,) = self._parts.linears(project.projection), self._parts.linears(add.projection)
        return {
            "conv_in": conv_in,
            "conv_out": conv_out,
            "weight": self._parts.vector(f"{name}.conv.weight").t().contiguous(),  # [kernel, hidden]
            "bias": self._parts.vector(f"{name}.conv.bias") if conv.bias else None,
        }


class _Parts:
    """Weights by name, in the forms the native decoder is built from."""

    def __init__(self, weights: Weights, dense: Dense, packer: Packer) -> None:
        self.weights, self.dense, self.packer = weights, dense, packer

    def vector(self, name: str) -> torch.Tensor:
        return self.dense(self.weights.get(name)).float().contiguous()

    def norm(self, name: str | None) -> torch.Tensor | None:
        return None if name is None else self.vector(f"{name}.weight")

    def linear(self, name: str, has_bias: bool = False) -> Any:
        matrix = self.packer.matrix(f"{name}.weight")
        return native().Linear(matrix, self.vector(f"{name}.bias") if has_bias else None)

    def linears(self, matrices: Matrices) -> list[Any]:
        return [self.linear(name, matrices.has_bias) for name in matrices.names]

    def mlp(self, gate_up: Matrices, down: Matrices, spec: MlpSpec) -> Any:
        return native().Mlp(*self.linears(gate_up), *self.linears(down), spec.activation)

    def moe(self, region: Experts) -> Any:
        spec = region.spec
        packed = [self.packer.experts(f"{name}.weight") for name in (region.gates, region.ups, region.downs) if name]
        linears = ([native().Linear(matrix, None) for matrix in matrices] for matrices in packed)
        experts = [native().Mlp(*parts, spec.expert.activation) for parts in zip(*linears, strict=True)]
        (router,) = self.linears(region.router)
        shared = None
        if region.shared is not None and spec.shared is not None:
            shared = self.mlp(*region.shared, spec.shared)
        return native().Moe(router, experts, spec.num_active, spec.routing.renormalize, shared)
