"""A model computed by the native kernels: packs the weights that the regions of its layers name, then every step is one
call.

The cache is the shared paged storage, but within a block the native kernels keep keys 16 tokens to a row
([block, head, group of 16 tokens, head_dim, 16]) and int8 numbers in fours (csrc/kernels/attention_int8.h): whole
blocks may be copied and moved, single tokens may not be read by other backends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from tokenmill.arch.indexer import INDEX_KEYS, KEY_NORM_EPS, Indexer
from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.regions import (
    AddInput,
    Experts,
    Feed,
    LayerRegions,
    Matrices,
    NormProject,
    ProjectAdd,
    SideBySide,
    layer_regions,
)
from tokenmill.arch.spec import Gqa, MixerSpec, Mla, MlpSpec, ModelSpec, QueryGrowth, RopeSpec, ShortConv, WindowedMqa
from tokenmill.arch.streams import AltUp, HyperConnections, Streams
from tokenmill.ops.batch import DrawingRows, DrawParams, ForwardBatch, LayerCache, Mode
from tokenmill.ops.cpu.availability import native
from tokenmill.ops.cpu.packing import Dense, PackedMatrices, Packer, Quantization, Weights, kind_of, pack_as
from tokenmill.ops.low_rank import LowRank
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.recurrent import recurrent_weights

KEPT_LINES = 64  # of logits, whose memory is kept from step to step
OUTLIER_THRESHOLDS = {"8": math.inf, "mixed": 2.5, "16": 0.0}
"""Blocks of 32 activations keep 16 bits where their largest number is more than so many times the row's mean; where
some do, all do in the last layer and the head."""


class Storage(Protocol):
    def group(self, layer: int, field: str | None = None) -> int: ...

    def layer(self, number: int) -> LayerCache: ...

    def fields(self, layer: int) -> dict[str, torch.Tensor]: ...


class RankShard(Protocol):
    """What one of several ranks has of a model; names are those of matrices."""

    @property
    def rank(self) -> int: ...

    def borders(self, name: str) -> list[int]:
        """Where each rank's rows of a matrix begin, and where they end; empty: this rank multiplies by itself."""
        ...

    def input_borders(self, name: str) -> list[int]:
        """The same of the columns of a matrix's input, where ranks have parts of it."""
        ...

    def experts(self, name: str) -> tuple[tuple[int, ...], ...] | None:
        """The ranks that have each expert of a matrix as a whole; None: ranks have rows of all of them."""
        ...

    def own_rows(self, name: str) -> tuple[int, int] | None:
        """The rows of a matrix that this rank has; None: all of them."""
        ...

    def whole_rows(self, names: Sequence[str]) -> int:
        """The rows of some matrices on all ranks together; 0 where this rank has all of them."""
        ...


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
        num_adapter_slots: int = 0,
        shard: RankShard | None = None,
        window: Any = None,
        layers: range | None = None,
        ends: NativeDecoder | None = None,
    ) -> None:
        """`dense` expands tensors that have no packed form; `instruction_set` "" takes the best; `activation_bits` (a
        name of OUTLIER_THRESHOLDS) is how finely the inputs of quantised matrices are rounded; `kept` has matrices that
        were packed before, or takes those packed now; `num_adapter_slots`: adapters that can be used at a time.
        `shard` and `window`: where this is one of several ranks, whose own `spec` and `weights` are; what it has of
        them, and the native module's window over which they exchange. `layers`: those of the model that are computed
        here, by default all; what stands before and behind all layers belongs to the first ones. `ends`: a decoder
        whose embedding and head this one uses too."""
        self.spec = spec
        self._layers = range(spec.num_layers) if layers is None else layers
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
        packer = Packer(weights, dense, quantization, threads, kept)
        self._parts = _Parts(weights, dense, packer, spec.norm.has_bias, shard)
        if window is not None:
            self._decoder.set_window(window)
        self._decoder.set_norms(spec.norm.kind == "layer")
        self._decoder.set_stage(self.is_last_stage)
        if spec.streams is not None:
            self._set_streams(spec.streams)
        if spec.input_width:
            parts, name = self._parts, "layer_inputs"
            table, project = parts.table(f"{name}.embed"), parts.linear(f"{name}.project")
            self._decoder.set_layer_inputs(table, project, parts.vector(f"{name}.norm.weight"))
        self._cache_owner: object = None
        self._logits = torch.empty(0, spec.vocab_size)
        self._routers: dict[int, str] = {}  # by native layer
        rope_numbers = {rope: self._decoder.add_rope(cos, sin) for rope, (cos, sin) in ropes.items()}
        for number in self._layers:
            self._add_layer(number, layer_regions(spec.layers[number], number), rope_numbers)
        self._add_ends(ends)
        self.adapter_slots = NativeAdapterSlots(self._decoder, self._parts, num_adapter_slots, spec)

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes read from memory in a step of one token."""
        return int(self._decoder.weight_bytes)

    @property
    def is_last_stage(self) -> bool:
        return self._layers.stop == self.spec.num_layers

    def forward(self, batch: ForwardBatch, storage: Storage, entering: torch.Tensor | None = None) -> torch.Tensor:
        """Feeds the batch's tokens, writes their keys and values; normed hidden states [L, H] of `logit_rows`, or the
        stream [T, H] where other stages follow. `entering` [T, H]: the stream as the stage before has left it."""
        self._bind(storage)
        num_rows = len(batch.logit_rows) if self.is_last_stage else len(batch.token_ids)
        hidden = torch.empty(num_rows, self.spec.hidden_size)
        self._decoder.forward(
            batch.token_ids,
            batch.positions,
            batch.query_starts,
            batch.context_lens,
            [group.block_tables for group in batch.groups],
            [group.slots for group in batch.groups],
            batch.logit_rows,
            hidden,
            batch.adapters,
            entering,
            batch.owners,
        )
        return hidden

    def logits(self, hidden: torch.Tensor, mode: Mode = "eager", adapters: torch.Tensor | None = None) -> torch.Tensor:
        """[L, H] → float32 [L, vocab]"""
        out = torch.empty(hidden.shape[0], self.spec.vocab_size)
        self._decoder.logits(hidden.contiguous(), out, adapters)
        return out

    def best_logits(
        self, hidden: torch.Tensor, mode: Mode = "eager", adapters: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best tokens and their logits, without writing all of them down."""
        places, values = torch.empty(hidden.shape[0], dtype=torch.int64), torch.empty(hidden.shape[0])
        self._decoder.best_logits(hidden.contiguous(), places, values, adapters)
        return places, values

    @property
    def direct(self) -> NativeDecoder | None:
        return self if len(self._layers) == self.spec.num_layers else None

    @property
    def expert_rows(self) -> tuple[int, int]:
        """Where ranks have whole experts: rows of experts that this one has computed, and that others have sent it."""
        return int(self._decoder.computed_rows), int(self._decoder.received_rows)

    def expert_counts(self) -> dict[str, list[int]]:
        """Tokens that have chosen each expert so far, by the name of the layer's router."""
        counts = self._decoder.expert_counts
        return {name: list(counts[layer]) for layer, name in self._routers.items()}

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
        for number, (layer, mixer) in enumerate(self._native_layers()):
            kept = layer
            if isinstance(mixer, Gqa) and mixer.shares_kv_of is not None:
                kept = mixer.shares_kv_of
            fields = storage.fields(kept)
            if isinstance(mixer, Recurrent):
                groups = storage.group(layer, "cell_keys"), storage.group(layer, "state")
                names = ("conv_inputs", "cell_keys", "cell_updates", "cell_decays", "state", "conv_tail")
                self._decoder.bind_recurrent_cache(number, *groups, *(fields[name] for name in names))
                continue
            group = storage.group(kept)
            if isinstance(mixer, WindowedMqa):
                self._bind_compressed(number, layer, mixer, storage)
                continue
            if "latents" in fields:
                self._decoder.bind_entry_cache(number, group, fields["latents"])
                if INDEX_KEYS in fields:
                    self._decoder.bind_index_cache(number, storage.group(layer, INDEX_KEYS), fields[INDEX_KEYS])
                continue
            if "inputs" in fields:
                self._decoder.bind_conv_cache(number, group, fields["inputs"])
                continue
            cache = storage.layer(kept)
            self._decoder.bind_cache(number, group, cache.keys, cache.values, cache.key_scales, cache.value_scales)
        self._cache_owner = storage

    def _bind_compressed(self, number: int, layer: int, mixer: WindowedMqa, storage: Storage) -> None:
        fields = storage.fields(layer)
        self._decoder.bind_entry_cache(number, storage.group(layer, "entries"), fields["entries"])
        if mixer.compression is None:
            return
        for prefix in ("", "index_") if mixer.compression.indexer else ("",):
            inputs, made = f"{prefix}inputs_of_entries", f"{prefix}compressed"
            places = storage.group(layer, inputs), fields[inputs], storage.group(layer, made), fields[made]
            self._decoder.bind_compressed_cache(number, prefix == "index_", *places)

    def _native_layers(self) -> Iterator[tuple[int, MixerSpec]]:
        """The layer and mixer of each layer of the native decoder, which has a second mixer as a layer before."""
        for number in self._layers:
            yield from ((number, mixer) for mixer in reversed(self.spec.layers[number].mixers))

    def _add_ends(self, others: NativeDecoder | None) -> None:
        spec, parts = self.spec, self._parts
        if self.is_last_stage:
            self._decoder.set_final_norm(parts.norm("final_norm"))
        if self._layers.start > 0:
            return
        self._ends: tuple[Any, Any] = self._load_ends() if others is None else others._ends
        embedding, head = self._ends
        self._decoder.set_embedding(embedding)
        self._decoder.set_head(head)
        self._decoder.set_logit_scale(spec.logit_scale)

    def _load_ends(self) -> tuple[Any, Any]:
        """Embedding and head."""
        spec, parts = self.spec, self._parts
        matrix = parts.packer.matrix("embed.weight")
        embedding = parts.over(matrix, "embed", is_embedding=True)
        return embedding, parts.over(matrix, "head") if spec.tied_head else parts.linear("head", spec.has_head_bias)

    def _set_streams(self, streams: Streams) -> None:
        match streams:
            case AltUp():
                sides = ("in", "out")
                others = range(streams.num_streams - 1)
                matrices = ([self._parts.linear(f"streams.{side}.{number}") for number in others] for side in sides)
                self._decoder.set_altup_streams(*matrices)
            case HyperConnections():
                end = self._parts.connection("streams_end")
                self._decoder.set_connected_streams(end, streams.num_rounds, streams.eps, streams.norm_eps)

    def _streams_of_layer(self, number: int) -> dict[str, Any]:
        """What a layer does to several streams, as arguments of its frame"""
        parts, name = self._parts, f"layers.{number}"
        match self.spec.streams:
            case AltUp() as altup:
                return {"altup": parts.altup(name, altup)}
            case HyperConnections():
                around = (parts.connection(f"{name}.{part}_connect") for part in ("attn", "mlp"))
                return {"connections": native().Connections(*around)}
            case None:
                return {}

    def _add_layer(self, number: int, regions: LayerRegions, ropes: Mapping[RopeSpec, int]) -> None:
        """The regions of a layer as the arguments of one call; a second mixer is a layer whose result is held back."""
        project, attend, add, feed = regions.project, regions.attend, regions.add, regions.feed
        if regions.side is not None:
            side, side_add = regions.side
            assert isinstance(side.mixer, Recurrent), "see `LayerSpec.side_mixer`"
            project, side_project = _split(project, len(side.mixer.projected_parts))
            norm = self._parts.norm(project.norm)
            held = native().LayerFrame(self.spec.hidden_size, attn_norm=norm, is_held=True)
            self._decoder.add_recurrent_layer(held, **self._recurrent(side_project, side.mixer, side.name, side_add))
        frame = native().LayerFrame(
            self.spec.hidden_size,
            attn_norm=self._parts.norm(project.norm),
            attn_post_norm=self._parts.norm(add.post_norm),
            is_parallel=regions.is_parallel,
            residual_scale=add.scale,
            input=self._layer_input(regions.add_input),
            stream_scale=1.0 if regions.scale is None else float(self._parts.vector(regions.scale)),
            **self._streams_of_layer(number),
            **({} if feed is None else self._feed(feed)),
        )
        if (experts := feed.experts if isinstance(feed, SideBySide) else feed) and isinstance(experts, Experts):
            self._routers[len(self._decoder.expert_counts)] = experts.router.names[0]
        match attend.mixer:
            case Gqa() as mixer:
                self._decoder.add_layer(frame, **self._attention(project, mixer, attend.name, add, ropes))
            case ShortConv() as mixer:
                self._decoder.add_conv_layer(frame, **self._convolution(project, mixer, attend.name, add))
            case Recurrent() as mixer:
                self._decoder.add_recurrent_layer(frame, **self._recurrent(project, mixer, attend.name, add))
            case Mla() as mixer:
                self._decoder.add_latent_layer(frame, **self._latent_attention(project, mixer, attend.name, add, ropes))
            case WindowedMqa() as mixer:
                self._decoder.add_compressed_layer(frame, **self._compressed(project, mixer, attend.name, add, ropes))

    def _feed(self, feed: Feed) -> dict[str, Any]:
        parts = self._parts
        if isinstance(feed, SideBySide):
            mlp, experts = feed.mlp, feed.experts
            return {
                "mlp_norm": parts.norm(mlp.norm),
                "mlp_post_norm": parts.norm(feed.post_norm),
                "mlp": parts.mlp(mlp.gate_up, mlp.down, mlp.spec),
                "moe": parts.moe(experts),
                "side_norm": parts.norm(experts.norm),
                "side_post_norm": parts.norm(experts.post_norm),
                "side_mlp_post_norm": parts.norm(mlp.post_norm),
            }
        norms = {"mlp_norm": parts.norm(feed.norm), "mlp_post_norm": parts.norm(feed.post_norm)}
        if isinstance(feed, Experts):
            return {**norms, "moe": parts.moe(feed)}
        return {**norms, "mlp": parts.mlp(feed.gate_up, feed.down, feed.spec)}

    def _layer_input(self, region: AddInput | None) -> Any:
        if region is None:
            return None
        (gate,), (up,) = self._parts.linears(region.gate), self._parts.linears(region.up)
        return native().LayerInput(gate, up, self._parts.norm(region.norm), region.activation)

    def _attention(
        self, project: NormProject, attention: Gqa, name: str, add: ProjectAdd, ropes: Mapping[RopeSpec, int]
    ) -> dict[str, Any]:
        q, *others = self._parts.linears(project.projection)
        k, v = others[:2] if attention.has_own_kv else (None, None)
        (o,) = self._parts.linears(add.projection)
        gate, growth = attention.gate, attention.query_growth
        return {
            "q": q,
            "k": k,
            "v": v,
            "o": o,
            "gate": None if gate is None else others[-1],
            "is_gate_per_head": gate is not None and gate.is_per_head,
            "is_softplus_gate": gate is not None and gate.function == "softplus",
            "head_norm": attention.qk_norm or "",
            **self._head_norms(attention, name),
            "has_value_norm": attention.has_value_norm,
            "sinks": self._parts.vector(f"{name}.sinks") if attention.has_sinks else None,
            "heads": attention.num_heads,
            "kv_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            "scale": attention.scale,
            "window": attention.window or 0,
            "is_chunked": attention.is_chunked,
            "softcap": attention.softcap or 0.0,
            "rope": -1 if attention.rope is None else ropes[attention.rope],
            **({} if growth is None else _growth(growth)),
            "head_borders": self._parts.input_borders(add.projection.names[0]),
        }

    def _head_norms(self, attention: Gqa, name: str) -> dict[str, Any]:
        if attention.qk_norm is None:
            return {}
        names = ("q_norm", "k_norm") if attention.has_own_kv else ("q_norm",)
        if attention.qk_norm == "l2_after_rope":
            return {norm: torch.ones(attention.head_dim) for norm in names}
        return {norm: self._parts.vector(f"{name}.{norm}.weight") for norm in names}

    def _latent_attention(
        self, project: NormProject, mla: Mla, name: str, add: ProjectAdd, ropes: Mapping[RopeSpec, int]
    ) -> dict[str, Any]:
        q, kv_down, *index = self._parts.linears(project.projection)
        (o,) = self._parts.linears(add.projection)
        heads = self._parts.plain(f"{name}.kv_up.weight").view(mla.num_heads, -1, mla.kv_rank)
        return {
            "q": q,
            "kv_down": kv_down,
            "q_up": self._parts.linear(f"{name}.q_up") if mla.q_rank else None,
            "o": o,
            "q_norm": self._parts.vector(f"{name}.q_norm.weight") if mla.q_rank else None,
            "kv_norm": self._parts.vector(f"{name}.kv_norm.weight"),
            "absorb": self._parts.plain_linears(heads[:, : mla.nope_dim].transpose(1, 2)),
            "expand": self._parts.plain_linears(heads[:, mla.nope_dim :]),
            "nope_dim": mla.nope_dim,
            "rope_dim": mla.rope_dim,
            "scale": mla.scale,
            "eps": mla.norm_eps,
            "rope": -1 if mla.rope is None else ropes[mla.rope],
            "index": None if mla.indexer is None else self._indexer(mla.indexer, name, *index),
            "shares_index": mla.shares_index_of is not None,
        }

    def _indexer(self, indexer: Indexer, name: str, keys: Any, weights: Any) -> Any:
        return native().EntryIndexer(
            q=self._parts.linear(f"{name}.index_q"),
            k=keys,
            weights=weights,
            norm=self._parts.vector(f"{name}.index_k_norm.weight"),
            norm_bias=self._parts.vector(f"{name}.index_k_norm.bias"),
            heads=indexer.num_heads,
            top_k=indexer.top_k,
            scale=indexer.scale,
            eps=KEY_NORM_EPS,
        )

    def _compressed(
        self, project: NormProject, mixer: WindowedMqa, name: str, add: ProjectAdd, ropes: Mapping[RopeSpec, int]
    ) -> dict[str, Any]:
        parts, compression = self._parts, mixer.compression
        (o,) = parts.linears(add.projection)
        found = {
            "inputs": parts.linears(project.projection),
            "q_up": parts.linear(f"{name}.q_up"),
            "out": parts.row_groups(f"{name}.out_groups", mixer.out_groups),
            "o": o,
            "q_norm": parts.vector(f"{name}.q_norm.weight"),
            "kv_norm": parts.vector(f"{name}.kv_norm.weight"),
            "sinks": parts.vector(f"{name}.sinks"),
            "window": mixer.window,
            "scale": mixer.scale,
            "eps": mixer.norm_eps,
            "rope": ropes[mixer.rope],
        }
        if compression is None:
            return found
        made = {"rate": compression.rate, "overlaps": compression.overlaps, "entries": parts.entries(f"{name}.entry")}
        indexer = compression.indexer
        if indexer is not None:
            keys, query = parts.entries(f"{name}.index"), parts.linear(f"{name}.index_q")
            index = native().CompressedIndex(query, indexer.num_heads, indexer.top_k, indexer.scale, keys)
            made["index"] = index
        return {**found, **made}

    def _convolution(self, project: NormProject, conv: ShortConv, name: str, add: ProjectAdd) -> dict[str, Any]:
        (conv_in,), (conv_out,) = self._parts.linears(project.projection), self._parts.linears(add.projection)
        return {
            "conv_in": conv_in,
            "conv_out": conv_out,
            "weight": self._parts.vector(f"{name}.conv.weight").t().contiguous(),  # [kernel, hidden]
            "bias": self._parts.vector(f"{name}.conv.bias") if conv.bias else None,
        }

    def _recurrent(self, project: NormProject, mixer: Recurrent, name: str, add: ProjectAdd) -> dict[str, Any]:
        weights = recurrent_weights(mixer, self.spec.norm_eps, lambda part: self._parts.vector(f"{name}.ssm_{part}"))
        (output,) = self._parts.linears(add.projection)
        low, high = mixer.step_limits or (0.0, math.inf)
        return {
            "inputs": self._parts.linears(project.projection),
            "output": output,
            "is_delta": mixer.rule == "delta",
            "key_heads": mixer.key_heads,
            "value_heads": mixer.value_heads,
            "key_dim": mixer.key_dim,
            "value_dim": mixer.value_dim,
            "conv": weights.conv.t().contiguous(),  # [kernel, channels]
            "conv_bias": weights.conv_bias,
            "rates": weights.rates,
            "step_bias": weights.step_bias,
            "skip": weights.skip,
            "norm": weights.norm,
            "norm_groups": 0 if mixer.norm is None else mixer.norm.groups,
            "is_norm_shared": mixer.norm is not None and mixer.norm.is_shared,
            "gates_first": mixer.norm is not None and mixer.norm.gates_first,
            "eps": weights.eps,
            "min_step": low,
            "max_step": high,
            "step_scale": mixer.step_scale,
            "gate_scale": mixer.gate_scale,
            "out_scale": mixer.out_scale,
            "has_channel_decays": mixer.has_channel_decays,
            "gates_by_sigmoid": mixer.gates_by_sigmoid,
            "is_tiled": mixer.is_tiled,
        }


class Site(NamedTuple):
    """A matrix that adapters may change."""

    number: int
    rows: int
    columns: int
    is_embedding: bool
    own_rows: tuple[int, int] | None = None  # of the whole matrix, where other ranks have others


class NativeAdapterSlots:
    """The adapters of a native decoder, packed as its kernels read them."""

    version = 0

    def __init__(self, decoder: Any, parts: _Parts, number: int, spec: ModelSpec) -> None:
        sites = parts.sites
        self.number = number
        self._decoder = decoder
        self._sites = sites if number else {}
        self._embedding_scale = spec.embedding_scale
        self._dense = parts.dense
        decoder.set_adapter_sites(number, [(site.rows, site.columns, site.is_embedding) for site in sites.values()])

    def names(self) -> set[str]:
        return set(self._sites)

    def put(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        """Let a slot hold an adapter; of several ranks each takes its rows of the matrices that it has."""
        here = ((self._sites[name], part) for name, part in matrices.items() if name in self._sites)
        self._decoder.set_adapter(slot, [self._part(site, part) for site, part in here])

    def _part(self, site: Site, part: LowRank) -> tuple[int, Any, Any, torch.Tensor | None]:
        a, b, gain = part.a, part.b, part.gain
        if site.is_embedding:  # rows of a are looked up, and the kernel scales the embedding itself
            a, b = a.t(), b.float() * self._embedding_scale
        elif site.own_rows is not None:
            own = slice(*site.own_rows)
            b, gain = b[own], None if gain is None else gain[own].contiguous()
        return site.number, self._packed(a), self._packed(b), gain

    def _packed(self, matrix: torch.Tensor) -> Any:
        raw = RawTensor("", tuple(matrix.shape), matrix.contiguous())
        return pack_as(kind_of(raw, "none"), raw, self._dense)


def _growth(growth: QueryGrowth) -> dict[str, Any]:
    return {"growth": growth.beta, "growth_length": growth.length, "growth_first": growth.first}


class _Parts:
    """Weights by name, in the forms the native decoder is built from."""

    def __init__(
        self, weights: Weights, dense: Dense, packer: Packer, has_norm_biases: bool, shard: RankShard | None = None
    ) -> None:
        self.weights, self.dense, self.packer, self.shard = weights, dense, packer, shard
        self.has_norm_biases = has_norm_biases
        self.sites: dict[str, Site] = {}  # matrices that adapters may change, in the order of their numbers

    def vector(self, name: str) -> torch.Tensor:
        return self.dense(self.weights.get(name)).float().contiguous()

    def norm(self, name: str | None) -> Any:
        if name is None:
            return None
        bias = self.vector(f"{name}.bias") if self.has_norm_biases else None
        return native().Norm(self.vector(f"{name}.weight"), bias)

    def linear(self, name: str, has_bias: bool = False) -> Any:
        matrix = self.packer.matrix(f"{name}.weight")
        bias = self.vector(f"{name}.bias") if has_bias else None
        return native().Linear(matrix, bias, self._site(name, matrix), **self._cut(name))

    def _cut(self, name: str) -> dict[str, Any]:
        """What of a matrix this rank has, as arguments of a linear."""
        return {} if self.shard is None else {"borders": self.shard.borders(name), "rank": self.shard.rank}

    def input_borders(self, name: str) -> list[int]:
        return [] if self.shard is None else self.shard.input_borders(name)

    def over(self, matrix: Any, name: str, *, is_embedding: bool = False) -> Any:
        """The embedding's matrix under a name by which adapters find it."""
        site = self._site(name, matrix, is_embedding=is_embedding, cut_as="embed")
        return native().Linear(matrix, None, site, **self._cut("embed"))

    def table(self, name: str) -> Any:
        """A matrix that adapters don't change."""
        return native().Linear(self.packer.matrix(f"{name}.weight"), None, **self._cut(name))

    def _site(self, name: str, matrix: Any, *, is_embedding: bool = False, cut_as: str | None = None) -> int:
        """The number under which adapters find a matrix. `cut_as`: the matrix that ranks cut, by default this one."""
        own = None if self.shard is None else self.shard.own_rows(cut_as or name)
        rows, columns = (matrix.cols, matrix.rows) if is_embedding else (matrix.rows, matrix.cols)
        if is_embedding and self.shard is not None:  # every rank looks up what is added to any token
            columns = self.shard.whole_rows([cut_as or name]) or columns
        number = self.sites[name].number if name in self.sites else len(self.sites)
        self.sites[name] = Site(number, rows, columns, is_embedding, own)
        return number

    def plain(self, name: str) -> torch.Tensor:
        """The values of a matrix as the file has them, or as float16 where it is quantised"""
        raw = self.weights.get(name)
        return self.dense(raw).to(torch.float16) if raw.quant else raw.data

    def plain_linears(self, matrices: torch.Tensor) -> list[Any]:
        """[count, rows, columns] as one matrix each, not quantised"""
        raws = (RawTensor("", tuple(matrix.shape), matrix.contiguous()) for matrix in matrices)
        packed = (pack_as(kind_of(raw, "none"), raw, self.dense) for raw in raws)
        return [native().Linear(matrix, None) for matrix in packed]

    def linears(self, matrices: Matrices) -> list[Any]:
        made = {name: self.linear(name, matrices.has_bias) for name in dict.fromkeys(matrices.names)}
        return [made[name] for name in matrices.names]  # values that are keys have the same matrix

    def row_groups(self, name: str, count: int) -> list[Any]:
        """The rows of a matrix in groups, each of which has an input of its own"""
        return [native().Linear(matrix, None) for matrix in self.packer.row_groups(f"{name}.weight", count)]

    def entries(self, name: str) -> Any:
        return native().CompressedEntries(self.vector(f"{name}_bias"), self.vector(f"{name}_norm.weight"))

    def connection(self, name: str) -> Any:
        weight = self._float_linear(f"{name}.weight")
        return native().Connection(weight, self.vector(f"{name}_base"), self.vector(f"{name}_scale"))

    def altup(self, name: str, altup: AltUp) -> Any:
        return native().AltUp(
            router=self._float_linear(f"{name}.altup_router.weight"),
            router_norm=self.vector(f"{name}.altup_router_norm.weight"),
            predict=self.vector(f"{name}.altup_predict.weight"),
            correct=self.vector(f"{name}.altup_correct.weight"),
            scale=self.vector(f"{name}.altup_scale") if altup.has_output_scale else None,
            left=self.linear(f"{name}.branch_left"),
            right=self.linear(f"{name}.branch_right"),
            branch_norm=self.norm(f"{name}.branch_norm"),
        )

    def _float_linear(self, name: str) -> Any:
        """A small matrix whose products are wanted to the last bit"""
        (linear,) = self.plain_linears(self.vector(name).unsqueeze(0))
        return linear

    def mlp(self, gate_up: Matrices, down: Matrices, spec: MlpSpec) -> Any:
        *gate, up = self.linears(gate_up)
        first = gate[0] if gate else None
        return native().Mlp(first, up, *self.linears(down), spec.activation, spec.sparsity_cutoff)

    def moe(self, region: Experts) -> Any:
        spec = region.spec
        owners = None if self.shard is None else self.shard.experts(region.ups)
        numbers: Sequence[int] = range(spec.num_experts)
        if owners is not None and self.shard is not None:
            numbers = [number for number, ranks in enumerate(owners) if self.shard.rank in ranks]
        gates = [None] * len(numbers) if region.gates is None else self._experts(region.gates, spec.expert)
        ups, downs = (self._experts(name, spec.expert) for name in (region.ups, region.downs))
        made = (native().Mlp(*parts, spec.expert.activation) for parts in zip(gates, ups, downs, strict=True))
        here = dict(zip(numbers, made, strict=True))
        experts = [here.get(number) for number in range(spec.num_experts)]
        (router,) = self.linears(region.router)
        latent = [self.linears(matrices)[0] for matrices in region.latent] if region.latent else [None, None]
        return native().Moe(
            router,
            experts,
            self._routing(region),
            shared=None if region.shared is None or spec.shared is None else self.mlp(*region.shared, spec.shared),
            shared_gate=self._optional(region.shared_gate and f"{region.shared_gate}.weight"),
            router_norm=self._router_norm(region),
            latent_in=latent[0],
            latent_out=latent[1],
            owners=owners or [],
        )

    def _experts(self, name: str, spec: MlpSpec) -> list[Any]:
        """One linear per expert"""
        matrices = self.packer.experts(f"{name}.weight")
        biases = self.vector(f"{name}.bias").unbind() if spec.bias else [None] * len(matrices)
        return [
            native().Linear(matrix, bias, self._site(f"{name}.{expert}", matrix, cut_as=name), **self._cut(name))
            for expert, (matrix, bias) in enumerate(zip(matrices, biases, strict=True))
        ]

    def _routing(self, region: Experts) -> Any:
        routing = region.spec.routing
        return native().Routing(
            region.spec.num_active,
            score=routing.score,
            renormalize=routing.renormalize,
            epsilon=routing.epsilon,
            choice_bias=self._optional(region.choice_bias),
            num_groups=routing.num_groups,
            kept_groups=routing.kept_groups,
            judged_by=1 if routing.group_score == "best" else 2,
            scale=routing.scale,
            expert_scales=self._optional(region.expert_scales),
            weights_input=routing.weights_input,
            table=None if region.table is None else self.dense(self.weights.get(region.table)).int().contiguous(),
        )

    def _optional(self, name: str | None) -> torch.Tensor | None:
        return None if name is None else self.vector(name).view(-1)

    def _router_norm(self, region: Experts) -> torch.Tensor | None:
        weight = self._optional(region.router_norm and f"{region.router_norm}.weight")
        return None if weight is None else weight * len(weight) ** -0.5


def _split(project: NormProject, num_last: int) -> tuple[NormProject, NormProject]:
    """What the first and the last matrices project"""
    matrices = project.projection
    first, last = (replace(matrices, names=names) for names in (matrices.names[:-num_last], matrices.names[-num_last:]))
    return replace(project, projection=first), replace(project, projection=last)
