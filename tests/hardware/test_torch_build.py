"""What torch was built for, without importing it."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path

import pytest
import torch

from tokenmill.hardware import torch_build


def test_the_installed_torch_says_the_same_of_itself() -> None:
    torch_build.torch_computes_on_gpus.cache_clear()
    assert torch_build.torch_computes_on_gpus() == (torch.version.cuda is not None or torch.version.hip is not None)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", True),
        ('cuda = None\nhip = "6.4.1"\n', True),
        (None, True),
    ],
)
def test_version_files(text: str | None, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if text is not None:
        (tmp_path / "version.py").write_text(text)
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(torch_build, "find_spec", lambda name: spec)
    torch_build.torch_computes_on_gpus.cache_clear()
    try:
        assert torch_build.torch_computes_on_gpus() is found
    finally:
        torch_build.torch_computes_on_gpus.cache_clear()
