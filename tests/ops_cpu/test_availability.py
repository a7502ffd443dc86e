"""Whether the kernels are here is said with a reason, and the best instruction set comes first."""

from __future__ import annotations

import pytest

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


@pytest.mark.skipif(not availability.is_available()[0], reason="native kernels were not built")
def test_the_best_instruction_set_is_used() -> None:
    assert availability.instruction_set() == availability.instruction_sets()[0]
    assert availability.instruction_sets()[-1] == "portable"
