"""Steps of chunks beside decoding rows, as they are captured: in the interpreter each replay is the step itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.triton_inputs import assert_near
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.spec import MoeSpec
from tokenmill.kv.layout import KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.triton.build import build_ops
from tokenmill.runner.inputs import build_batch
from tokenmill.runner.mixed_graphs import MixedGraphs
from tokenmill.runner.mixed_sizes import CHUNKS, MAX_ALONE, MAX_PROMPTS, can_mix
from tokenmill.types import PENDING, RowPlan
from tokenmill.weights.dummy import dummy_weights

CPU = torch.device("cpu")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 90, "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
MIXTURE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
ROWS, BLOCK, MAX_BLOCKS = 12, 16, 20


def model_of(config: dict[str, Any], *, deterministic: bool = False) -> Decoder:
    spec, ops = spec_from_hf(config), build_ops(deterministic=deterministic)
    return Decoder(spec, Loader(dummy_weights(spec), ops, torch.float32, CPU), MAX_BLOCKS * BLOCK)


def filled_storage(layout: KVLayout) -> KVStorage:
    torch.manual_seed(1)
    storage = KVStorage(layout, 1 + ROWS * MAX_BLOCKS, BLOCK, CPU)
    cache = storage.layer(0)
    cache.keys.normal_()
    cache.values.normal_()
    return storage


def replayed(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    result = step()
    return lambda: result.copy_(step()), result


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("config", [LLAMA, MIXTURE], ids=["dense", "mixture"])
@torch.inference_mode()
def test_a_padded_step_computes_what_a_plain_one_does(config: dict[str, Any], is_deterministic: bool) -> None:
    model = model_of(config, deterministic=is_deterministic)
    layout = KVLayout.from_spec(model.spec)
    tables = torch.arange(1, 1 + ROWS * MAX_BLOCKS, dtype=torch.int32).view(1, ROWS, MAX_BLOCKS)
    newest = torch.arange(ROWS) + 40
    plans = [RowPlan(row=row, start=17 * row, token_ids=[5 + row], sample=True) for row in (4, 0, 9)]
    plans += [
        RowPlan(row=5 + number, start=200 * (number == 1) + number, token_ids=list(range(2 + 2 * number)))
        for number in range(1, 4)
    ]
    expected_storage, storage = filled_storage(layout), filled_storage(layout)
    wanted = [[len(plan.token_ids) - 1] for plan in plans]
    expected = model.forward(build_batch(plans, wanted, tables.numpy(), BLOCK, CPU), expected_storage)

    graphs: Any = SimpleNamespace(newest=newest, rows=SimpleNamespace(tables=tables), recorded_step=replayed)
    mixed = MixedGraphs(model, storage, graphs, ROWS, MAX_BLOCKS * BLOCK)
    newest[9] = plans[2].token_ids[0]
    plans[2] = RowPlan(row=9, start=17 * 9, token_ids=[PENDING], sample=True)  # what only the device knows
    assert mixed.takes(plans)
    assert_near(mixed.hidden(plans), expected, tolerance=1e-4)
    ours, theirs = storage.layer(0), expected_storage.layer(0)
    assert_near(ours.keys[1:], theirs.keys[1:])
    assert_near(ours.values[1:], theirs.values[1:])


@pytest.mark.parametrize("config", [LLAMA, MIXTURE], ids=["dense", "mixture"])
@torch.inference_mode()
def test_prompts_without_decoding_rows_compute_what_a_plain_step_does(config: dict[str, Any]) -> None:
    model = model_of(config)
    layout = KVLayout.from_spec(model.spec)
    tables = torch.arange(1, 1 + ROWS * MAX_BLOCKS, dtype=torch.int32).view(1, ROWS, MAX_BLOCKS)
    plans = [RowPlan(row=4, start=0, token_ids=list(range(20))), RowPlan(row=2, start=37, token_ids=[7, 8, 9])]
    expected_storage, storage = filled_storage(layout), filled_storage(layout)
    wanted = [[len(plan.token_ids) - 1] for plan in plans]
    expected = model.forward(build_batch(plans, wanted, tables.numpy(), BLOCK, CPU), expected_storage)

    rows = SimpleNamespace(tables=tables)
    graphs: Any = SimpleNamespace(newest=torch.zeros(ROWS, dtype=torch.int64), rows=rows, recorded_step=replayed)
    mixed = MixedGraphs(model, storage, graphs, ROWS, MAX_BLOCKS * BLOCK)
    assert not mixed.takes(plans), "not captured yet"
    next(capture for capture in mixed.captures() if capture.args == (0, 32))()  # type: ignore[attr-defined]
    assert mixed.takes(plans)
    assert_near(mixed.hidden(plans), expected, tolerance=1e-4)
    ours, theirs = storage.layer(0), expected_storage.layer(0)
    assert_near(ours.keys[1:], theirs.keys[1:])
    assert_near(ours.values[1:], theirs.values[1:])


def test_which_steps_and_models_have_graphs() -> None:
    graphs: Any = None
    mixed = MixedGraphs(graphs, graphs, graphs, 12, 64)
    single = RowPlan(row=0, start=3, token_ids=[1], sample=True)
    chunk = RowPlan(row=1, start=0, token_ids=[1] * 40)
    assert mixed.takes([single, chunk])
    assert not mixed.takes([chunk]), "for a prompt alone nobody waits, so that nothing is captured for it"
    assert not mixed.takes([single, *[chunk] * (MAX_PROMPTS + 1)])
    assert not mixed.takes([single, RowPlan(row=1, start=0, token_ids=[1] * 1000)])
    captures = [one.args for one in mixed.captures()]  # type: ignore[attr-defined]
    assert captures == [
        (singles, tokens) for tokens in CHUNKS for singles in (0, 8, 16) if singles or tokens <= MAX_ALONE
    ]
    dense, mixture = model_of(LLAMA).spec, model_of(MIXTURE).spec
    assert can_mix(dense) and can_mix(mixture)
    experts = mixture.layers[0].mlp
    assert isinstance(experts, MoeSpec)
    assert not can_mix(replace(dense, layers=(replace(dense.layers[0], side_experts=experts),)))
