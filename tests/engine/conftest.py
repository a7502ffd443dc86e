"""Engines for the tests: the tiny trained model in this process, one thread, since the tests share few cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill import LLM


@pytest.fixture(scope="session")
def stories(stories_dir: Path) -> LLM:
    return LLM(str(stories_dir), threads=1)
