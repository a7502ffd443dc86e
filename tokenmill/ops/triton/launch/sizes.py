"""Sizes of grids and tiles. Triton has functions of these names that kernels can call too, and that take so much longer
here that a short prompt would notice."""

from __future__ import annotations


def cdiv(number: int, by: int) -> int:
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 0 else 1
