"""Sizes of files that are not here, against files that are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.arch.cost import gguf_weight_parts
from tokenmill.arch.gguf_file import read_gguf
from tokenmill.arch.gguf_mixes import file_bytes, mixed_parts, stored_bytes
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import TensorSpec
from tokenmill.cli.store_verbs import planned_bytes
from tokenmill.store.catalog import load_catalog


def require_same_size(path: Path) -> None:
    spec = read_spec(path)
    found = mixed_parts(spec, "Q4_K_M")
    assert found == gguf_weight_parts(read_gguf(path))
    assert file_bytes(found, spec.vocab_size) == pytest.approx(path.stat().st_size, rel=0.02)


def test_a_mixed_file_has_the_size_that_is_computed(gemma3_path: Path) -> None:
    require_same_size(gemma3_path)  # rows of 640, which no block of 256 fits


@pytest.mark.slow
def test_another_mixed_file_has_the_size_that_is_computed(qwen_coder_path: Path) -> None:
    require_same_size(qwen_coder_path)


def test_tensors_that_are_not_quantised() -> None:
    assert stored_bytes(TensorSpec("layers.0.router.weight", (128, 2048), "linear"), "Q4_K") == 4 * 128 * 2048
    assert stored_bytes(TensorSpec("final_norm.weight", (2048,), "vector"), "Q4_K") == 4 * 2048
    assert stored_bytes(TensorSpec("layers.0.q.weight", (2, 512), "linear"), "Q4_K") == 4 * 144
    assert stored_bytes(TensorSpec("layers.0.q.weight", (2, 896), "linear"), "Q4_K") == 56 * 22  # Q5_0


def test_the_catalog_knows_how_large_its_files_are() -> None:
    published = {"qwen2.5-coder:1.5b": 1_117_320_768, "qwen2.5:0.5b": 491_400_064, "tinyllama:1.1b": 668_788_096}
    for name, num_bytes in published.items():
        assert planned_bytes(name) == pytest.approx(num_bytes, rel=0.002), name
    assert all(planned_bytes(name) > 80e6 for name in load_catalog())
