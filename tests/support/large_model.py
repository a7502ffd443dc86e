"""Logits of three layers of an 8B model on a GPU."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import DTYPES, KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.ops.triton.build import build_ops
from tokenmill.runner.inputs import build_batch
from tokenmill.types import RowPlan
from tokenmill.weights.dummy import dummy_weights
from tokenmill.weights.source import WeightSource

SPEC = spec_from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
)


def logits(
    backend: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    *,
    deterministic: bool = False,
    source: WeightSource | None = None,
) -> torch.Tensor:
    """Return the logits of a long prompt, of a short one, and of one more token of each."""
    device, block = torch.device("cuda"), 16
    ops = build_ops(deterministic=deterministic) if backend == "triton" else REFERENCE_OPS
    model = Decoder(SPEC, Loader(source or dummy_weights(SPEC, device=device), ops, dtype, device))
    names = {kept: name for name, kept in DTYPES.items()}
    storage = KVStorage(KVLayout.from_spec(SPEC, CacheDtypes(names[kv_dtype or dtype])), 200, block, device)
    tables = np.arange(1, 181, dtype=np.int32).reshape(1, 2, 90)
    tokens = torch.randint(0, 32000, (1500,), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for rows in (
        [RowPlan(row=1, start=0, token_ids=tokens[:37]), RowPlan(row=0, start=0, token_ids=tokens[:1300])],
        [RowPlan(row=1, start=37, token_ids=tokens[37:38]), RowPlan(row=0, start=1300, token_ids=tokens[1300:1400])],
        [RowPlan(row=1, start=38, token_ids=tokens[38:39])],
    ):
        wanted = [[len(row.token_ids) - 1] for row in rows]
        batch = build_batch(rows, wanted, tables, block, device)
        found.append(model.logits(model.forward(batch, storage)).float().cpu())
    return torch.cat(found)


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.float() - exact).norm() / exact.norm())
