"""Kernels that no GPU has run yet are chosen only if it is asked for."""

from __future__ import annotations

import pytest

from tokenmill.arch.unproven import TRIALS, VARIABLE, is_chosen, not_chosen
from tokenmill.errors import InvalidConfig


def test_they_are_chosen_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    unproven = {name for name, trial in TRIALS.items() if not trial.proven_on}
    assert {name for name, _ in not_chosen()} == unproven and "gpu_ranks" in unproven
    monkeypatch.setenv(VARIABLE, "gpu_ranks")
    assert is_chosen("gpu_ranks") and {name for name, _ in not_chosen()} == unproven - {"gpu_ranks"}
    monkeypatch.setenv(VARIABLE, "1")
    assert is_chosen("gpu_ranks") and not list(not_chosen())
    monkeypatch.setenv(VARIABLE, "fp9")
    with pytest.raises(InvalidConfig, match="fp9"):
        is_chosen("gpu_ranks")
