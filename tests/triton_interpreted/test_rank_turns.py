"""Several ranks with the kernels of `--deterministic`: the bits of one rank, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.fixed_order import sums_in_fixed_order
from tests.support.native_models import CPU, LLAMA, MAX_CONTEXT, all_logits, random_weights, tokens_for
from tests.support.rank_threads import on_ranks, shard_of
from tokenmill.arch.spec import MlpSpec
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.gemm import deterministic
from tokenmill.parallel.threads import TurnGroup

CHUNKS = [5, 1]


def test_ranks_that_take_turns_give_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of sums depend on the whole matrix: its part on a rank would have other ones."""
    monkeypatch.setattr(deterministic, "MIN_COLUMNS", 64)
    monkeypatch.setattr(deterministic, "MIN_MATRIX_TILES", 2)
    layer = replace(LLAMA.layers[0], mlp=MlpSpec(160))
    spec = replace(LLAMA, layers=(layer,))
    ops, weights, tokens = build_ops(deterministic=True), random_weights(spec), tokens_for(spec, sum(CHUNKS))

    def logits(group: TurnGroup) -> torch.Tensor:
        group.wait_turn()
        own, source, shard = shard_of(spec, group, weights)
        model = Decoder(own, Loader(source, ops, torch.float32, CPU, shard=shard), MAX_CONTEXT)
        found = all_logits(model, own, tokens, CHUNKS)
        group.pass_turn()
        return found

    with sums_in_fixed_order():
        expected = all_logits(
            Decoder(spec, Loader(weights, ops, torch.float32, CPU), MAX_CONTEXT), spec, tokens, CHUNKS
        )
        for found in on_ranks(TurnGroup.make(2), logits):
            assert torch.equal(found, expected)
