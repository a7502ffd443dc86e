"""Stages of a pipeline: layers parted by cost, and the ring between them."""

from __future__ import annotations

import threading
from dataclasses import replace
from multiprocessing import Pipe

import pytest
import torch

from tests.support.native_models import LLAMA, VARIANTS
from tokenmill.arch.spec import MlpSpec
from tokenmill.errors import PeerDied
from tokenmill.kv.layout import KVLayout
from tokenmill.parallel.stage_link import StageLink
from tokenmill.parallel.stages import (
    Mesh,
    head_cost,
    layer_costs,
    split_layers,
    stage_borders,
    stage_limits,
    stage_share,
)


def test_the_costliest_stage_costs_least() -> None:
    """Compared with every way to part the layers."""
    layers = [replace(LLAMA.layers[0], mlp=MlpSpec(64 * size)) for size in (1, 9, 2, 2, 5, 1, 1)]
    spec = replace(LLAMA, layers=tuple(layers))
    costs, head = layer_costs(spec), head_cost(spec)

    def costliest(first: int, second: int) -> float:
        return max(head + sum(costs[:first]), sum(costs[first:second]), sum(costs[second:]))

    best = min(costliest(first, second) for first in range(1, 6) for second in range(first + 1, 7))
    stages = split_layers(spec, 3)
    assert [number for stage in stages for number in stage] == list(range(7))
    assert costliest(stages[1].start, stages[2].start) == best


def test_a_large_head_takes_layers_from_the_first_stage() -> None:
    spec = replace(LLAMA, layers=LLAMA.layers[:1] * 12)
    wide = replace(spec, vocab_size=200_000)
    assert len(split_layers(wide, 2)[0]) < len(split_layers(spec, 2)[0])


def test_layers_that_share_keys_stay_together() -> None:
    spec = VARIANTS["shared_keys"]
    sources = {number: layer.mixer.shares_kv_of for number, layer in enumerate(spec.layers)}  # type: ignore[union-attr]
    shared = {number: source for number, source in sources.items() if source is not None}
    assert shared
    for place in stage_borders(spec):
        assert not any(source < place <= number for number, source in shared.items())
    assert stage_limits(VARIANTS["layer_inputs"], 2) is not None
    assert stage_limits(LLAMA, 1 + LLAMA.num_layers) is not None


def test_stages_have_all_weights_once_and_the_same_block_ids() -> None:
    spec = replace(LLAMA, layers=LLAMA.layers[:1] * 7)
    stages = split_layers(spec, 3)
    assert sum(stage_share(spec, stage) for stage in stages) == pytest.approx(1.0)
    whole = KVLayout.from_spec(spec)
    parts = [whole.of_layers(stage) for stage in stages]
    assert all(part.windows == whole.windows for part in parts)
    assert sum(part.block_bytes(16) for part in parts) == whole.block_bytes(16)


def test_ranks_of_the_last_stage_come_before_those_of_the_first() -> None:
    mesh = Mesh(tp=2, pp=3)
    assert [(mesh.stage(rank), mesh.place(rank)) for rank in range(6)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert [mesh.before(rank) for rank in range(6)] == [4, 5, 0, 1, 2, 3]


def make_ring() -> tuple[StageLink, StageLink]:
    there, back = Pipe(duplex=False), Pipe(duplex=False)
    return StageLink(back[0], there[1], reads_ahead=True), StageLink(there[0], back[1], reads_ahead=False)


def test_matrices_larger_than_a_pipe_go_both_ways_at_once() -> None:
    first, second = make_ring()
    sent = torch.arange(1_000_000, dtype=torch.float32).view(1000, 1000)

    def serve() -> None:
        for _ in range(3):
            second.send(second.receive() * 2)
        second.close()

    server = threading.Thread(target=serve)
    server.start()
    for _ in range(3):
        first.send(sent)
    first.send(torch.empty(0, 1000))  # nobody reads it
    for _ in range(3):
        assert torch.equal(first.receive(), sent * 2)
    server.join(60)
    with pytest.raises(PeerDied):
        first.receive()
    with pytest.raises(PeerDied):
        first.send(sent)
    first.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_and_empty_matrices_survive(dtype: torch.dtype) -> None:
    first, second = make_ring()
    for sent in (torch.ones(2, 3, dtype=dtype), torch.empty(0, 3, dtype=dtype)):
        first.send(sent)
        found = second.receive()
        assert found.dtype == dtype and torch.equal(found, sent)
    first.close()
    second.close()
