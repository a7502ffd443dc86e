"""Versions of torch and Triton that the start-up tricks were tested with; others take the ordinary way."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path

log = logging.getLogger(__name__)

TESTED = {"torch": ("2.11", "2.13"), "triton": ("3.6",)}
VERSION_FILES = {"torch": "version.py", "triton": "__init__.py"}


def is_tested(package: str) -> bool:
    """Return whether the installed version is one that the tricks were tested with."""
    version = installed_version(package)
    is_known = version is not None and ".".join(version.split(".")[:2]) in TESTED[package]
    if not is_known:
        log.debug("%s %s: start-up tricks are off, tested are %s", package, version, ", ".join(TESTED[package]))
    return is_known


def installed_version(package: str) -> str | None:
    """The version, read from the package's own file: importing it is what a fast start puts off, and the standard
    library's metadata reader takes longer than most tricks save."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    try:
        text = Path(found.origin).with_name(VERSION_FILES[package]).read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^__version__ = ['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None
