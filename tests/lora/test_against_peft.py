"""Adapters of every kind that PEFT writes, compared with what PEFT computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.adapted_models import adaptable_model
from tests.support.peft_cases import CASES, error_of_logits, model_folder

TOLERANCE = 2e-4


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "cpu"])
@pytest.mark.parametrize("title", CASES)
def test_logits_are_those_of_peft(title: str, backend: str, shared_dir: Path, tmp_path: Path) -> None:
    loaded = adaptable_model(model_folder(shared_dir, title), backend, 2)
    assert error_of_logits(title, loaded, tmp_path) < TOLERANCE
