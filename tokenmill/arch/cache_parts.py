"""The cache fields of a mixer, as data: what it caches of earlier tokens, in three kinds.

    paged   every token stores values in its sequence's blocks, for all later tokens or those of a window
            (keys and values of attention, inputs of a short convolution)
    state   a sum over all tokens so far, stored only at absolute multiples of CHUNK tokens, each in its own slot
    cells   values that a token stores for the others of its chunk, until the next state includes them

A recurrent mixer has a state and cells. A token's result depends on the state before its chunk and on the cells of
earlier tokens in its chunk, never on how steps split the sequence:

    tokens   0 ............. 63 | 64 ........... 127 | 128 ... 150 |
    states                      S1                   S2                 written when tokens 63 and 127 are computed
    cells                                            [128 ... 150]      read by token 150, with S2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CHUNK = 64  # tokens between two states
CacheDtype = Literal["cache", "compute"]
CacheKind = Literal["paged", "cells", "state"]


@dataclass(frozen=True)
class CacheField:
    """One tensor that a layer caches.

    `shape` is that of one token's (or one state's) values; vectors along the last axis have one scale each if a value
    takes one byte. `dtype` "cache" is the configured dtype of keys and values; "compute" is that of activations, for
    values that must be restored exactly as computed. A layout replaces both by real types.
    """

    name: str
    shape: tuple[int, ...]
    dtype: CacheDtype | str = "cache"


@dataclass(frozen=True)
class CachePart:
    """Fields of one kind; `window` is how far back a token can see in paged ones (None: to the beginning)."""

    kind: CacheKind
    fields: tuple[CacheField, ...]
    window: int | None = None
