"""A decoder-only transformer, any that a ModelSpec can describe: embedding, layers, final norm, head.

The head is kept apart from `forward`: only rows whose logits are wanted go through it, in slices if the caller likes.
"""

from __future__ import annotations

import torch

from tokenmill.arch.spec import ModelSpec, RopeSpec
from tokenmill.kv.storage import KVStorage
from tokenmill.models.forward_context import ForwardContext, plan_forward
from tokenmill.models.layer import Layer
from tokenmill.models.loading import Loader
from tokenmill.models.protocol import BestLogits
from tokenmill.models.rope import RopeTable, make_rope_table
from tokenmill.ops.batch import ForwardBatch, Mode
from tokenmill.ops.interface import FusedNormOps


class Decoder:
    direct = None

    def __init__(self, spec: ModelSpec, load: Loader, max_context: int | None = None) -> None:
        """`max_context`: the longest context that will be served, the model's own by default."""
        self.spec = spec
        self.ops = load.ops
        self.embedding = load.ops.pack_embedding(load.source.get("embed.weight"), load.dense)
        self.layers = load.each(
            lambda number: Layer(spec.layers[number], number, spec.norm_eps, load), len(spec.layers)
        )
        self.final_norm = load.vector("final_norm.weight")
        self.head = self.embedding if spec.tied_head else load.linear(["head"])
        stream = load.ops.stream
        self.stream_ops = stream if stream and all(layer.uses_stream(stream) for layer in self.layers) else None
        self.ropes = rope_tables(spec, max_context or spec.max_context, load.device)

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        step = plan_forward(self.ops, self.ropes, batch, storage)
        residual = self._embed(batch.token_ids)
        delta: torch.Tensor | None = None
        if self.stream_ops is not None and self.stream_ops.takes(len(residual)):
            residual = self._along(self.stream_ops, residual, step)
            if len(batch.logit_rows) == len(residual):
                return self.ops.rms_norm(residual, self.final_norm, self.spec.norm_eps)
        else:
            for layer in self.layers[:-1]:
                delta, residual = layer(delta, residual, step)
        # Of the last layer every token's keys and values are kept, but few tokens' results may be looked at.
        wanted = None if len(batch.logit_rows) == len(residual) else batch.logit_rows
        delta, residual = self.layers[-1](delta, residual, step, wanted)
        if delta is None:
            return self.ops.rms_norm(residual, self.final_norm, self.spec.norm_eps)
        normed, _ = self.ops.add_rms_norm(delta, residual, self.final_norm, self.spec.norm_eps)
        return normed

    def _along(self, ops: FusedNormOps, embedded: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """The residual stream [T, H] behind all layers; behind all but the last where few tokens are looked at."""
        is_whole = len(step.batch.logit_rows) == len(embedded)
        norms = [*(layer.attn_norm for layer in self.layers), self.final_norm]
        stream = ops.join(embedded, None, norms[0], self.spec.norm_eps)
        for layer, norm in zip(self.layers if is_whole else self.layers[:-1], norms[1:], strict=False):
            stream = layer.along(ops, stream, step, norm)
        total: torch.Tensor = stream.total
        return total

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, mode: Mode = "eager") -> torch.Tensor:
        return self._logits(hidden, mode).float()

    @property
    def best_logits(self) -> BestLogits | None:
        return None if self.ops.argmax is None else self._best_logits

    @torch.inference_mode()
    def _best_logits(self, hidden: torch.Tensor, mode: Mode = "eager") -> tuple[torch.Tensor, torch.Tensor]:
        assert self.ops.argmax is not None, "see `best_logits`"
        return self.ops.argmax(self._logits(hidden, mode))

    def _logits(self, hidden: torch.Tensor, mode: Mode) -> torch.Tensor:
        """In the head's own precision, unless there is more to compute"""
        logits = self.ops.linear(hidden, self.head, mode)
        cap = self.spec.logit_softcap
        return logits if cap is None else self.ops.softcap(logits.float(), cap)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded = self.ops.embed(token_ids, self.embedding)
        return embedded if self.spec.embedding_scale == 1.0 else embedded * self.spec.embedding_scale


def rope_tables(spec: ModelSpec, max_context: int, device: torch.device) -> dict[RopeSpec, RopeTable]:
    """One table per distinct rope; layers share them."""
    return {rope: make_rope_table(rope, max_context, device) for rope in spec.ropes}
