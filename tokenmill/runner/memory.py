"""How many KV blocks fit. Pure arithmetic, no torch: the planner's estimate and the engine's allocation are this."""

from __future__ import annotations

from math import ceil

from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import KVLayout


def blocks_for_context(layout: KVLayout, context: int, block_size: int, max_chunk: int = 1) -> int:
    """Blocks that one sequence of `context` tokens holds at most, all KV groups together.

    A window group holds what the queries of one chunk see:  [ window - 1 tokens before | max_chunk tokens ], which may
    begin anywhere in a block, hence one block more. The scheduler admits a request by the same count.
    """
    full = ceil(context / block_size)
    return sum(
        full if window is None else min(full, ceil((window - 1 + max_chunk) / block_size) + 1)
        for window in layout.windows
    )


def num_blocks_that_fit(
    layout: KVLayout,
    *,
    free_bytes: int,
    memory_fraction: float,
    block_size: int,
    dtype_bytes: int,
    max_context: int,
    max_rows: int,
    max_chunk: int,
) -> int:
    """As many blocks as the share of free memory holds, but no more than `max_rows` full contexts can use.

    The first block is nobody's: tables point to it where a window has passed.
    """
    affordable = int(free_bytes * memory_fraction) // layout.block_bytes(block_size, dtype_bytes)
    useful = max_rows * blocks_for_context(layout, max_context, block_size, max_chunk) + 1
    num_blocks = min(affordable, useful)
    if num_blocks < 1 + len(layout.groups):
        raise InvalidConfig(
            f"no room for a KV cache: {free_bytes / 2**20:.0f} MiB are free after the weights",
            param="memory_fraction",
            hint="use a smaller model or more quantised weights",
        )
    return num_blocks
