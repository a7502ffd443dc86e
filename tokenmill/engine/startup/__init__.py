"""Start-up tricks: all that shorten a start by relying on internals of torch, Triton or the system.

    core_prestart        the core's process is started before the command line is read       run, chat, serve
    torch_import         torch's libraries are loaded beside other work; it is imported without its meta kernels and
                         without garbage collection; the GPU's context is made meanwhile
    triton_start         Triton's own preparations run in threads, kernels are compiled by copies of this process
    garbage_collection   collector settings for processes that serve streams

One switch, `--fast-start/--no-fast-start` (setting `fast_start`), turns the first three off. It is on in the processes
of the command line and in a core's own process. A Python program that imports the library, or opens an `LLM` in its own
process, gets none of it unless it asks with `fast_start=True`. A trick runs only with versions that it was tested with;
with others the start takes the ordinary way, and a debug line says so.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path

log = logging.getLogger(__name__)

TESTED = {"torch": ("2.11", "2.13"), "triton": ("3.6",)}
VERSION_FILES = {"torch": "version.py", "triton": "__init__.py"}


def is_tested(package: str) -> bool:
    """Whether the installed version is one that the tricks were tested with."""
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
