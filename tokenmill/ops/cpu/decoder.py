"""A model computed by the native CPU kernels: it packs the weights of all layers at load, and runs a step in one call.

The cache is the shared paged storage, but the native kernels have their own layout within a block: 16 tokens of keys
interleaved ([block, head, group of 16 tokens, head_dim, 16]), and int8 values in groups of four
(csrc/kernels/attention_int8.h). Whole blocks may be copied and moved; other backends can't read single tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from tokenmill.arch.indexer import INDEX_KEYS, KEY_NORM_EPS, BlockIndexer, Indexer
from tokenmill.arch.recurrent import InnerProjection, Recurrent
from tokenmill.arch.regions import (
    AddInput,
    Experts,
    Feed,
    LayerRegions,
    NormProject,
    ProjectAdd,
    SideBySide,
    layer_regions,
)
from tokenmill.arch.spec import Gqa, MixerSpec, Mla, ModelSpec, QueryGrowth, RopeSpec, ShortConv, WindowedMqa
from tokenmill.arch.streams import AltUp, HyperConnections, Streams
from tokenmill.ops.batch import DrawParams, ForwardBatch, LayerCache, Mode, StepRows
from tokenmill.ops.cpu.availability import native
from tokenmill.ops.cpu.native_weights import NativeWeights, RankShard, Site
from tokenmill.ops.cpu.packing import Dense, PackedMatrices, Packer, Quantization, Weights, kind_of, pack_as
from tokenmill.ops.low_rank import LowRank
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.recurrent import inner_norms, recurrent_weights

MAX_KEPT_LOGITS_ROWS = 64  # a logits buffer of up to this many rows is kept between steps
OUTLIER_THRESHOLDS = {"8": math.inf, "mixed": 2.5, "16": 0.0}
"""By `activation_bits`: a block of 32 activations keeps 16 bits if its largest magnitude exceeds this multiple of the
row's mean. Unless the threshold is infinite, the last layer and the head keep 16 bits for all blocks."""


class Storage(Protocol):
    def group(self, layer: int, field: str | None = None) -> int: ...

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
        num_adapter_slots: int = 0,
        shard: RankShard | None = None,
        window: Any = None,
        layers: range | None = None,
        ends: NativeDecoder | None = None,
    ) -> None:
        """Pack the weights and build the native decoder.

        dense               expands tensors that have no packed form
        instruction_set     "" selects the best
        activation_bits     precision of the inputs of quantised matrices, a key of OUTLIER_THRESHOLDS
        kept                cache of packed matrices, read and filled
        num_adapter_slots   number of adapters that can be loaded at a time
        shard, window       on one of several ranks, to which `spec` and `weights` belong: its part of the model, and
                            the native module's window by which ranks exchange
        layers              the layers of this pipeline stage, by default all; the first stage has embedding and head
        ends                a decoder whose embedding and head this one shares
        """
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
        self._parts = NativeWeights(weights, dense, packer, spec, shard)
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
        """Return the bytes of weights that a step of one token reads."""
        return int(self._decoder.weight_bytes)

    @property
    def is_last_stage(self) -> bool:
        return self._layers.stop == self.spec.num_layers

    def forward(self, batch: ForwardBatch, storage: Storage, entering: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the batch's tokens, write their KV cache, and return the normed hidden states [L, H] of `logit_rows`,
        or the residual stream [T, H] if other stages follow. `entering` [T, H]: the previous stage's stream."""
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
        """Return the argmax tokens and their logits, without storing the other logits."""
        token_ids, values = torch.empty(hidden.shape[0], dtype=torch.int64), torch.empty(hidden.shape[0])
        self._decoder.best_logits(hidden.contiguous(), token_ids, values, adapters)
        return token_ids, values

    @property
    def direct(self) -> NativeDecoder | None:
        return self if len(self._layers) == self.spec.num_layers else None

    @property
    def expert_rows(self) -> tuple[int, int]:
        """Return, with expert parallelism, how many expert rows this rank has computed and received from others."""
        return int(self._decoder.computed_rows), int(self._decoder.received_rows)

    def expert_counts(self) -> dict[str, list[int]]:
        """Return the number of tokens routed to each expert so far, by name of the layer's router."""
        counts = self._decoder.expert_counts
        return {name: list(counts[layer]) for layer, name in self._routers.items()}

    @property
    def kernel_s(self) -> float:
        """Return the seconds spent in kernels so far, as measured in the native code."""
        return float(self._decoder.kernel_s)

    def greedy_next(self, rows: StepRows, storage: Storage) -> list[int]:
        self._bind(storage)
        tokens: list[int] = self._decoder.greedy_next(*rows)
        return tokens

    def draw_next(self, rows: StepRows, params: DrawParams, storage: Storage) -> list[int]:
        self._bind(storage)
        tokens: list[int] = self._decoder.draw_next(*rows, *params)
        return tokens

    def logits_next(self, rows: StepRows, storage: Storage) -> torch.Tensor:
        self._bind(storage)
        out = self._logits_buffer(sum(rows.num_outputs))
        self._decoder.logits_next(*rows, out)
        return out

    def _logits_buffer(self, num_rows: int) -> torch.Tensor:
        """Return a buffer [num_rows, vocab], reused if small: page faults of fresh memory would cost more than filling
        it."""
        if num_rows > MAX_KEPT_LOGITS_ROWS:
            return torch.empty(num_rows, self.spec.vocab_size)
        if num_rows > len(self._logits):
            self._logits = torch.empty(num_rows, self.spec.vocab_size)
        return self._logits[:num_rows]

    def _bind(self, storage: Storage) -> None:
        """Pass the addresses of the cache to the kernels, when the storage is new."""
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
            if INDEX_KEYS in fields:
                self._decoder.bind_index_cache(number, storage.group(layer, INDEX_KEYS), fields[INDEX_KEYS])
        self._cache_owner = storage

    def _bind_compressed(self, number: int, layer: int, mixer: WindowedMqa, storage: Storage) -> None:
        fields = storage.fields(layer)
        self._decoder.bind_entry_cache(number, storage.group(layer, "entries"), fields["entries"])
        if mixer.compression is None:
            return
        for prefix in ("", "index_") if mixer.compression.indexer else ("",):
            inputs, made = f"{prefix}inputs_of_entries", f"{prefix}compressed"
            caches = storage.group(layer, inputs), fields[inputs], storage.group(layer, made), fields[made]
            self._decoder.bind_compressed_cache(number, prefix == "index_", *caches)

    def _native_layers(self) -> Iterator[tuple[int, MixerSpec]]:
        """Yield layer number and mixer of each native layer; a second mixer is a native layer of its own, the first."""
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
        positions = parts.plain_linear("positions") if spec.num_positions else None
        self._decoder.set_embedding_ends(positions, parts.norm("embed_norm") if spec.has_embed_norm else None)

    def _load_ends(self) -> tuple[Any, Any]:
        """Load embedding and head."""
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
        """Return the weights of a layer over several streams, as arguments of its frame."""
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
        """Add a layer to the native decoder; a second mixer becomes a layer before it, whose result is held back."""
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
        return {**norms, "mlp": parts.mlp(feed.gate_up, feed.down, feed.spec, feed.curve)}

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
        gate, growth, indexer = attention.gate, attention.query_growth, attention.block_indexer
        index = None if indexer is None else self._block_index(indexer, name, *others[-2:])
        others = others if indexer is None else others[:-2]
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
            "clip": attention.qkv_clip or 0.0,
            "has_value_norm": attention.has_value_norm,
            "value_scale": attention.value_scale,
            "sinks": self._parts.vector(f"{name}.sinks") if attention.has_sinks else None,
            "slopes": torch.tensor(attention.slopes) if attention.slopes else None,
            "heads": attention.num_heads,
            "kv_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            "value_dim": attention.value_dim or attention.head_dim,
            "scale": attention.scale,
            "window": attention.window or 0,
            "is_chunked": attention.is_chunked,
            "softcap": attention.softcap or 0.0,
            "rope": -1 if attention.rope is None else ropes[attention.rope],
            **({} if growth is None else _growth(growth)),
            "head_borders": self._parts.input_borders(add.projection.names[0]),
            "block_index": index,
        }

    def _block_index(self, indexer: BlockIndexer, name: str, queries: Any, keys: Any) -> Any:
        return native().BlockIndex(
            q=queries,
            k=keys,
            q_norm=self._parts.vector(f"{name}.index_q_norm.weight"),
            k_norm=self._parts.vector(f"{name}.index_k_norm.weight"),
            heads=indexer.num_heads,
            block_size=indexer.block_size,
            top_k=indexer.top_k,
            num_local=indexer.num_local,
        )

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
        q, kv_down, *others = self._parts.linears(project.projection)
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
            "index": None if mla.indexer is None else self._indexer(mla.indexer, name, *others[:2]),
            "shares_index": mla.shares_index_of is not None,
            "gate": None if mla.gate is None else others[-1],
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
            "rates": weights.rates.flatten(),
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
            "strength_scale": mixer.strength_scale,
            "lowest_decay": mixer.lowest_decay or 0.0,
            "scan": None if mixer.inner is None else self._scan(mixer, mixer.inner, name),
        }

    def _scan(self, mixer: Recurrent, inner: InnerProjection, name: str) -> Any:
        parts = self._parts
        norms = inner_norms(mixer, inner, lambda part: parts.vector(f"{name}.ssm_{part}")) or (None, None, None)
        eps = self.spec.norm_eps if inner.eps is None else inner.eps
        return native().ScanInputs(parts.linear(f"{name}.ssm_inner"), parts.linear(f"{name}.ssm_step"), *norms, eps)


class NativeAdapterSlots:
    """The adapter slots of a native decoder; adapters are packed as its kernels read them."""

    version = 0

    def __init__(self, decoder: Any, parts: NativeWeights, number: int, spec: ModelSpec) -> None:
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
        """Store an adapter in a slot; each rank stores its own rows of the matrices that it has."""
        own = ((self._sites[name], part) for name, part in matrices.items() if name in self._sites)
        self._decoder.set_adapter(slot, [self._part(site, part) for site, part in own])

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


def _split(project: NormProject, num_last: int) -> tuple[NormProject, NormProject]:
    """Split stacked input projections into the first ones and the last `num_last`."""
    matrices = project.projection
    first, last = (replace(matrices, names=names) for names in (matrices.names[:-num_last], matrices.names[-num_last:]))
    return replace(project, projection=first), replace(project, projection=last)
