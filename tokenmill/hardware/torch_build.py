"""The platform that the installed torch was built for, read from its version file, because importing torch takes a
second."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

_PLATFORM = re.compile(r"^(?:cuda|hip)\b[^=\n]*=\s*['\"]", re.MULTILINE)  # a version, not None


@lru_cache(maxsize=1)
def torch_computes_on_gpus() -> bool:
    """Return whether torch is built with CUDA or ROCm; True where that can't be read, as a plan for a GPU needs no
    torch."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return True
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return True
    return _PLATFORM.search(text) is not None
