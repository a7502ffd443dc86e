"""Parameter counts and KV bytes equal to torch's own, for a random instance of every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.dense_models import DENSE
from tests.support.hybrids import RANDOM
from tests.support.tiny_models import FAMILIES, make_reference
from tokenmill.arch.cost import kv_bytes, num_parameters
from tokenmill.planner.model import find_model

COPIED_HEADS = {"falcon_40b": 2, "falcon_11b": 2}  # transformers caches a key head once for each query head


def kept_bytes(layer: Any) -> int:
    """Bytes of a layer's cache in transformers, without the oldest input of a convolution: unneeded."""
    if hasattr(layer, "conv_states"):
        sums = (states.nbytes for states in getattr(layer, "recurrent_states", {}).values() if states is not None)
        return sum(states[..., 1:].numel() * states.itemsize for states in layer.conv_states.values()) + sum(sums)
    return int(layer.keys.nbytes + layer.values.nbytes)


@pytest.mark.parametrize("family", [*FAMILIES, *DENSE, *RANDOM])
def test_counts_are_torch_s_own(family: str, tmp_path: Path) -> None:
    reference = make_reference(family)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(reference.config.to_dict(), default=str))
    spec = find_model(str(file)).spec
    # Biases of the choice of experts, and numbers of activations, are buffers.
    buffers = [one for name, one in reference.named_buffers() if name.endswith(("_bias", "act_fn.beta", "act_fn.eps"))]
    num_unused = 2 * spec.hidden_size if family in ("opt", "biogpt") else 0  # rows of positions
    assert num_parameters(spec) + num_unused == sum(p.numel() for p in (*reference.parameters(), *buffers))
    with torch.inference_mode():
        output = reference(torch.arange(3, 10)[None], use_cache=True)
    cache = output.cache_params if "cache_params" in output else output.past_key_values
    num_copies = COPIED_HEADS.get(family, 1)
    assert kv_bytes(spec, "float32", 7) * num_copies == sum(map(kept_bytes, cache.layers))
