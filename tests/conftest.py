"""Where the tests find real data; each fixture skips with a reason where it is absent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from real_models import fetched_model

from tokenmill.weights import packed_cache

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native", type=Path, help="compiled kernels to be tested instead of those that are installed")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("native")
    if path is not None:
        spec = spec_from_file_location("tokenmill.ops.cpu._native", path)
        assert spec is not None and spec.loader is not None
        sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])


@pytest.fixture(scope="session", autouse=True)
def nothing_packed_is_kept() -> Iterator[None]:
    """Large real models leave nothing in the user's store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_cache, "MIN_SOURCE_BYTES", sys.maxsize)
        yield


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    if not SHARED.is_dir():
        pytest.skip("the data folder ../shared is not here")
    return SHARED


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
