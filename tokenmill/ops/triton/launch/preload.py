"""Triton's one-time preparations, done by threads while other parts of a start wait for the device.

    keys      every kernel is looked up by a hash of all of Triton's own files, 400 MB
    driver    a helper in C is compiled, ptxas is asked for its version

Neither holds Python's lock for long; together they take a second.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache

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
    """Wait until both have ended. An error in them is raised again by the first compilation."""
    wait(begin())


def _driver_key() -> str:
    return str(make_backend(driver.active.get_current_target()).hash())
