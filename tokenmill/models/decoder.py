"""A decoder-only transformer built from a ModelSpec: embedding, layers, final norm, head.

`forward` ends before the head, so that the caller computes logits for the rows it needs only, in slices if it likes.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import torch

from tokenmill.arch.regions import Matrices, layer_regions
from tokenmill.arch.spec import ModelSpec
from tokenmill.kv.storage import KVStorage
from tokenmill.models.forward_context import ForwardContext, PositionTables, plan_forward
from tokenmill.models.layer import (
    Layer,
    LayerLoader,
    Mixer,
    SideMixer,
    load_mixer,
    load_side_mixer,
    one_of_each,
)
from tokenmill.models.linear import Loader, Projection
from tokenmill.models.protocol import BestLogits, Model
from tokenmill.models.streams import StreamedLayer, load_ends, over_streams
from tokenmill.ops.batch import ForwardBatch, Mode
from tokenmill.ops.compose import BatchClasses, choose_regions
from tokenmill.ops.interface import LayerWeights, Norm, Regions


class Decoder:
    direct = None

    def __init__(
        self, spec: ModelSpec, load: Loader, max_context: int | None = None, ends: Decoder | None = None
    ) -> None:
        """`max_context`: the longest context to serve, by default the model's maximum. `ends`: a decoder whose
        embedding and head this one shares."""
        self.spec = spec
        self.ops = load.ops
        self.is_whole = load.shard is None  # False on one of several ranks
        self.dtype = load.dtype  # of activations
        self.classes = BatchClasses(load.ops.row_borders(load.device))
        self.layer_range = range(spec.num_layers) if load.shard is None else load.shard.layers
        self.embedding: Projection
        self.head: Projection
        if ends is not None:
            self.embedding, self.head = ends.embedding, ends.head
        elif self.is_first_stage:  # the first pipeline stage holds both the embedding and the head
            self.embedding = load.embedding("embed")
            self.head = (
                load.tied_head(self.embedding)
                if spec.tied_head
                else load.projection(Matrices(("head",), spec.has_head_bias))
            )
        self.position_rows: torch.Tensor | None = None  # [positions, H]
        self.embed_norm: Norm | None = None
        if spec.num_positions and self.is_first_stage:
            self.position_rows = load.dense(load.source.get("positions.weight"))
        if spec.has_embed_norm and self.is_first_stage:
            self.embed_norm = load.norm("embed_norm", spec.norm_eps, spec.norm, spec.hidden_size)
        self.layers = self._load_layers(load)
        if self.is_last_stage:
            self.final_norm = load.norm("final_norm", spec.norm_eps, spec.norm, spec.hidden_size)
        self.layer_inputs = LayerInputs(spec, load) if spec.input_width else None
        self.streams = load_ends(spec, load)
        self.adapter_slots = load.slots
        self._no_stream = torch.empty(0, spec.hidden_size, dtype=load.dtype, device=load.device)
        self.stage_input = self._no_stream
        self.positions = PositionTables.of(spec, max_context or spec.max_context, load.device)

    def _load_layers(self, load: Loader) -> list[Layer | StreamedLayer]:
        def load_parts(index: int) -> tuple[Mixer, LayerWeights, SideMixer | None]:
            number = self.layer_range[index]
            regions = layer_regions(spec.layers[number], number)
            side = load_side_mixer(regions, spec.norm_eps, load)
            return load_mixer(regions, spec.norm_eps, load), loader.weights(regions), side

        spec = self.spec
        loader = LayerLoader(load, spec.norm_eps, spec.norm, spec.hidden_size, spec.streams is not None)
        parts = load.each(load_parts, len(self.layer_range))
        chosen = choose_regions(load.ops, [weights for _, weights, _ in parts], self.classes)
        layers = [
            Layer(spec.layers[number], mixer, weights, regions, number, side)
            for number, (mixer, weights, side), regions in zip(self.layer_range, parts, chosen, strict=True)
        ]
        if spec.streams is None:
            return list(layers)
        return [over_streams(layer, spec.streams, spec.norm_eps, load) for layer in layers]

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def is_last_stage(self) -> bool:
        return self.layer_range.stop == self.spec.num_layers

    @property
    def is_first_stage(self) -> bool:
        return self.layer_range.start == 0

    def reserve_stage_input(self, num_tokens: int) -> None:
        """Allocate `stage_input`, the buffer from which captured graphs read the previous stage's residual stream."""
        self.stage_input = self._no_stream.new_zeros(num_tokens, self.spec.hidden_size)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, storage: KVStorage, entering: torch.Tensor | None = None) -> torch.Tensor:
        step = plan_forward(self.ops, self.positions, self.classes, batch, storage)
        ends = self.layers[0].regions[step.batch_class] if step.adapted is None else step.adapted.regions
        if entering is None and not self.is_first_stage:
            entering = self.stage_input[: len(batch.token_ids)]
        embedded = self._embed(batch, step.adapters, ends) if entering is None else entering
        if self.layer_inputs is not None:
            inputs = self.layer_inputs(batch.token_ids, embedded, batch.mode, step.adapters)
            step = replace(step, layer_inputs=inputs)
        stream = ends.begin(embedded) if self.streams is None else self.streams.begin(embedded, ends)
        for layer in self.layers[:-1]:
            stream = layer(stream, step)
        if not self.is_last_stage:
            return ends.whole(self.layers[-1](stream, step))
        # The last layer writes all keys and values, but computes outputs only for the tokens that need logits.
        is_whole = len(batch.logit_rows) == len(batch.token_ids)
        stream = self.layers[-1](stream, step, None if is_whole else batch.logit_rows)
        if self.streams is not None:
            stream = ends.begin(self.streams.finish(stream, self._last_regions(step, is_whole=is_whole)))
        return ends.finish(stream, self.final_norm)

    def _last_regions(self, step: ForwardContext, *, is_whole: bool) -> Regions:
        """Return the last layer's regions for the tokens whose outputs are needed."""
        if step.adapted is None:
            return self.layers[-1].regions[step.batch_class if is_whole else step.gathering[1]]
        return step.adapted.regions if is_whole else step.adapted.gathered_regions

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, mode: Mode = "eager", adapters: torch.Tensor | None = None) -> torch.Tensor:
        return self._logits(hidden, mode, adapters).float()

    @property
    def best_logits(self) -> BestLogits | None:
        return None if self.ops.argmax is None else self._best_logits

    @torch.inference_mode()
    def _best_logits(
        self, hidden: torch.Tensor, mode: Mode = "eager", adapters: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.ops.argmax is not None, "see `best_logits`"
        return self.ops.argmax(self._logits(hidden, mode, adapters))

    def _logits(self, hidden: torch.Tensor, mode: Mode, adapters: torch.Tensor | None) -> torch.Tensor:
        """Return logits in the head's own precision, or float32 where a scale or a soft cap is applied."""
        logits = self.head(hidden, mode, None if adapters is None else self.ops.low_rank.plan(adapters))
        if self.spec.logit_scale != 1.0:
            logits = logits.float() * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else self.ops.softcap(logits.float(), cap)

    def _embed(self, batch: ForwardBatch, adapters: Any, regions: Regions) -> torch.Tensor:
        embedded = self.embedding.rows(batch.token_ids, adapters)
        if self.spec.embedding_scale != 1.0:
            embedded = embedded * self.spec.embedding_scale
        if self.position_rows is not None:
            embedded = embedded + torch.nn.functional.embedding(batch.positions, self.position_rows)
        return embedded if self.embed_norm is None else regions.finish(regions.begin(embedded), self.embed_norm)


class LayerInputs:
    """Per-layer embeddings (Gemma 3n): a row of a second table, added to a projection of the token's embedding.

    (norm(project(embedding) / sqrt(hidden)) + row * sqrt(width)) / sqrt(2)          [layers, width] per token
    """

    def __init__(self, spec: ModelSpec, load: Loader) -> None:
        self._ops = load.ops
        self._width, self._hidden, self._num_layers = spec.input_width, spec.hidden_size, spec.num_layers
        self._limit = spec.input_vocab_size
        self._table = load.embedding("layer_inputs.embed")
        self._project = load.projection(Matrices(("layer_inputs.project",)))
        self._norm = load.norm("layer_inputs.norm", spec.norm_eps)

    def __call__(
        self, token_ids: torch.Tensor, embedded: torch.Tensor, mode: Mode, adapters: Any = None
    ) -> torch.Tensor:
        """→ [T, layers, width]"""
        shape = (len(token_ids), self._num_layers, self._width)
        projected = (self._project(embedded, mode, adapters) * self._hidden**-0.5).view(shape)
        normed = self._ops.rms_norm(projected, self._norm.weight, self._norm.eps)
        known = token_ids if self._limit is None else torch.where(token_ids < self._limit, token_ids, 0)
        rows = (self._table.rows(known, adapters) * self._width**0.5).view(shape)
        inputs: torch.Tensor = (normed + rows) * 2**-0.5
        return inputs


def representative_layers(model: Model) -> Model:
    """Return the model with one layer of each kind, to warm up kernels and to measure memory; its output is useless.

    The layers share weights and cache with the full model. A model that is not a `Decoder` is returned whole.
    """
    if not isinstance(model, Decoder):
        return model
    shorter = copy(model)
    shorter.layers = one_of_each(model.layers)
    return shorter
