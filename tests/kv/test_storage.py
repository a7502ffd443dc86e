"""The cache tensors: size, views of layers, copies."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kv.layout import KVGroup, KVLayout
from tokenmill.kv.storage import KVStorage

LAYOUT = KVLayout((KVGroup(None, (1, 3)), KVGroup(8, (0, 2))), layers_per_group=2, num_kv_heads=3, head_dim=5)


def make_storage() -> KVStorage:
    return KVStorage(LAYOUT, num_blocks=6, block_size=4, dtype=torch.float16, device=torch.device("cpu"))


def test_size_is_what_the_layout_says() -> None:
    assert make_storage().num_bytes == 6 * LAYOUT.block_bytes(block_size=4, dtype="float16")


def test_a_layer_is_a_view_at_its_place() -> None:
    storage = make_storage()
    storage.layer(3).keys[2, 1] = 7.0
    storage.layer(0).values[4, 0] = 9.0
    assert storage.keys[1, 2, 1].eq(7.0).all() and storage.keys.count_nonzero() == 4 * 5
    assert storage.values[0, 4, 0].eq(9.0).all() and storage.values.count_nonzero() == 4 * 5


def test_copies_happen_as_if_at_once() -> None:
    storage = make_storage()
    for block in range(6):
        storage.keys[:, block] = block
        storage.values[:, block] = -block
    storage.copy_blocks([(1, 2), (2, 3), (0, 5)])
    expected = [0, 1, 1, 2, 4, 0]
    assert storage.keys[:, :, 0, 0, 0].tolist() == [expected] * 2
    assert storage.values[1, :, 2, 3, 4].tolist() == [-block for block in expected]


def test_no_copies_is_fine() -> None:
    storage = make_storage()
    storage.copy_blocks([])
    assert not storage.keys.any()


def test_copies_of_many_blocks_are_made_a_few_layers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if at once all the same: two blocks change places."""
    layout = KVLayout((KVGroup(None, (0, 1, 2, 3, 4)),), layers_per_group=5, num_kv_heads=2, head_dim=4)
    store = KVStorage(layout, 6, 4, torch.float32, torch.device("cpu"))
    store.keys.copy_(torch.randn_like(store.keys))
    before, block_bytes = store.keys.clone(), store.keys[0, 0].nbytes
    for at_once in (1, 3 * block_bytes * 3, 1 << 30):  # one layer, three, all
        monkeypatch.setattr("tokenmill.kv.storage.MAX_COPIED_BYTES", at_once)
        store.keys.copy_(before)
        store.copy_blocks([(1, 2), (2, 1), (3, 5)])
        assert torch.equal(store.keys[:, [0, 2, 1, 3, 4, 5]], before[:, [0, 1, 2, 3, 4, 3]])
