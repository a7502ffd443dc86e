"""Triton's interpreter without the work it repeats, which takes most of its time.

The interpreter replaces every builtin of `triton.language` before each call of a function, even by a kernel that has
replaced them already, and looks for them in all members of the module each time. Here they are replaced when a kernel
starts, and found once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def patched_once_a_kernel() -> Iterator[None]:
    if not hasattr(interpreter, "_LangPatchScope"):  # an older version, which patches in another way
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_get_np_dtype", with_memory(interpreter._get_np_dtype))
        patch.setattr(interpreter, "_patch_lang", without_repeats(interpreter._patch_lang))
        patch.setattr(interpreter, "_patch_builtin", patch_known_builtins)
        yield


def with_memory(get_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Remember the answers for numbers; types of pointers can't be hashed."""
    known = functools.cache(get_dtype)
    return lambda dtype: known(dtype.scalar) if type(dtype.scalar) is tl.dtype else get_dtype(dtype)


def without_repeats(patch_language: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def patch(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if modules and not any(tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return patch_language(function)

    return patch


@functools.cache
def builtin_names(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def patch_known_builtins(package: Any, builder: Any, scope: Any) -> None:
    for name in builtin_names(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)
