"""The other way to shift a context: drop the oldest keys in place and rotate the remaining ones to their new positions.

Rotations compose, so a key at position p becomes one at p - d by turning it back by d. It is what llama.cpp does and
what the StreamingLLM paper describes; cheap, but a key then depends on everything that was ever in the context. Here it
is measured in the torch reference; the engine computes a window anew instead (`tokenmill/scheduler/request.py`).
"""

from __future__ import annotations

from pathlib import Path

import torch

from tokenmill.arch.read import read_spec
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.ops.reference.elementwise import rotate
from tokenmill.runner.inputs import build_batch
from tokenmill.types import RowPlan
from tokenmill.weights.source import open_weights

CPU = torch.device("cpu")
CHUNK = 128


class TurnedCache:
    """One sequence in blocks 1, 2, 3 ..., so that a layer's keys are one run of `context` positions."""

    def __init__(self, model: Decoder, context: int, keep: int, kv_dtype: torch.dtype) -> None:
        assert context % 16 == 0 and len(model.positions.ropes) == 1
        self.model, self.keep, self.context = model, keep, context
        layout = KVLayout.from_spec(model.spec, CacheDtypes(str(kv_dtype).removeprefix("torch.")))
        self.storage = KVStorage(layout, context // 16 + 1, 16, CPU)
        self.tables = torch.arange(1, context // 16 + 1, dtype=torch.int32).view(1, 1, -1).numpy()
        self.filled = 0

    def feed(self, tokens: list[int]) -> torch.Tensor:
        """logits [len(tokens), vocab]"""
        plan = RowPlan(row=0, start=self.filled, token_ids=tokens)
        batch = build_batch([plan], [range(len(tokens))], self.tables, 16, CPU)
        self.filled += len(tokens)
        return self.model.logits(self.model.forward(batch, self.storage))

    def shift(self) -> None:
        drop = (self.context - self.keep) // 2
        (rope,) = self.model.positions.ropes.values()
        cos, sin = rope.at(torch.full((self.context - self.keep - drop,), drop), REFERENCE_OPS)
        for layer in range(self.model.spec.num_layers):
            kept = self.storage.layer(layer)
            for cache, is_key in ((kept.keys, True), (kept.values, False)):
                run = cache[1:].transpose(1, 2).flatten(0, 1)  # [context, kv_heads, D], a copy
                rest = run[self.keep + drop :]
                run[self.keep : self.context - drop] = rotate(rest, cos, -sin) if is_key else rest
                cache[1:] = run.unflatten(0, (-1, 16)).transpose(1, 2)
        self.filled -= drop


@torch.inference_mode()
def rotated_logprobs(
    path: Path, context: int, keep: int, tokens: list[int], kv_dtype: torch.dtype = torch.float16
) -> list[float]:
    spec = read_spec(path)
    torch.set_num_threads(1)
    model = Decoder(spec, Loader(open_weights(path, spec), REFERENCE_OPS, torch.float32, CPU), context)
    cache, scores, at = TurnedCache(model, context, keep, kv_dtype), [], 0
    while at < len(tokens) - 1:
        if cache.filled == context:
            cache.shift()
        count = min(CHUNK, context - cache.filled, len(tokens) - 1 - at)
        logits = cache.feed(tokens[at : at + count]).log_softmax(-1)
        targets = torch.tensor(tokens[at + 1 : at + 1 + count])
        scores += logits.gather(1, targets.unsqueeze(1)).squeeze(1).tolist()
        at += count
    return scores
