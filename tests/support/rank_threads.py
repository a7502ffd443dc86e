"""Ranks of a small model as threads of the test process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from tests.support.native_models import CPU, MAX_CONTEXT, all_logits, native_model
from tokenmill.arch.spec import ModelSpec
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.models.protocol import WeightReader
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.parallel.cuts import Cuts, cut_model, cut_spec
from tokenmill.parallel.group import RankGroup, Shard
from tokenmill.parallel.shared import SharedGroup
from tokenmill.parallel.threads import ThreadGroup
from tokenmill.weights.rank_weights import RankWeights

Result = TypeVar("Result")
AnyGroup = TypeVar("AnyGroup", bound=RankGroup)


def on_ranks(groups: list[AnyGroup], work: Callable[[AnyGroup], Result]) -> list[Result]:
    """Return the results of the ranks' threads; an exception in one ends the waits of the others."""

    def run(group: AnyGroup) -> Result:
        try:
            return work(group)
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(len(groups)) as threads:
        return [future.result(60) for future in [threads.submit(run, group) for group in groups]]


@dataclass(frozen=True)
class HeldWeights:
    """Weights in memory, with the interface of a weight source."""

    reader: WeightReader

    def names(self) -> list[str]:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    def get(self, name: str) -> RawTensor:
        return self.reader.get(name)


def shard_of(
    spec: ModelSpec, group: RankGroup, weights: WeightReader, *, sums: bool = False
) -> tuple[ModelSpec, RankWeights, Shard]:
    """Return one rank's spec, weights and shard."""
    cuts, layers = Cuts(group.rank, group.size, cut_model(spec, group.size, sums=sums)), range(spec.num_layers)
    source = RankWeights(HeldWeights(weights), cuts, layers)
    return cut_spec(spec, group.size, group.rank), source, Shard(group, cuts, layers)


def torch_logits(
    spec: ModelSpec, weights: WeightReader, size: int, tokens: list[int], chunks: list[int], *, sums: bool = False
) -> list[torch.Tensor]:
    """Return the logits of all tokens on each rank, computed by torch."""

    def logits(group: ThreadGroup) -> torch.Tensor:
        own, source, shard = shard_of(spec, group, weights, sums=sums)
        model = Decoder(own, Loader(source, REFERENCE_OPS, torch.float32, CPU, shard=shard), MAX_CONTEXT)
        return all_logits(model, own, tokens, chunks)

    return on_ranks(ThreadGroup.make(size), logits)


def native_logits(
    spec: ModelSpec,
    weights: WeightReader,
    size: int,
    tokens: list[int],
    chunks: list[int],
    isa: str = "",
    activation_bits: str = "8",
) -> list[torch.Tensor]:
    """Return the logits of all tokens on each rank, computed by native kernels."""

    def logits(group: SharedGroup) -> torch.Tensor:
        own, source, shard = shard_of(spec, group, weights)
        model = native_model(own, source, isa, 1, activation_bits, shard=shard, window=group.window)
        return all_logits(model, own, tokens, chunks)

    return on_ranks(SharedGroup.in_threads(size), logits)
