"""Tokenmill: LLM inference and serving. `from tokenmill import LLM, AsyncEngine, SamplingParams`.

Names are resolved on first use, so that `import tokenmill` costs nothing and the planner runs without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenmill.version import VERSION

if TYPE_CHECKING:
    from tokenmill.engine.async_engine import AsyncEngine
    from tokenmill.engine.llm import LLM
    from tokenmill.engine.results import CompletionOutput, EmbeddingOutput, RequestOutput
    from tokenmill.params import BeamParams, Guided, SamplingParams, Watermark

__version__ = VERSION
__all__ = ["LLM", "AsyncEngine", "BeamParams", "CompletionOutput", "EmbeddingOutput", "Guided", "RequestOutput",
           "SamplingParams", "Watermark", "__version__"]  # fmt: skip

_HOME = {
    "LLM": "tokenmill.engine.llm",
    "AsyncEngine": "tokenmill.engine.async_engine",
    "CompletionOutput": "tokenmill.engine.results",
    "EmbeddingOutput": "tokenmill.engine.results",
    "RequestOutput": "tokenmill.engine.results",
    "SamplingParams": "tokenmill.params",
    "BeamParams": "tokenmill.params",
    "Guided": "tokenmill.params",
    "Watermark": "tokenmill.params",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, for tab completion: what was not used yet has them too."""
    return sorted(__all__)
