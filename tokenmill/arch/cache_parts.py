"""The cache fields of a mixer, as data: what it keeps of the tokens computed so far, in three kinds.

    paged   every token leaves values in blocks of its sequence, for all later tokens or those of a window
            (keys and values of attention, inputs of a short convolution)
    state   a sum over all tokens so far, kept at absolute multiples of CHUNK tokens only, each in a slot of its own
    cells   what a token leaves for the others of its chunk, until the next state has it

A recurrent mixer has a state and cells. A token's result depends on the state before its chunk and on the cells of the
chunk before it, never on how steps cut the sequence:

    tokens   0 ............. 63 | 64 ........... 127 | 128 ... 150 |
    states                      S1                   S2                 written when tokens 63 and 127 are computed
    cells                                            [128 ... 150]      what token 150 reads beside S2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CHUNK = 64  # tokens between two states
CacheDtype = Literal["cache", "compute"]
CacheKind = Literal["paged", "cells", "state"]


@dataclass(frozen=True)
class CacheField:
    """One tensor that a layer keeps of its tokens.

    `shape` is what one token (or one state) leaves behind; its last axis is a vector, which has one scale where a value
    takes a byte. `dtype` "cache" is the one that the engine is told to keep keys and values in; "compute" is that of
    activations, for values that must come back exactly as they were computed. A layout replaces both by real types.
    """

    name: str
    shape: tuple[int, ...]
    dtype: CacheDtype | str = "cache"


@dataclass(frozen=True)
class CachePart:
    """Fields of one kind; `window` is how far back a token looks into paged ones (None: to the beginning)."""

    kind: CacheKind
    fields: tuple[CacheField, ...]
    window: int | None = None
