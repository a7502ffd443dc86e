"""Layout of the KV cache: layers that share a block table, and the size of blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tokenmill.arch.cache_parts import CacheField
from tokenmill.arch.cost import kv_bytes_per_token
from tokenmill.arch.indexer import Indexer
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import Gqa, LayerSpec, Mla, MlpSpec, ModelSpec, ShortConv
from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import CacheDtypes, CacheGroup, KVLayout
from tokenmill.kv.storage import KVStorage


def make_spec(windows: list[int | None], kv_heads: list[int] | None = None) -> ModelSpec:
    heads = kv_heads or [2] * len(windows)
    layers = tuple(
        LayerSpec(Gqa(4, kv, 8, scale=1.0, rope=None, window=window), MlpSpec(32))
        for window, kv in zip(windows, heads, strict=True)
    )
    return ModelSpec("test", 64, 32, layers, norm_eps=1e-5, max_context=128, tied_head=True)


def test_a_plain_model_is_one_group() -> None:
    layout = KVLayout.from_spec(make_spec([None] * 30))
    assert layout.groups == (CacheGroup(layout.groups[0].fields, None, tuple(range(30))),)
    assert [field.name for field in layout.groups[0].fields] == ["keys", "values"]
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
    layout = KVLayout.from_spec(make_spec([None, None, None]), CacheDtypes("float16"))
    assert layout.block_bytes(block_size=16) == 2 * 3 * 2 * 16 * 8 * 2


def test_layers_with_different_kv_shapes_share_blocks_of_equal_bytes() -> None:
    layout = KVLayout.from_spec(make_spec([None] * 6, kv_heads=[2, 4, 4, 2, 2, 2]), CacheDtypes("float16"))
    assert [group.layers for group in layout.groups] == [(0, 3, 4, 5), (1, 2)]
    assert layout.block_bytes(block_size=16) == 4 * 2 * 2 * 16 * 8 * 2
    assert layout.rows_per_block == (8, 4)


def hybrid(num_attention: int, num_conv: int, *, width: int, kv_heads: int = 8, kernel: int = 3) -> ModelSpec:
    attention = LayerSpec(Gqa(2 * kv_heads, kv_heads, 64, scale=1.0, rope=None), MlpSpec(32))
    conv = LayerSpec(ShortConv(width, kernel), MlpSpec(32))
    return ModelSpec("test", 64, width, (conv,) * num_conv + (attention,) * num_attention, 1e-5, 128, tied_head=True)


def test_short_convolutions_share_the_blocks_of_attention() -> None:
    """LFM2-1.2B: a block of six layers' keys and values holds three layers' inputs, and not a byte of it is unused."""
    layout = KVLayout.from_spec(hybrid(6, 10, width=2048), CacheDtypes("bfloat16", "bfloat16"))
    assert layout.windows == (None, 3, 3, 3, 3)
    assert [len(group.layers) for group in layout.groups] == [6, 3, 3, 3, 1]
    assert layout.block_bytes(16) == 16 * 6 * 2 * 8 * 64 * 2
    assert layout.rows_per_block == (12, 3, 3, 3, 3)


@pytest.mark.parametrize("cache", ["float32", "float16", "int8"])
@pytest.mark.parametrize("sizes", [(6, 10, 1024), (6, 10, 1536), (6, 10, 2048), (8, 22, 2048), (2, 3, 64), (1, 1, 96)])
def test_every_layer_of_a_hybrid_has_room(cache: str, sizes: tuple[int, int, int]) -> None:
    """A group's fields fit into a block, and keys and values waste at most a third of theirs."""
    spec = hybrid(sizes[0], sizes[1], width=sizes[2])
    layout = KVLayout.from_spec(spec, CacheDtypes(cache, "float32"))
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(spec.num_layers))
    for group, rows in zip(layout.groups, layout.rows_per_block, strict=True):
        assert len(group.layers) * len(group.fields) <= rows
    attention = [number for number, group in enumerate(layout.groups) if len(group.fields) == 2]
    used = sum(2 * len(layout.groups[number].layers) for number in attention)
    assert sizes == (1, 1, 96) or sum(layout.rows_per_block[number] for number in attention) <= 4 / 3 * used


def test_keys_and_values_may_have_different_widths() -> None:
    fields = CacheField("keys", (1, 192), "float16"), CacheField("values", (1, 128), "float16")
    layout = KVLayout((CacheGroup(fields, None, (0, 1)),))
    assert layout.block_bytes(16) == 16 * 2 * (192 + 128) * 2
    storage = KVStorage(layout, 4, 16, torch.device("cpu"))
    assert storage.layer(1).keys.shape == (4, 1, 16, 192) and storage.layer(1).values.shape == (4, 1, 16, 128)
    assert storage.num_bytes == 4 * layout.block_bytes(16)


def test_keys_of_an_index_have_blocks_of_their_own_where_layers_share_one() -> None:
    """DeepSeek V3.2: every layer has an indexer, one table holds both fields. GLM-5.2: most layers have none."""
    own = Mla(4, 32, 64, 16, 8, 16, 1.0, None, indexer=Indexer(2, 24, 8))
    shared = replace(own, indexer=None, shares_index_of=0)
    layers = [LayerSpec(mixer, MlpSpec(8)) for mixer in (own, shared, shared, shared, own, shared, shared, shared)]
    spec = ModelSpec("deepseek_v32", 32, 32, (layers[0],) * 8, 1e-6, 64, True)
    alike = KVLayout.from_spec(spec)
    assert [(group.window, len(group.layers), len(group.fields)) for group in alike.groups] == [(None, 8, 2)]
    assert alike.block_bytes(16) == 16 * 8 * (72 + 24) * 4 == 16 * kv_bytes_per_token(spec, "float32")
    mixed = KVLayout.from_spec(replace(spec, layers=tuple(layers)))
    fields: dict[int, list[str]] = {layer: [] for layer in range(8)}
    for group in mixed.groups:
        assert len(group.fields) == 1 and group.window is None
        for layer in group.layers:
            fields[layer].append(group.fields[0].name)
    assert fields == {layer: ["latents", "index_keys"] if layer in (0, 4) else ["latents"] for layer in range(8)}
    storage = KVStorage(mixed, 4, 16, torch.device("cpu"))
    assert storage.group(4) == storage.group(4, "latents") != storage.group(4, "index_keys")
    assert storage.fields(4)["index_keys"].shape[1:] == (16, 24)


def test_blocks_hold_whole_compressed_entries(shared_dir: Path) -> None:
    """DeepSeek V4: a token keeps its share of an entry; windows and what entries are made of are given back."""
    spec = read_spec(shared_dir / "goldens" / "tiny" / "deepseek_v4")
    layout = KVLayout.from_spec(spec)
    assert layout.block_multiple == 16
    with pytest.raises(InvalidConfig, match="multiple of 16"):
        layout.rules(24)
    kept = {field.name: (field.shape, group.window) for group in layout.groups for field in group.fields}
    assert kept["entries"] == ((32,), 16) and kept["index_compressed"] == ((4,), None)
    sizes = {field.shape for group in layout.groups for field in group.fields if field.name == "compressed"}
    assert sizes == {(32 // 16,), (32 // 4,)}
    per_token = sum(32 // rate for rate in (16, 4, 16)) + 16 // 4 + 32  # the first layer keeps its window alone
    assert kv_bytes_per_token(spec, "float32") == 4 * per_token
