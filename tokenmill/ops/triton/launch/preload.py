"""One-time initialisation of libraries in threads, while other parts of startup wait for the device.

    keys       Triton's cache key includes a hash of all of its own files, 400 MB
    driver     Triton compiles a helper in C and queries the version of ptxas
    products   cuBLAS is loaded, which takes 80 ms, after the device's free memory has been measured

None holds the GIL for long; together they take a second.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache

import torch
from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver


@cache
def begin() -> tuple[Future[str], ...]:
    pool = ThreadPoolExecutor(2, thread_name_prefix="triton")
    try:
        return tuple(pool.submit(part) for part in (triton_key, _driver_key))
    finally:
        pool.shutdown(wait=False)


def finish() -> None:
    """Wait until both have ended. If one failed, the first compilation raises the error again."""
    wait(begin())


_products: list[threading.Thread] = []


def begin_products(device: torch.device) -> None:
    """Start to load cuBLAS in a thread; `finish_products` must be called before the first product."""
    _products.append(threading.Thread(target=_multiply, args=(device,), name="cublas"))
    _products[-1].start()


def finish_products(device: torch.device) -> None:
    """Wait until cuBLAS is loaded, or load it. The handle and the workspace of a thread that has ended are reused by
    the next thread."""
    if not _products:
        _multiply(device)
    while _products:
        _products.pop().join()


def _multiply(device: torch.device) -> None:
    any_matrix = torch.zeros(64, 64, dtype=torch.bfloat16, device=device)
    torch.mm(any_matrix, any_matrix)


def _driver_key() -> str:
    return str(make_backend(driver.active.get_current_target()).hash())
