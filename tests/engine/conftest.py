"""Engines for the tests: the tiny trained model in this process, one thread, since the tests share few cores; and
models that say what a test wants, with the chat templates of real families."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.speaker import Speaker
from tests.support.tool_families import FAMILIES, family_speaker
from tokenmill import LLM


@pytest.fixture(scope="session")
def stories(stories_dir: Path) -> LLM:
    return LLM(str(stories_dir), threads=1)


@pytest.fixture(scope="module", params=list(FAMILIES))
def speaker(request: pytest.FixtureRequest, shared_dir: Path) -> Speaker:
    return family_speaker(shared_dir, request.param)


@pytest.fixture(scope="module")
def hermes(shared_dir: Path) -> Speaker:
    return family_speaker(shared_dir, "Qwen-Qwen2.5-7B-Instruct")


@pytest.fixture(scope="module")
def qwen3(shared_dir: Path) -> Speaker:
    return family_speaker(shared_dir, "Qwen-Qwen3-0.6B")
