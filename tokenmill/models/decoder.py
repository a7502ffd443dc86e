"""A decoder-only transformer, any that a ModelSpec can describe: embedding, layers, final norm, head.

The head is kept apart from `forward`: only rows whose logits are wanted go through it, in slices if the caller likes.
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
from tokenmill.ops.interface import LayerWeights, Regions


class Decoder:
    direct = None

    def __init__(
        self, spec: ModelSpec, load: Loader, max_context: int | None = None, ends: Decoder | None = None
    ) -> None:
        """`max_context`: the longest context that will be served, the model's own by default. `ends`: a decoder whose
        embedding and head this one uses too."""
        self.spec = spec
        self.ops = load.ops
        self.is_whole = load.shard is None  # not one of several ranks
        self.dtype = load.dtype  # of activations
        self.classes = BatchClasses(load.ops.row_borders(load.device))
        self.numbers = range(spec.num_layers) if load.shard is None else load.shard.layers  # of its layers
        self.embedding: Projection
        self.head: Projection
        if ends is not None:
            self.embedding, self.head = ends.embedding, ends.head
        elif self.is_first_stage:  # what stands before and behind all layers is the first stage's
            self.embedding = load.embedding("embed")
            self.head = (
                load.tied_head(self.embedding)
                if spec.tied_head
                else load.projection(Matrices(("head",), spec.has_head_bias))
            )
        self.layers = self._load_layers(load)
        if self.is_last_stage:
            self.final_norm = load.norm("final_norm", spec.norm_eps, spec.norm)
        self.layer_inputs = LayerInputs(spec, load) if spec.input_width else None
        self.streams = load_ends(spec, load)
        self.adapter_slots = load.slots
        self._no_stream = torch.empty(0, spec.hidden_size, dtype=load.dtype, device=load.device)
        self.entered = self._no_stream
        self.positions = PositionTables.of(spec, max_context or spec.max_context, load.device)

    def _load_layers(self, load: Loader) -> list[Layer | StreamedLayer]:
        def load_parts(place: int) -> tuple[Mixer, LayerWeights, SideMixer | None]:
            number = self.numbers[place]
            regions = layer_regions(spec.layers[number], number)
            side = load_side_mixer(regions, spec.norm_eps, load)
            return load_mixer(regions, spec.norm_eps, load), loader.weights(regions), side

        spec = self.spec
        loader = LayerLoader(load, spec.norm_eps, spec.norm, spec.streams is not None)
        parts = load.each(load_parts, len(self.numbers))
        chosen = choose_regions(load.ops, [weights for _, weights, _ in parts], self.classes)
        layers = [
            Layer(spec.layers[number], mixer, weights, chosen[place], number, side)
            for place, (number, (mixer, weights, side)) in enumerate(zip(self.numbers, parts, strict=True))
        ]
        if spec.streams is None:
            return list(layers)
        return [over_streams(layer, spec.streams, spec.norm_eps, load) for layer in layers]

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def is_last_stage(self) -> bool:
        return self.numbers.stop == self.spec.num_layers

    @property
    def is_first_stage(self) -> bool:
        return self.numbers.start == 0

    def reserve_entered(self, num_tokens: int) -> None:
        """Make room for the stream of the stage before, `entered`: where a step that is given none finds it, as
        captured ones do."""
        self.entered = self._no_stream.new_zeros(num_tokens, self.spec.hidden_size)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, storage: KVStorage, entering: torch.Tensor | None = None) -> torch.Tensor:
        step = plan_forward(self.ops, self.positions, self.classes, batch, storage)
        ends = self.layers[0].regions[step.batch_class] if step.adapted is None else step.adapted.regions
        if entering is None and not self.is_first_stage:
            entering = self.entered[: len(batch.token_ids)]
        embedded = self._embed(batch.token_ids, step.adapters) if entering is None else entering
        if self.layer_inputs is not None:
            inputs = self.layer_inputs(batch.token_ids, embedded, batch.mode, step.adapters)
            step = replace(step, layer_inputs=inputs)
        stream = ends.begin(embedded) if self.streams is None else self.streams.begin(embedded, ends)
        for layer in self.layers[:-1]:
            stream = layer(stream, step)
        if not self.is_last_stage:
            return ends.whole(self.layers[-1](stream, step))
        # Of the last layer every token's keys and values are kept, but few tokens' results may be looked at.
        is_whole = len(batch.logit_rows) == len(batch.token_ids)
        stream = self.layers[-1](stream, step, None if is_whole else batch.logit_rows)
        if self.streams is not None:
            stream = ends.begin(self.streams.finish(stream, self._last_regions(step, is_whole=is_whole)))
        return ends.finish(stream, self.final_norm)

    def _last_regions(self, step: ForwardContext, *, is_whole: bool) -> Regions:
        """Return the regions for the tokens whose results are wanted."""
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
        """In the head's own precision, unless there is more to compute"""
        logits = self.head(hidden, mode, None if adapters is None else self.ops.low_rank.plan(adapters))
        if self.spec.logit_scale != 1.0:
            logits = logits.float() * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else self.ops.softcap(logits.float(), cap)

    def _embed(self, token_ids: torch.Tensor, adapters: Any) -> torch.Tensor:
        embedded = self.embedding.rows(token_ids, adapters)
        return embedded if self.spec.embedding_scale == 1.0 else embedded * self.spec.embedding_scale


class LayerInputs:
    """Embeddings that each layer has for itself: a second table's row of the token, and a projection of its embedding

    (norm(project(embedding) / sqrt(hidden)) + row * sqrt(width)) / sqrt(2)          [layers, width] a token
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
    """The model with one layer of each kind, for steps whose launches and memory matter and not what comes out. Its
    layers have the same weights and write into the same cache. Models of other makes are taken whole."""
    if not isinstance(model, Decoder):
        return model
    shorter = copy(model)
    shorter.layers = one_of_each(model.layers)
    return shorter
