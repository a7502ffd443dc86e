"""Cuts of models for several ranks, as data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.native_models import LLAMA, VARIANTS, random_weights
from tokenmill.arch.spec import Gqa
from tokenmill.arch.tensors import tensors_of
from tokenmill.parallel.cuts import Cuts, cut_model, cut_spec, cuts_heads, split_evenly, split_heads, split_rows
from tokenmill.weights.rank_weights import some_rows

HEADS = ("q", "k", "v", "attn_gate", "sinks")


def test_nine_heads_over_three_key_heads_go_over_any_number_of_ranks() -> None:
    found = {size: split_heads(9, 3, size) for size in range(1, 10)}
    assert found[2] is not None and found[2][0].spans == ((0, 6), (6, 9)) and found[2][1].spans == ((0, 2), (2, 3))
    assert found[4] is not None
    assert found[4][0].spans == ((0, 2), (2, 3), (3, 6), (6, 9)), "two ranks share the first key head"
    assert found[4][1].spans == ((0, 1), (0, 1), (1, 2), (2, 3))
    for cuts in found.values():
        assert cuts is not None
        assert [head for start, stop in cuts[0].spans for head in range(start, stop)] == list(range(9))
        assert min(cuts[0].widths) > 0
    assert split_heads(9, 3, 10) is None, "a rank would have no head"


@pytest.mark.parametrize("total", [32, 50, 80, 576, 49152])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_rows_are_cut_into_one_part_for_each_rank(total: int, size: int) -> None:
    cut = split_rows(total, size)
    assert [row for start, stop in cut.spans for row in range(start, stop)] == list(range(total))
    assert min(cut.widths) > 0
    assert max(cut.widths) - min(cut.widths) <= 32
    assert split_evenly(total, size, 32).borders[-1] == total


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_row_that_is_gathered_has_one_rank(name: str, size: int) -> None:
    spec = VARIANTS[name]
    shapes = {tensor.removesuffix(".weight"): one.shape for tensor, one in tensors_of(spec).items()}
    cuts = cut_model(spec, size)
    for matrix, cut in cuts.items():
        if matrix not in shapes:  # values that are keys
            continue
        total = shapes[matrix][-1] if matrix.endswith("sinks") else shapes[matrix][-2]
        rows = [row for start, stop in cut.rows.spans for row in range(start, stop)]
        if cuts_heads(spec, size) and matrix.rpartition(".")[2] in HEADS:
            assert set(rows) == set(range(total)), "several ranks may have the same key heads"
        else:
            assert rows == list(range(total))
    endings = (
        "router",
        "shared_gate",
        ".conv",
        "index_q",
        "q_up",
        "kv_up",
        "out_groups",
        "expert_table",
        "index_weights",
        "positions",
    )
    of_streams = ("streams", "altup", "branch", "connect")
    matrices = {matrix for matrix, shape in shapes.items() if len(shape) > 1 and not matrix.endswith(".bias")}
    matrices = {one for one in matrices if not one.endswith("_bias") and not any(part in one for part in of_streams)}
    whole = matrices - set(cuts)
    assert all(matrix.endswith(endings) for matrix in whole), (
        "only small ones are whole, those of streams, and what latent and compressed attention have between products"
    )


def test_a_rank_has_its_share_of_the_bytes() -> None:
    layer = replace(LLAMA.layers[0], mixer=replace(LLAMA.layers[0].mixer, num_heads=8, num_kv_heads=4))
    spec = replace(LLAMA, hidden_size=256, vocab_size=4096, layers=(layer,) * 4)
    weights, size = random_weights(spec), 4
    total = sum(raw.data.nbytes for raw in weights.tensors.values())
    for rank in range(size):
        cuts = Cuts(rank, size, cut_model(spec, size))
        read = 0
        for name, raw in weights.tensors.items():
            rows = cuts.rows(name)
            read += (raw if rows is None else some_rows(raw, rows)).data.nbytes
        assert read <= 1.15 * total / size


def test_matrices_in_blocks_are_not_cut_by_columns() -> None:
    cuts = cut_model(VARIANTS["llama"], 2, sums=True, in_blocks={"layers.0.down", "layers.1.o"})
    summed = {name for name, cut in cuts.items() if cut.gathered == "sum"}
    numbers = range(VARIANTS["llama"].num_layers)
    every = {f"layers.{number}.{matrix}" for number in numbers for matrix in ("o", "down")}
    assert summed == every - {"layers.0.down", "layers.1.o"}
    assert cuts["layers.0.down"] == cut_model(VARIANTS["llama"], 2)["layers.0.down"]


def test_keys_and_values_stay_whole_where_layers_keep_different_fields() -> None:
    assert cuts_heads(VARIANTS["llama"], 2)
    for name in ("conv", "odd_heads", "norm_of_all_heads"):
        spec = VARIANTS[name]
        assert not cuts_heads(spec, 2)
        assert cut_spec(spec, 2, 1) is spec
        assert cut_model(spec, 2)["layers.1.o"].inputs is None
    mixer = cut_spec(VARIANTS["llama"], 4, 3).layers[0].mixer
    assert isinstance(mixer, Gqa)
    assert (mixer.num_heads, mixer.num_kv_heads) == (1, 1)
