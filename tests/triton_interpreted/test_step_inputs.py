"""What a captured decode step reads and writes beside the model, and warm-up, in the interpreter."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.kv.layout import KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.triton.batch.decode_inputs import NO_ROW, RING_SIZE, change_tables, gather_inputs, publish_tokens
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.launch import compile_workers
from tokenmill.ops.triton.launch.kernel import compile_in_parallel
from tokenmill.runner.decode_graphs import DecodeGraphs, PinnedStepInputs, RowTables
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.runner.warmup import WarmUp
from tokenmill.weights.dummy import dummy_weights

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 90, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False,
    "hidden_act": "silu", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
}  # fmt: skip


def test_every_ring_slot_passes_tokens_to_the_next_step() -> None:
    """Each slot of the ring is used in turn, and the next step reads the tokens of the one before."""
    tables = torch.randint(1, 99, (2, 4, 5), dtype=torch.int32)
    newest = torch.tensor([7, 8, 9, 10])
    inputs = PinnedStepInputs(4, torch.device("cpu"))
    with patch("torch.cuda.Event"):
        for number in range(2 * RING_SIZE + 1):
            before = newest.tolist()
            arrived = inputs.write(3, [2, 0], [17, 6], [-1, 55], [3, number], [0.1, number / 7])
            found = gather_inputs(3, inputs.mailbox, tables, newest, 4)
            assert found.rows.tolist() == [2, 0, NO_ROW] and found.indices.tolist() == [3, number, 0]
            assert found.uniforms.tolist()[:2] == [0.1, number / 7]
            assert found.token_ids.tolist() == [before[2], 55, 0] and found.contexts.tolist() == [18, 7, 0]
            publish_tokens(found, torch.tensor([41 + number, 42, 43]), inputs.mailbox, newest)
            assert arrived.tolist() == [41 + number, 42, 43] and newest.tolist() == [42, 8, 41 + number, 10]
            if number % 5:  # otherwise as if interrupted right after the launch
                inputs.launched()
    expected = [[int(tables[g, 2, 4]) * 4 + 1, int(tables[g, 0, 1]) * 4 + 2, 0] for g in range(2)]
    assert found.slots.tolist() == expected
    assert torch.equal(found.tables[:, 0], tables[:, 2]) and torch.equal(found.tables[:, 1, :2], tables[:, 0, :2])
    publish_tokens(gather_inputs(3, inputs.mailbox, tables, newest, 4), None, inputs.mailbox, newest)
    assert int(inputs.mailbox.turn) == 2 and newest.tolist() == [42, 8, 41 + number, 10]


def test_block_tables_are_changed_in_parts() -> None:
    rows = RowTables(2, 4, 300, torch.device("cpu"))
    expected = torch.zeros(2, 4, 300, dtype=torch.int32)
    with patch("torch.cuda.Event"):
        for number in range(RING_SIZE + 1):
            blocks = list(range(1 + number, 291))  # more than one program copies, and fewer
            rows.change([(1, 2, 7, blocks), (0, 3, 299, [number])])
            expected[1, 2, 7 : 7 + len(blocks)], expected[0, 3, 299] = torch.tensor(blocks), number
            assert torch.equal(rows.tables, expected)
        rows.change([])


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are asked for beforehand, as in a fast start."""
    monkeypatch.setattr(compile_workers, "_is_enabled", True)


@pytest.mark.usefixtures("workers")
def test_nothing_runs_while_kernels_are_only_compiled() -> None:
    tables = torch.zeros(3, dtype=torch.int32)
    compile_in_parallel(lambda: change_tables(torch.tensor([[0, 1]] * 2), tables)).join()
    assert not tables.any()


@pytest.mark.usefixtures("workers")
def test_warm_up_compiles_every_kind_of_step_and_runs_none() -> None:
    spec = spec_from_hf(MOE)
    model = Decoder(spec, Loader(dummy_weights(spec), build_ops(), torch.float32, torch.device("cpu")), 200)
    storage = KVStorage(KVLayout.from_spec(spec), 1, 16, torch.device("cpu"))
    with patch("torch.cuda.graph_pool_handle"):  # graphs themselves only a GPU can capture
        graphs = DecodeGraphs(model, storage, DeviceSampler(90, 6, storage.device), 6, 13, 200)
    warm_up = WarmUp(model, storage, graphs, 6, 200)
    idle_tasks: list[str] = []
    warm_up.compile_first(64, lambda: idle_tasks.append("done"))
    assert idle_tasks == ["done"]
    warm_up.compile_rest()
    assert not any(storage.layer(number).keys.any() for number in range(spec.num_layers)), "a kernel ran"
