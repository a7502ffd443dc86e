"""Start-up tricks: where they act, that one switch and other versions turn them off, and that a program which uses the
library is left alone."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill.engine.core_process import CoreProcess
from tokenmill.engine.startup import core_prestart, versions
from tokenmill.engine.startup import torch_import as module
from tokenmill.engine.startup.core_prestart import prestart_core, take_core
from tokenmill.engine.startup.torch_import import cuda_preinit, open_first_gpu, torch_import

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip


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
    monkeypatch.setattr(module, "_torch_file", lambda name: name if torch_has_gpus else None)
    num_threads = threading.active_count()
    with pytest.raises(ImportError), cuda_preinit(device):
        raise ImportError
    assert driver.calls == (["init", "get", "retain 7"] if is_opened else [])
    assert threading.active_count() == num_threads


def test_no_driver_and_no_device_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRIVER", "libcuda-that-is-not-here.so")
    assert not open_first_gpu()
    driver = Driver(num_devices=0)
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    assert not open_first_gpu()
    assert driver.calls == ["init", "get"]


# ── the switch ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("version", "is_fine"), [("2.13.0+cpu", True), ("2.11.1", True), ("2.10.9", False), ("3.0", False), (None, False)]
)
def test_other_versions_take_the_ordinary_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str | None, is_fine: bool
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda _package: version)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    genuine = sys.modules["torch._meta_registrations"]
    monkeypatch.setitem(sys.modules, "torch._meta_registrations", genuine)  # it is there again after the test
    with caplog.at_level("DEBUG"), torch_import(fast_start=True):
        assert (sys.modules.get("torch._meta_registrations") is genuine) == gc.isenabled() == (not is_fine)
    assert ("start-up optimisations are off" in caplog.text) == (not is_fine)


def test_versions_are_read_without_an_import() -> None:
    assert versions.installed_version("torch") == torch.__version__
    assert versions.is_tested("torch"), "the tricks were tested with the torch that the tests run with"


def test_without_the_switch_torch_is_imported_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = sys.modules.get("torch._meta_registrations")
    with torch_import(fast_start=False, device="cuda"):
        assert gc.isenabled() and sys.modules.get("torch._meta_registrations") is before


class Process:
    def __init__(self) -> None:
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True


@pytest.mark.parametrize(
    ("arguments", "environment", "is_started"),
    [
        (["hi"], {}, True),
        (["hi", "--no-fast-start"], {}, False),
        (["hi"], {"TOKENMILL_FAST_START": "false"}, False),
        (["hi", "--fast-start"], {"TOKENMILL_FAST_START": "0"}, True),
    ],
)
def test_the_switch_keeps_a_core_from_being_started_early(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], environment: dict[str, str], is_started: bool
) -> None:
    monkeypatch.setattr(core_prestart, "CoreProcess", Process)
    with prestart_core("run", arguments, environment):
        assert (take_core(fast_start=True) is not None) == is_started


def test_a_setting_that_is_read_later_still_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Process] = []
    monkeypatch.setattr(core_prestart, "CoreProcess", lambda: started.append(Process()) or started[-1])
    with prestart_core("run", ["hi"], {}):
        assert take_core(fast_start=False) is None
        assert started[0].is_killed


@pytest.mark.parametrize("fast_start", [True, False])
def test_a_core_is_told_whether_to_start_fast(fast_start: bool) -> None:
    """Either way it ends when it is asked to."""
    program = ("-c", "import sys; sys.exit(7 if sys.argv[3:] == ['--no-fast-start'] else 8)")
    process = CoreProcess(program, fast_start=fast_start)
    assert process.wait() == f"exit code {8 if fast_start else 7}"
    process.stop()


LIBRARY_USE = """
import gc, json, os, signal, sys, threading
before = (gc.get_threshold(), gc.get_freeze_count(), gc.isenabled(), signal.getsignal(signal.SIGINT))
import tokenmill
assert "torch" not in sys.modules and threading.active_count() == 1
from tokenmill import LLM, SamplingParams
import builtins
plain_import = builtins.__import__
def watched(name, *args, **kwargs):
    assert gc.isenabled(), f"collection is off while {name} is imported"
    return plain_import(name, *args, **kwargs)
builtins.__import__ = watched
llm = LLM(sys.argv[1], load_format="dummy", threads=1, max_context=64)
builtins.__import__ = plain_import
import torch
meta = sys.modules["torch._meta_registrations"]
assert meta.__spec__ is not None and meta.__file__.endswith("_meta_registrations.py") and meta.register_meta
assert torch._meta_registrations is meta
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), progress=False)
after = (gc.get_threshold(), gc.get_freeze_count(), gc.isenabled(), signal.getsignal(signal.SIGINT))
assert before == after, (before, after)
assert not [t.name for t in threading.enumerate() if t.name in ("torch-libraries", "cuda-preinit")]
if "tokenmill.ops.triton.launch.compile_workers" in sys.modules:
    assert not sys.modules["tokenmill.ops.triton.launch.compile_workers"].is_enabled()
"""


def test_a_program_that_uses_the_library_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    done = subprocess.run([sys.executable, "-c", LIBRARY_USE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
