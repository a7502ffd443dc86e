"""How many KV blocks fit. Pure arithmetic, no torch: the planner's estimate and the engine's allocation are this."""

from __future__ import annotations

from math import ceil

from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import KVLayout


def blocks_for_context(layout: KVLayout, context: int, block_size: int, max_chunk: int = 1) -> int:
    """Blocks that one sequence of `context` tokens holds at most, all KV groups together.

    A window group holds what the queries of one chunk see:  [ window - 1 tokens before | max_chunk tokens ], which may
    begin anywhere in a block.
    """
    full = ceil(context / block_size)
    return sum(
        full if window is None else min(full, ceil((window - 1 + max_chunk - 1) / block_size) + 1)
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

    Too little memory for even one full context is an error here, at load, not a surprise in the middle of an answer.
    """
    block_bytes = layout.block_bytes(block_size, dtype_bytes)
    fitting = int(free_bytes * memory_fraction) // block_bytes
    for_one = blocks_for_context(layout, max_context, block_size, max_chunk)
    if fitting < for_one + 1:
        raise InvalidConfig(
            f"the KV cache may take {int(free_bytes * memory_fraction) / 2**20:.0f} MiB, but one context of "
            f"{max_context} tokens needs {(for_one + 1) * block_bytes / 2**20:.0f} MiB",
            param="max_context",
            hint="lower max_context, or raise memory_fraction",
        )
    return min(fitting, for_one * max_rows + 1)
