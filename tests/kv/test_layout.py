"""Which layers share a block table, and how large a block is."""

from __future__ import annotations

import pytest

from tokenmill.arch.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from tokenmill.errors import UnsupportedModel
from tokenmill.kv.layout import KVGroup, KVLayout


def make_spec(windows: list[int | None], kv_heads: list[int] | None = None) -> ModelSpec:
    heads = kv_heads or [2] * len(windows)
    layers = tuple(
        LayerSpec(AttentionSpec(4, kv, 8, scale=1.0, rope=None, window=window), MlpSpec(32))
        for window, kv in zip(windows, heads, strict=True)
    )
    return ModelSpec("test", 64, 32, layers, norm_eps=1e-5, max_context=128, tied_head=True)


def test_a_plain_model_is_one_group() -> None:
    layout = KVLayout.from_spec(make_spec([None] * 30))
    assert layout.groups == (KVGroup(None, tuple(range(30))),)
    assert layout.place(17) == (0, 17)


def test_gemma3_has_one_full_group_and_five_window_groups() -> None:
    windows = [None if layer % 6 == 5 else 512 for layer in range(18)]
    layout = KVLayout.from_spec(make_spec(windows))
    assert layout.layers_per_group == 3
    assert layout.windows == (None, 512, 512, 512, 512, 512)
    assert layout.groups[0].layers == (5, 11, 17)
    assert layout.groups[2].layers == (3, 4, 6)


def test_every_layer_has_its_own_place() -> None:
    for num_global in range(1, 12):
        layout = KVLayout.from_spec(make_spec([None] * num_global + [64] * (26 - num_global)))
        places = {layout.place(layer) for layer in range(26)}
        assert len(places) == 26
        assert len(layout.groups) * layout.layers_per_group - 26 <= 2.6
        assert all(len(group.layers) <= layout.layers_per_group for group in layout.groups)


def test_the_last_group_may_have_unused_places() -> None:
    layout = KVLayout.from_spec(make_spec([None] * 4 + [1024] * 22))
    assert layout.layers_per_group == 4
    assert [len(group.layers) for group in layout.groups] == [4, 4, 4, 4, 4, 4, 2]


def test_block_bytes_counts_keys_and_values_of_a_group() -> None:
    layout = KVLayout.from_spec(make_spec([None, None, None]))
    assert layout.block_bytes(block_size=16, dtype="float16") == 2 * 3 * 2 * 16 * 8 * 2


def test_layers_with_different_kv_shapes_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="2 x 8, 4 x 8"):
        KVLayout.from_spec(make_spec([None, None], kv_heads=[2, 4]))
