"""Tiles of queries: each row's queries are cut into tiles of equal size, one program each.

A tile's row is found on the device, since the host does not know the lengths of a captured step's rows: the tiles of
row r begin at (its first query) // QUERIES + r, which reserves space for each row's last, partly filled tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of_tile(query_starts, tile, first_row, num_rows, QUERIES: tl.constexpr):
    """Return a tile's row, the row's first query, its number of queries, and how many of them precede the tile. Tiles
    are counted from `first_row` on; an unused tile is beyond the end of its row."""
    origin = tl.load(query_starts + first_row)
    low_row, high_row = first_row, num_rows
    while high_row - low_row > 1:  # the last row whose tiles begin at or before this one
        middle = (low_row + high_row) // 2
        if (tl.load(query_starts + middle) - origin) // QUERIES + (middle - first_row) <= tile:
            low_row = middle
        else:
            high_row = middle
    begin = tl.load(query_starts + low_row)
    length = tl.load(query_starts + low_row + 1) - begin
    offset = (tile - (begin - origin) // QUERIES - (low_row - first_row)) * QUERIES
    return low_row, begin, length, offset
