"""The cache tensors: size, views of layers, copies."""

from __future__ import annotations

import pytest
import torch

from tokenmill.arch.cache_parts import CacheField
from tokenmill.kv.layout import CacheGroup, KVLayout
from tokenmill.kv.storage import KVStorage

FIELDS = CacheField("keys", (3, 5), "float16"), CacheField("values", (3, 5), "float16")
LAYOUT = KVLayout((CacheGroup(FIELDS, None, (1, 3)), CacheGroup(FIELDS, 8, (0, 2))))
CPU = torch.device("cpu")


def make_storage() -> KVStorage:
    return KVStorage(LAYOUT, num_blocks=6, block_size=4, device=CPU)


def all_keys(storage: KVStorage, layers: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([storage.layer(layer).keys for layer in layers])


def test_size_is_what_the_layout_says() -> None:
    assert make_storage().num_bytes == 6 * LAYOUT.block_bytes(block_size=4)


def test_a_layer_is_a_view_at_its_place() -> None:
    storage = make_storage()
    storage.layer(3).keys[2, 1] = 7.0
    storage.layer(0).values[4, 0] = 9.0
    keys, values = storage.layer(2).keys, storage.layer(1).values  # of the other group, in the same memory
    assert keys[2, 1].eq(7.0).all() and keys.count_nonzero() == 4 * 5
    assert values[4, 0].eq(9.0).all() and values.count_nonzero() == 4 * 5
    assert not storage.layer(1).keys.any() and not storage.layer(3).values.any()


def test_copies_happen_as_if_at_once() -> None:
    storage = make_storage()
    for layer in (0, 2):
        for block in range(6):
            storage.layer(layer).keys[block] = block
            storage.layer(layer).values[block] = -block
    storage.copy_blocks([(1, 2), (2, 3), (0, 5)])
    expected = [0, 1, 1, 2, 4, 0]
    assert all_keys(storage, (0, 2))[:, :, 0, 0, 0].tolist() == [expected] * 2
    assert storage.layer(3).values[:, 2, 3, 4].tolist() == [-block for block in expected]


def test_no_copies_is_fine() -> None:
    storage = make_storage()
    storage.copy_blocks([])
    assert not all_keys(storage, (0, 1, 2, 3)).any()


def test_copies_of_many_blocks_are_made_a_few_layers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if at once all the same: two blocks change places."""
    fields = CacheField("keys", (2, 4), "float32"), CacheField("values", (2, 4), "float32")
    store = KVStorage(KVLayout((CacheGroup(fields, None, tuple(range(5))),)), 6, 4, CPU)
    before = torch.randn_like(all_keys(store, tuple(range(5))))
    block_bytes = before[0, 0].nbytes
    for at_once in (1, 3 * block_bytes * 3, 1 << 30):  # one layer, three, all
        monkeypatch.setattr("tokenmill.kv.storage.MAX_COPIED_BYTES", at_once)
        for layer in range(5):
            store.layer(layer).keys.copy_(before[layer])
        store.copy_blocks([(1, 2), (2, 1), (3, 5)])
        keys = all_keys(store, tuple(range(5)))
        assert torch.equal(keys[:, [0, 2, 1, 3, 4, 5]], before[:, [0, 1, 2, 3, 4, 3]])


# ── groups with different fields ───────────────────────────────────────────────────────────────────────

ATTENTION = CacheField("keys", (2, 8), "float16"), CacheField("values", (2, 8), "float16")
ROUNDED = CacheField("keys", (2, 8), "int8"), CacheField("values", (2, 8), "int8")
CONV = (CacheField("inputs", (16,), "float32"),)


@pytest.mark.parametrize("attention", [ATTENTION, ROUNDED], ids=["float16", "int8"])
def test_fields_of_different_sizes_share_blocks(attention: tuple[CacheField, ...]) -> None:
    """Every field of every layer keeps what was written into its own blocks, whatever the others write into theirs."""
    layout = KVLayout((CacheGroup(attention, None, (2, 4, 5)), CacheGroup(CONV, 3, (0, 1)), CacheGroup(CONV, 3, (3,))))
    storage = KVStorage(layout, num_blocks=9, block_size=4, device=CPU)
    assert storage.num_bytes == 9 * layout.block_bytes(4)
    owned = {0: (1, 4, 7), 1: (2, 5, 8), 2: (3, 6)}
    assert [storage.group(layer) for layer in range(6)] == [1, 1, 0, 2, 0, 0]
    written = {}
    for layer in range(6):
        group = storage.group(layer)
        rows = [block * layout.rows_per_block[group] for block in owned[group]]
        for name, tensor in storage.fields(layer).items():
            assert tensor.is_contiguous()
            for row in rows:
                values = torch.randint(-100, 100, tensor.shape[1:]).to(tensor.dtype)
                tensor[row] = values
                written[layer, name, row] = values
    for (layer, name, row), values in written.items():
        assert torch.equal(storage.fields(layer)[name][row], values)
    assert not any(tensor[0].any() for layer in range(6) for tensor in storage.fields(layer).values())  # the null block


def test_blocks_of_different_fields_are_copied_whole() -> None:
    layout = KVLayout((CacheGroup(ROUNDED, None, (1,)), CacheGroup(CONV, 3, (0,))))
    storage = KVStorage(layout, num_blocks=5, block_size=4, device=CPU)
    keys, inputs = layout.rows_per_block
    cache, conv = storage.layer(1), storage.fields(0)["inputs"]
    assert cache.key_scales is not None
    cache.keys[3 * keys], cache.key_scales[3 * keys], conv[2 * inputs] = 5, 0.5, 7.0
    storage.copy_blocks([(3, 1), (2, 4)])
    assert cache.keys[keys].eq(5).all() and cache.key_scales[keys].eq(0.5).all() and conv[4 * inputs].eq(7.0).all()
