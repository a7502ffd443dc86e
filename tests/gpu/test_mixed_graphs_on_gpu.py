"""Captured steps of chunks beside decoding rows: the same states as launched one by one, step after step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.triton.build import build_ops
from tokenmill.runner.decode_graphs import DecodeGraphs
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.runner.inputs import build_batch
from tokenmill.runner.mixed_graphs import MixedGraphs
from tokenmill.runner.mixed_sizes import can_mix
from tokenmill.types import PENDING, RowPlan
from tokenmill.weights.dummy import dummy_weights

pytestmark = pytest.mark.gpu

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
MIXTURE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 4,
    "moe_intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
ROWS, BLOCK, CONTEXT = 48, 16, 4096


# Rounding to bfloat16 would let the two ways choose different experts.
@pytest.mark.parametrize(("config", "dtype"), [(LLAMA, "bfloat16"), (MIXTURE, "float32")], ids=["dense", "mixture"])
@torch.inference_mode()
def test_replayed_steps_compute_what_launched_ones_do(config: dict[str, Any], dtype: str) -> None:
    device = torch.device("cuda")
    spec = spec_from_hf(config)
    model = Decoder(spec, Loader(dummy_weights(spec), build_ops(), getattr(torch, dtype), device), CONTEXT)
    assert can_mix(model.spec)
    layout = KVLayout.from_spec(spec, CacheDtypes(dtype, dtype))
    num_blocks = CONTEXT // BLOCK
    storage = KVStorage(layout, 1 + ROWS * num_blocks, BLOCK, device)
    graphs = DecodeGraphs(model, storage, DeviceSampler(spec.vocab_size, ROWS, device), ROWS, num_blocks, CONTEXT)
    mixed = MixedGraphs(model, storage, graphs, ROWS, CONTEXT)
    tables = torch.arange(1, 1 + ROWS * num_blocks, dtype=torch.int32).view(1, ROWS, num_blocks)
    graphs.rows.tables.copy_(tables)
    graphs.newest.copy_(torch.arange(ROWS) + 40)
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(0, spec.vocab_size, (count,), generator=generator).tolist()

    for number in range(spec.num_layers):
        for part in (storage.layer(number).keys, storage.layer(number).values):
            part.normal_()
    steps = ((3, [20]), (30, [100, 40]), (33, [5]), (3, [31]), (30, [128]), (0, [100]), (0, [17, 40]))
    for num_single, chunks in steps:
        plans = [RowPlan(row=row, start=50 * row, token_ids=ids(1), sample=True) for row in range(num_single)]
        plans += [
            RowPlan(row=ROWS - 1 - number, start=3000 * (number == 0), token_ids=ids(count))
            for number, count in enumerate(chunks)
        ]
        wanted = [[len(plan.token_ids) - 1] for plan in plans]
        plain = model.forward(build_batch(plans, wanted, tables.numpy(), BLOCK, device), storage)
        if num_single:
            graphs.newest[1] = plans[1].token_ids[0]
            plans[1] = RowPlan(row=1, start=50, token_ids=[PENDING], sample=True)  # what only the device knows
        found = mixed.hidden(plans)
        error = (found.float() - plain.float()).norm(dim=1) / plain.float().norm(dim=1)
        assert float(error.max()) < 0.03, (num_single, chunks, error.tolist())
