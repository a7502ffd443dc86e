"""Torch's import, a second and more of every start, made shorter in two ways.

Its libraries, a quarter of that time, are loaded by a thread while the front reads the tokenizer (`libraries_ahead`);
and the garbage collector does not walk the thousands of new modules again and again (`uncollected`).
"""

from __future__ import annotations

import gc
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.ops.cpu.availability import load_library

LIBRARY = Path("lib/libtorch_cpu.so")


@contextmanager
def libraries_ahead() -> Iterator[None]:
    """Inside, torch's largest library is loaded beside what is done. Not the place to import compiled modules: the
    system loads one library at a time, and whoever asks for a second one waits."""
    path = _library()
    if path is None:
        yield
        return
    thread = threading.Thread(target=load_library, args=(path,), name="torch-libraries")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _library() -> str | None:
    """None where torch is not installed as usual; finding it must not import it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / LIBRARY
    return str(path) if path.is_file() else None


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, nothing is collected: an import makes many objects and hardly any garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
