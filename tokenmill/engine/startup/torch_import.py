"""Torch's import, a second and more of every start, made shorter in three ways.

Its libraries, a quarter of that time, are loaded by a thread while the front reads the tokenizer (`libraries_ahead`);
the garbage collector does not walk the thousands of new modules again and again (`uncollected`); and what only tensors
without memory need, nearly half of it, waits for somebody who asks (`without_meta_kernels`).
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from tokenmill.ops.cpu.availability import load_library

LIBRARY = Path("lib/libtorch_cpu.so")
META_KERNELS = "_meta_registrations"  # shapes of a thousand ops in Python; compilers and device="meta" use them


@contextmanager
def preload_libraries() -> Iterator[None]:
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
def gc_paused() -> Iterator[None]:
    """Inside, nothing is collected: an import makes many objects and hardly any garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def without_meta_kernels() -> Iterator[None]:
    """Inside, torch is imported without its kernels for tensors without memory; whoever imports their module later gets
    them. In a process of our own nobody does. Others may have tensors on "meta" and not know that anything is missing:
    there `import_meta_kernels` must follow, while the start waits for something else, or at its end."""
    name = f"torch.{META_KERNELS}"
    if "torch" in sys.modules:
        yield
        return
    sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]
        vars(sys.modules.get("torch", ModuleType("torch"))).pop(META_KERNELS, None)


def import_meta_kernels() -> None:
    with gc_paused():
        import_module(f"torch.{META_KERNELS}")
