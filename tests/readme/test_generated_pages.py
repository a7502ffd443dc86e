"""Pages that are made from the code are up to date, and name everything they should."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_writer() -> ModuleType:
    found = importlib.util.spec_from_file_location("write_docs", ROOT / "tools" / "write_docs.py")
    assert found is not None and found.loader is not None
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


WRITER = load_writer()


@pytest.mark.parametrize("name", WRITER.PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    kept = (ROOT / name).read_text(encoding="utf-8")
    assert kept == WRITER.PAGES[name](), "run python tools/write_docs.py"


def test_every_environment_variable_that_is_read_is_described() -> None:
    settings = {
        f"TOKENMILL_{WRITER.flag_name(section, name).replace('-', '_').upper()}"
        for section in WRITER.SECTIONS
        for name in WRITER.setting_names(section)
    }
    assert WRITER.environment_names() - settings - set(WRITER.ENVIRONMENT) == set()


def test_every_model_that_is_only_planned_has_words() -> None:
    planned = set(WRITER.outlines.LAYERS) - set(WRITER.families.BY_MODEL_TYPE)
    assert planned <= set(WRITER.PLANNED)
