"""Where the tests find real data; each fixture skips with a reason where it is absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODELS = Path(os.environ.get("TOKENMILL_TEST_MODELS", Path.home() / ".cache" / "tokenmill-test-models"))


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    if not SHARED.is_dir():
        pytest.skip("the data folder ../shared is not here")
    return SHARED


def fetched_model(shared: Path, name: str) -> Path:
    """Path of a real model, fetched once into the test cache."""
    done = subprocess.run(
        [sys.executable, str(shared / "tools" / "get-model"), name, str(MODELS)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"model {name} could not be fetched: {done.stderr.strip()[-200:]}")
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def smollm2_path(shared_dir: Path) -> Path:
    return fetched_model(shared_dir, "smollm2")


@pytest.fixture(scope="session")
def gemma3_path(shared_dir: Path) -> Path:
    return fetched_model(shared_dir, "gemma3")


@pytest.fixture(scope="session")
def qwen_coder_path(shared_dir: Path) -> Path:
    return fetched_model(shared_dir, "qwen-coder")


@pytest.fixture(scope="session")
def stories_dir(shared_dir: Path) -> Path:
    """The trained 260K-parameter Llama in Hugging Face layout."""
    return shared_dir / "goldens" / "stories260K" / "hf"
