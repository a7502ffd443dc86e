"""Kernels of DeepSeek V4's layers, compiled for Hopper in the model's own dimensions: the interpreter takes much that a
compiler refuses, and knows no shared memory."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from tests.support.compiled_launches import HOPPER, HOPPER_SHARED, launches_on_hopper
from tests.support.warm_up import compile_at_once, warm_up_for

KERNELS = {
    "_prepare", "_prepare_index", "_make_entry", "_attend", "_merge", "_multiply_groups", "_connect", "_read",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_are_compiled_and_fit(
    deterministic: bool, shared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = json.loads((shared_dir / "configs" / "deepseek-ai--DeepSeek-V4-Flash_config.json").read_text())
    del config["quantization_config"]
    config |= {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1, "n_routed_experts": 8}
    dtype = torch.float32 if deterministic else torch.bfloat16
    with (
        launches_on_hopper() as launches,
        patch.object(torch.Tensor, "pin_memory", lambda self: self),
        patch("tokenmill.runner.warmup.compile_in_parallel", compile_at_once),
    ):
        warm_up = warm_up_for(config, block_size=128, dtype=dtype, deterministic=deterministic)
        for batch in (warm_up._batch([(700, 1), (5, 2048)]), warm_up.decoding(1), warm_up.decoding(100)):
            warm_up.compute(batch)
    found = [one for one in launches.values() if one.name in KERNELS]
    assert {one.name for one in found} == KERNELS - ({"_merge"} if deterministic else set())
    for one in found:
        assert one.shared_bytes(HOPPER) <= HOPPER_SHARED, one.form
