"""A GPU is opened beside torch's import where one will be used, by the driver's own calls; nowhere else."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from tokenmill.engine.startup import cuda_preinit as module
from tokenmill.engine.startup.cuda_preinit import cuda_preinit, open_first_device


class Driver:
    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices
        self.calls: list[str] = []

    def cuInit(self, flags: int) -> int:  # noqa: N802
        self.calls.append("init")
        return flags

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        self.calls.append("get")
        device._obj.value = 7
        return 0 if index < self._num_devices else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        self.calls.append(f"retain {device.value}")
        context._obj.value = 1
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(num_devices=1)
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    return driver


@pytest.mark.parametrize(
    ("device", "torch_has_gpus", "is_new", "is_opened"),
    [
        ("cuda", True, True, True),
        ("auto", True, True, True),
        ("cpu", True, True, False),
        ("auto", False, True, False),
        ("cuda", True, False, False),
    ],
)
def test_the_device_is_opened_where_it_will_be_used(
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    torch_has_gpus: bool,
    is_new: bool,
    is_opened: bool,
) -> None:
    if is_new:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "torch", sys)
    monkeypatch.setattr(module, "_has_torch_for_gpus", lambda: torch_has_gpus)
    num_threads = threading.active_count()
    with pytest.raises(ImportError), cuda_preinit(device):
        raise ImportError
    assert driver.calls == (["init", "get", "retain 7"] if is_opened else [])
    assert threading.active_count() == num_threads


def test_no_driver_and_no_device_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRIVER", "libcuda-that-is-not-here.so")
    assert not open_first_device()
    driver = Driver(num_devices=0)
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    assert not open_first_device()
    assert driver.calls == ["init", "get"]
