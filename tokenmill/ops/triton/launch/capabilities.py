"""What the GPU at hand can do that not every one can. Whoever needs it asks here and has another way for the others.

fp8     NVIDIA from Ada on computes with e4m3 numbers. AMD's matrix units, where they know fp8 at all, mean others by it
        (fnuz)
Hopper  copies tiles by a unit of its own, and multiplies them from where they land
"""

from __future__ import annotations

from functools import cache

import torch

H200_PROCESSORS = 132  # on which it was measured how products are best cut


@cache
def has_fp8(device: torch.device) -> bool:
    """Where there is no GPU nothing is held against it."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


@cache
def has_gluon(device: torch.device) -> bool:
    """As kernels for Hopper have it, which is since Triton 3.6"""
    import triton  # which a start on a CPU does without, and may not even have

    return is_hopper(device) and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
