"""Products that add adapters themselves, as the compiler makes them for Hopper; runs on any machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from tests.support.compiled_launches import HOPPER, HOPPER_SHARED, launches_on_hopper
from tests.support.warm_up import LLAMA, warm_up_for
from tokenmill.models.linear import AdapterSlots
from tokenmill.ops.interface import LinearWeight
from tokenmill.ops.triton.adapters.adapted_product import MATRIX_TILE, ColumnCut, cut_columns
from tokenmill.ops.triton.adapters.ops import TritonLowRankOps
from tokenmill.ops.triton.gemm.product import PLAIN, Product
from tokenmill.ops.triton.gemm.splitk import pick_splitk_config
from tokenmill.ops.triton.launch.capabilities import named_gpu
from tokenmill.ops.triton.launch.kernel import Kernel, cdiv, next_power_of_2
from tokenmill.runner.decode_graphs import DecodeGraphs

H200 = named_gpu("H200")
NUM_ROWS, NUM_SLOTS, RANK = 32, 16, 16
SHAPES = {
    "qkv": ((4096, 1024, 1024), 4096), "o": ((4096,), 4096), "gate_up": ((14336, 14336), 4096), "down": ((4096,), 14336)
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("title", SHAPES)
def test_programs_ask_early_and_two_fit_on_a_multiprocessor(title: str) -> None:
    sizes, columns = SHAPES[title]
    with launches_on_hopper() as found:
        ops, like, rows = TritonLowRankOps(), torch.empty(0, dtype=torch.bfloat16), sum(sizes)
        held = ops.hold(sizes, columns, NUM_SLOTS, RANK, like)
        weight = held.adopt(LinearWeight(rows, columns, like.new_empty(rows, columns)))
        held.is_active = True
        plan = ops.plan(torch.zeros(NUM_ROWS, dtype=torch.int32))
        assert held.product(like.new_empty(NUM_ROWS, columns), weight, plan) is not None
    launches = {one.name: one for one in found.values()}
    assert launches.keys() == {"_find_present", "_adapted_splitk"}
    made = launches["_adapted_splitk"].compiled(HOPPER)
    assert made.metadata.shared <= HOPPER_SHARED // 2
    ptx = made.asm["ptx"]
    before_wait = ptx.split("griddepcontrol.wait")[0]
    places = next_power_of_2(cdiv(NUM_SLOTS, cut_of(title, NUM_SLOTS).config.splits))
    assert len(re.findall(r"@%p\d+ ld\.global\.v4\.b32", before_wait)) == MATRIX_TILE * places * RANK // 8 // 128, "b"
    behind_poll = ptx.split("ld.acquire.gpu")[1]
    assert "trap;" in behind_poll and "ld.global.cg.v4.b32" in behind_poll, "h is read number by number"


def cut_of(title: str, num_adapters: int) -> ColumnCut:
    return cut_columns(product_of(title), num_adapters * RANK * len(SHAPES[title][0]))


def product_of(title: str) -> Product:
    sizes, columns = SHAPES[title]
    return Product(NUM_ROWS, sum(sizes), columns, PLAIN[torch.bfloat16], H200)


@pytest.mark.parametrize("title", SHAPES)
@pytest.mark.parametrize("num_adapters", [1, 5, 16])
def test_programs_share_all_columns_and_run_at_once(title: str, num_adapters: int) -> None:
    columns, cut = SHAPES[title][1], cut_of(title, num_adapters)
    assert cut.split_columns * cut.config.splits >= columns > cut.split_columns * (cut.config.splits - 1)
    assert cut.h_columns * cut.h_splits >= columns > cut.h_columns * (cut.h_splits - 1)
    assert title == "gate_up" or cut.num_programs <= 2 * H200.tuning.multiprocessors


@pytest.mark.parametrize("title", SHAPES)
def test_steps_with_adapters_take_hardly_more_memory(title: str) -> None:
    """What is planned for steps is planned without adapters, apart from their slots."""
    cut, ranks = cut_of(title, NUM_SLOTS), RANK * len(SHAPES[title][0])
    assert cut.config.splits <= pick_splitk_config(product_of(title)).splits
    assert 4 * cut.h_splits * NUM_ROWS * ranks < 1 << 18


def launched_by_step(graphs: DecodeGraphs, size: int) -> list[tuple[Any, ...]]:
    """Return the arguments with which a step launches the product of each matrix."""
    found: list[tuple[Any, ...]] = []

    def launch(self: Kernel, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if self.name == "_adapted_splitk":
            found.append(args)

    with (
        patch.object(Kernel, "_launch", launch),
        patch("tokenmill.ops.triton.adapters.ops.has_adapted_products", return_value=True),
    ):
        graphs._step(size, graphs._padding, "greedy", is_adapted=True)
    return found


def test_every_product_of_a_step_has_a_counter_of_its_own() -> None:
    """Each step has new ones: the one that is captured, and the one that is run before it. The head has a plan of its
    own. Steps of other sizes launch the same kernels."""
    slots = AdapterSlots(NUM_SLOTS, RANK)
    with patch.object(torch.Tensor, "pin_memory", lambda self: self):
        graphs = warm_up_for(LLAMA, slots=slots)._graphs
    for one in slots.held:
        one.slots.is_active = True
    steps = [launched_by_step(graphs, size) for size in (4, 4, 2)]
    num_layers, kept = LLAMA["num_hidden_layers"], []
    for launches in steps:
        counters, numbers = [args[7] for args in launches], [args[12] for args in launches]
        assert numbers == [*range(4 * num_layers), 0], "qkv, o, gate and up, down; the head"
        assert all(counter is counters[0] for counter in counters[:-1]) and counters[-1] is not counters[0]
        kept += [counters[0], counters[-1]]
    assert len(set(map(id, kept))) == len(kept)
    constants = [[args[16:] for args in launches] for launches in steps]
    assert constants[0] == constants[1] == constants[2]
