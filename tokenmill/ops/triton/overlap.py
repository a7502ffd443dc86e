"""One kernel begins while the one before it ends (programmatic dependent launch, NVIDIA from Hopper on).

Every kernel that takes part says at its beginning that its successor may be brought onto the chip, and waits before it
touches anything its predecessors wrote. What it needs from elsewhere, weights above all, it may fetch before that.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        gdc_wait()


@cache
def overlaps() -> bool:
    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)


def launch_options() -> dict[str, Any]:
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps() else {"OVERLAPS": False}
