"""What is refused before anything is done: options that would do nothing, results that could not be written."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from tokenmill.errors import InvalidConfig

Needs = dict[str, tuple[bool, str]]  # field → whether it acts, what it needs to


def refuse_idle(settings: Any, needs: Needs) -> None:
    """An option that would do nothing is a mistake, and told before anything is sent."""
    for option in fields(settings):
        acts, wanted = needs.get(option.name, (True, ""))
        if not acts and getattr(settings, option.name) != option.default:
            raise InvalidConfig(f"--{option.name.replace('_', '-')} needs {wanted}", param=option.name)


def require_folder(file: Path | None, option: str) -> None:
    """Where a run's results are to go is looked at before it, not when hours of it would be lost."""
    if file is not None and (file.is_dir() or not file.resolve().parent.is_dir()):
        raise InvalidConfig(f"--{option} {file} is no file that can be written: there is no such folder", param=option)
