"""Triton kernels on a machine without a GPU: they run in Triton's interpreter.

Triton chooses the interpreter when a kernel is defined, so these tests need processes of their own
(`pytest tests/triton_interpreted`); `tests/conftest.py` sets the environment and leaves the folder out of other runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_itemcollected(item: pytest.Item) -> None:
    """Allow numpy to warn: the interpreter computes masked elements too, NaN and infinite ones among them."""
    item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Each test draws the same inputs, whichever tests run before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> Iterator[None]:
    from tests.support.fast_interpreter import patched_once_a_kernel  # Triton is imported after the choice

    with patched_once_a_kernel():
        yield
