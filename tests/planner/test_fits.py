"""What fits this machine: planned from files, estimated from the catalog's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.config import EngineConfig
from tokenmill.planner.fits import FitHere, bits_of
from tokenmill.store import load_catalog


@pytest.fixture(scope="module")
def here() -> FitHere:
    return FitHere(EngineConfig())


def test_every_entry_of_the_catalog_says_enough(here: FitHere) -> None:
    found = {name: here.of_catalog(name) for name in load_catalog()}
    assert None not in found.values()
    small, large = found["smollm2:135m"], found["llama3.1:8b"]
    assert small is not None and large is not None and not small["is_planned"]
    assert 5e9 < large["needs_bytes"] - small["needs_bytes"] < 8e9


def test_files_are_planned(here: FitHere, smollm2_path: Path) -> None:
    fit, rough = here.of_files("smollm2:135m", smollm2_path), here.of_catalog("smollm2:135m")
    assert fit is not None and rough is not None
    assert fit["is_planned"] and fit["tokens_s"] > 1
    assert 0.3 < rough["needs_bytes"] / fit["needs_bytes"] < 3, "the rule of thumb is not far off"
    name, available = here.device()
    assert name and available > 1e8


def test_what_can_not_be_read_is_not_planned(here: FitHere, tmp_path: Path) -> None:
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(b"GGUF" + b"\xff" * 64)
    assert here.of_files("x", damaged) is None and here.of_files("y", tmp_path / "nothing") is None
    assert here.of_catalog("no-such-model") is None


@pytest.mark.parametrize(("kind", "bits"), [("Q4_K_M", 4.85), ("Q8_0", 8.5), ("Q4_1", 4.5), ("F16", 16)])
def test_bits_of_types(kind: str, bits: float) -> None:
    assert bits_of(kind) == bits
