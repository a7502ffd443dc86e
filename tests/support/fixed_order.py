"""Triton's interpreter with a fixed order of additions.

The interpreter passes `tl.dot` and `tl.sum` to numpy, whose matrix library adds in an order that depends on the
processor and on the shapes of both factors. A GPU's matrix units add in column order, whatever the size of the tile. A
check that two launches of a kernel give the same bits therefore needs sums in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.runtime import interpreter


def _dot(_: Any, a: Any, b: Any, accumulator: Any, *__: object) -> Any:
    """Add the products to the accumulator one column after another."""
    left, right = (np.asarray(factor.data, dtype=accumulator.data.dtype) for factor in (a, b))
    total = accumulator.data.copy()
    for column in range(left.shape[-1]):
        total += left[..., :, column, None] * right[..., column, None, :]
    return interpreter.TensorHandle(total, accumulator.dtype.scalar)


def _sum(reduction: Any, operand: Any) -> Any:
    """Add neighbours pairwise, in an order that depends only on the length of the axis."""
    values = operand.handle.data
    axis = reduction.axis
    values = values.reshape(-1) if axis is None else np.moveaxis(values, axis, -1)
    while values.shape[-1] > 1:
        values = values[..., ::2] + values[..., 1::2]
    total = values[..., 0]
    if reduction.keep_dims:
        total = total.reshape((1,) * operand.handle.data.ndim) if axis is None else np.expand_dims(total, axis)
    return reduction.to_tensor(total, operand.dtype)


@contextmanager
def sums_in_fixed_order() -> Iterator[None]:
    """Make `tl.dot` and `tl.sum` add in a fixed order inside the block."""
    with (
        patch.object(interpreter.InterpreterBuilder, "create_dot", _dot),
        patch.object(interpreter.ReduceOps, "sum", _sum),
    ):
        yield
