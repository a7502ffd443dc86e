"""The environment in which commands run: a store of their own and no hub."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.cli_process import ROOT


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
    home = {"TOKENMILL_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "HF_ENDPOINT": "http://127.0.0.1:9"}
    return {**kept, **home, "COLUMNS": "100"}
