"""The versions of torch and Triton that the start-up optimisations were tested with."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path

log = logging.getLogger(__name__)

TESTED = {"torch": ("2.11", "2.13"), "triton": ("3.6",)}
VERSION_FILES = {"torch": "version.py", "triton": "__init__.py"}


def is_tested(package: str) -> bool:
    """Tell whether the start-up optimisations were tested with the installed version."""
    version = installed_version(package)
    is_known = version is not None and ".".join(version.split(".")[:2]) in TESTED[package]
    if not is_known:
        tested = ", ".join(TESTED[package])
        log.debug("%s %s: start-up optimisations are off, they were tested with %s", package, version, tested)
    return is_known


def installed_version(package: str) -> str | None:
    """Return the installed version, read from the package's own file: importing the package is too slow, and the
    standard library's metadata reader takes longer than most of the optimisations save."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    try:
        text = Path(found.origin).with_name(VERSION_FILES[package]).read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^__version__ = ['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None
