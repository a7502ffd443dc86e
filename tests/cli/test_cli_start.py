"""Starts are short: what is imported when, the core that is started ahead, libraries loaded beside other work."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_process import engines_of, one_line, real, wait_for_no_engine
from tokenmill.engine.startup.core_prestart import prestart_core, take_core
from tokenmill.engine.startup.torch_import import gc_paused, preload_libraries
from tokenmill.ops.cpu.availability import is_available, load_library

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
HEAVY = "{'torch', 'numpy', 'tokenizers', 'cyclopts', 'rich', 'asyncio'}"


def seconds_of(environment: dict[str, str], code: str) -> float:
    measured = f"import sys, time; began = time.process_time(); {code}; print(time.process_time() - began)"
    done = subprocess.run([sys.executable, "-c", measured], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_importing_the_package_costs_next_to_nothing(environment: dict[str, str]) -> None:
    code = f"import tokenmill; assert not {HEAVY} & set(sys.modules)"
    assert min(seconds_of(environment, code) for _ in range(3)) < 0.3


@pytest.mark.parametrize("module", ["tokenmill.cli.run", "tokenmill.cli.chat", "tokenmill.engine.llm"])
def test_torch_is_left_to_the_core(environment: dict[str, str], module: str) -> None:
    """The commands' own process never imports it; the library does so only when a model is opened."""
    seconds_of(environment, f"import {module}; assert 'torch' not in sys.modules")


def test_a_core_that_nobody_takes_is_ended(environment: dict[str, str]) -> None:
    one_line(real(environment, "run", "--no-such-flag", "hi"), 2, "--no-such-flag")
    wait_for_no_engine(environment)


@pytest.mark.parametrize(("verb", "arguments"), [("list", []), ("run", ["--help"]), ("serve", ["-h"])])
def test_no_core_where_none_is_wanted(verb: str, arguments: list[str]) -> None:
    with prestart_core(verb, arguments):
        assert take_core(fast_start=True) is None


def test_the_core_is_taken_once(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", environment["TOKENMILL_HOME"])
    with prestart_core("run", ["hi"]):
        child = take_core(fast_start=True)
        assert child is not None
        assert take_core(fast_start=True) is None
    assert len(engines_of(environment["TOKENMILL_HOME"])) == 1  # the caller's to end
    child.kill()
    assert take_core(fast_start=True) is None
    wait_for_no_engine(environment)


def test_a_failed_load_is_told_by_the_command(environment: dict[str, str], smollm2_path: Path) -> None:
    """The core fails in its own process; the user reads one line and its exit code all the same."""
    one_line(
        real(environment, "run", str(smollm2_path), "hi", "--num-blocks", "2", "--max-context", "99999"), 2, "99999"
    )
    wait_for_no_engine(environment)


def test_an_ordinary_start_answers_the_same(environment: dict[str, str], smollm2_path: Path, tmp_path: Path) -> None:
    """By the flag, before any core is started, and by a settings file, which is read after one was."""
    config = tmp_path / "plain.toml"
    config.write_text("[ops]\nfast_start = false\n")
    asked = ("run", str(smollm2_path), "hi", "--temperature", "0", "--max-tokens", "4")
    answers = [
        real({**environment, **more}, *asked, *flags)
        for flags, more in (((), {}), (("--no-fast-start",), {}), ((), {"TOKENMILL_CONFIG": str(config)}))
    ]
    assert [(done.returncode, done.stderr) for done in answers] == [(0, "")] * 3
    assert len({done.stdout for done in answers}) == 1 and answers[0].stdout.strip()
    wait_for_no_engine(environment)


@pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
def test_libraries_are_loaded_or_not_without_a_fuss(tmp_path: Path) -> None:
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"no library")
    assert not load_library(str(broken))
    assert not load_library(str(tmp_path / "none.so"))
    assert load_library(next(iter(sorted(Path(sys.modules["_struct"].__file__ or "").parent.glob("*.so")))).as_posix())
    with preload_libraries():
        pass


def test_collecting_goes_on_after_an_import() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), gc_paused():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_torch_without_meta_kernels_computes_and_gets_them_when_asked(environment: dict[str, str]) -> None:
    code = f"""
from tokenmill.engine.startup.torch_import import import_meta_kernels, without_meta_kernels
with without_meta_kernels():
    import torch
assert not {{"torch._decomp", "torch._meta_registrations"}} & set(sys.modules)
assert not hasattr(torch, "_meta_registrations")
assert torch.eye(3).softmax(-1).topk(1).indices.flatten().tolist() == [0, 1, 2]
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.weights.dummy import dummy_weights
assert dummy_weights(spec_from_hf({LLAMA})).get("layers.0.q.weight").data.std() > 0
import tokenmill.engine.build
assert "triton" not in sys.modules, "only where there is a GPU"
import_meta_kernels()
assert torch.linalg.cross(torch.ones(2, 3, device="meta"), torch.ones(2, 3, device="meta")).shape == (2, 3)
assert hasattr(torch._meta_registrations, "register_meta")
with without_meta_kernels():
    assert torch._meta_registrations is sys.modules["torch._meta_registrations"]
"""
    seconds_of(environment, f"exec({code!r})")


def test_who_opens_a_model_has_all_of_torch_afterwards(environment: dict[str, str], tmp_path: Path) -> None:
    """Even where that fails, after torch was imported without its kernels for tensors without memory."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code = f"""
from tokenmill import LLM
from tokenmill.errors import TokenmillError
try:
    LLM({str(tmp_path)!r}, load_format="dummy", device="cpu", quantization="fp8", fast_start=True)
except TokenmillError:
    assert "torch" in sys.modules
else:
    raise AssertionError("fp8 is for GPUs")
import torch
assert torch.linalg.cross(torch.ones(2, 3, device="meta"), torch.ones(2, 3, device="meta")).shape == (2, 3)
assert hasattr(torch._meta_registrations, "register_meta")
"""
    seconds_of(environment, f"exec({code!r})")
