"""Availability of the native kernels, which is reported with a reason; the best instruction set comes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.engine.llm import LLM
from tokenmill.ops.cpu import availability


def test_absence_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(availability, "import_module", missing)
    availability._load.cache_clear()
    try:
        found, reason = availability.is_available()
        assert not found
        assert "compiler" in reason
        with pytest.raises(RuntimeError, match="reinstall"):
            availability.native()
    finally:
        availability._load.cache_clear()


def test_a_start_without_kernels_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stories_dir: Path
) -> None:
    monkeypatch.setattr(availability, "is_available", lambda: (False, "the native kernels were not built"))
    llm = LLM(stories_dir, max_context=64)
    assert "the native kernels were not built; computing with torch instead" in caplog.text
    assert any("reference" in reason for reason in llm.core.info.reasons)
    caplog.clear()
    LLM(stories_dir, max_context=64, backend="reference")  # asked for: nothing to warn of
    assert caplog.text == ""


@pytest.mark.skipif(not availability.is_available()[0], reason="native kernels were not built")
def test_the_best_instruction_set_is_used() -> None:
    assert availability.instruction_set() == availability.instruction_sets()[0]
    assert availability.instruction_sets()[-1] == "portable"
