"""Blocks kept in a folder, through the whole engine: found again after they left the pool and after a restart, by the
same tokens as without; whatever is wrong with the folder, answers are the same."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.hybrids import story, tiny
from tests.support.mixed_requests import make_requests, run_together
from tokenmill import LLM, SamplingParams
from tokenmill.arch.read import read_spec
from tokenmill.config.by_name import engine_config
from tokenmill.engine.kv_tiers import blocks_digest
from tokenmill.engine.resolve import resolve_model_config
from tokenmill.errors import InvalidConfig
from tokenmill.kv.traffic import BlockTraffic
from tokenmill.ops.cpu import is_available

NUM_PROMPTS, LENGTH = 4, 200
FAMILIES: dict[str, dict[str, Any]] = {
    "stories": {},
    "stories, int8 cache": {"kv_dtype": "int8"},
    "olmo3": {},  # windows
    "qwen3_5": {"num_states": 30},  # states of a recurrent rule
}
MORE: dict[str, dict[str, Any]] = {
    **{name: {"num_blocks": 80} for name in ("lfm2", "deepseek_v3", "gpt_oss", "gemma4", "qwen3_moe")},
    "deepseek_v4": {"num_blocks": 120},
    **{name: {"num_blocks": 80, "num_states": 30} for name in ("falcon_h1", "granitemoehybrid", "nemotron_h")},
    **{name: {"num_blocks": 80, "num_states": 30} for name in ("jamba", "mamba2")},
}


@pytest.fixture(autouse=True)
def always_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compute these small models may be faster than to fetch: that is not what is tested here."""
    monkeypatch.setattr(BlockTraffic, "seconds", lambda self, found: 0.0)
    monkeypatch.setattr("tokenmill.scheduler.fetches.LATE_S", 60.0)
    monkeypatch.setattr("tokenmill.scheduler.fetches.DEFAULT_LIMIT_S", 60.0)
    monkeypatch.setattr("tokenmill.kv.traffic.CLOSE_S", 60.0)


def opened(path: Path, folder: Path | None, **settings: Any) -> LLM:
    """A pool with room for one of the prompts and a half."""
    settings = {"num_blocks": 40, "threads": 1, "max_running": 4, **settings}
    if folder is not None:
        settings["kv_disk"] = str(folder)
    return LLM(str(path), device="cpu", **settings)


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    found = [llm.generate([story(LENGTH, seed)], params)[0] for seed in range(NUM_PROMPTS)]
    return [one.outputs[0].token_ids for one in found]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def path_of(name: str, shared_dir: Path, stories_dir: Path) -> Path:
    return stories_dir if name.startswith("stories") else tiny(shared_dir, name)


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)])
def test_prompts_are_found_again_and_after_a_restart(
    name: str, tmp_path: Path, shared_dir: Path, stories_dir: Path
) -> None:
    path, settings = path_of(name, shared_dir, stories_dir), (FAMILIES | MORE)[name]
    expected = answers(opened(path, None, **settings))
    llm = opened(path, tmp_path, **{**settings, "num_blocks": 400})  # nothing leaves the pool before it is saved
    assert answers(llm) == expected
    llm.close()  # what is still to be saved is saved
    again = opened(path, tmp_path, **settings)
    for turn in (1, 2):
        assert answers(again) == expected
        stats = again.core.stats()
        assert stats.prefix_hit_tokens >= turn * NUM_PROMPTS * (LENGTH // 64 * 64)
        assert stats.fetched_tokens >= NUM_PROMPTS * (LENGTH // 64 * 64) and stats.fetched_bytes > 0
    again.close()


def flip(files: list[Path]) -> None:
    for file in files:
        data = bytearray(file.read_bytes())
        data[-7] ^= 16
        file.write_bytes(data)


def tear(files: list[Path]) -> None:
    for file in files:
        file.write_bytes(file.read_bytes()[:-100])


def damage_some(files: list[Path]) -> None:
    rng = random.Random(3)
    flip(rng.sample(files, len(files) // 8))


@pytest.mark.parametrize("damage", [flip, tear, damage_some])
def test_damaged_files_change_no_answer(
    damage: Callable[[list[Path]], None], tmp_path: Path, stories_dir: Path
) -> None:
    expected = answers(opened(stories_dir, None))
    llm = opened(stories_dir, tmp_path, num_blocks=400)
    answers(llm)
    llm.close()
    damage(files_of(tmp_path))
    again = opened(stories_dir, tmp_path)
    assert answers(again) == expected
    again.close()


def test_a_disk_that_fills_up_changes_no_answer(
    tmp_path: Path, stories_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answers(opened(stories_dir, None))
    written, write = count(), os.writev

    def fill_up(descriptor: int, buffers: Sequence[bytes]) -> int:
        if next(written) < 20:
            return write(descriptor, buffers)
        write(descriptor, [buffers[0]])  # half of a file fits
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", fill_up)
    llm = opened(stories_dir, tmp_path, num_blocks=400)
    for _ in range(2):
        assert answers(llm) == expected
    llm.close()
    assert len(files_of(tmp_path)) == 20 and sum("No space left" in one.message for one in caplog.records) == 1


def test_mixed_requests_in_two_engines_on_one_folder(tmp_path: Path, stories_dir: Path) -> None:
    """Every kind of parameter, in pools that are far too small, so that blocks come and go all the time."""
    asks = make_requests(7)[:24]
    expected = run_together(opened(stories_dir, None, num_blocks=400), asks, rng=None)
    engines = [opened(stories_dir, tmp_path, num_blocks=24, max_running=8, token_budget=48) for _ in range(2)]
    for number, llm in enumerate([*engines, *engines]):
        together = run_together(llm, asks, random.Random(number))
        assert {key: tokens for key, (tokens, _) in together.items()} == {
            key: tokens for key, (tokens, _) in expected.items()
        }
    assert all(llm.core.stats().fetched_tokens > 0 for llm in engines)
    for llm in engines:
        llm.close()


def test_other_settings_share_nothing(stories_dir: Path, shared_dir: Path, tmp_path: Path) -> None:
    """All that the bytes of a block depend on makes a folder of its own."""

    def digest_of(path: Path, is_for_disk: bool = True, **settings: Any) -> bytes:
        config, spec = engine_config(str(path), {"device": "cpu", "num_blocks": 40, **settings}), read_spec(path)
        return blocks_digest(resolve_model_config(config, spec, path).config, spec, path, is_for_disk)

    changes: list[dict[str, Any]] = [{}, {"kv_dtype": "int8"}, {"block_size": 8}]
    changes += [{"quantization": "int8"}, {"load_format": "dummy"}, {"load_format": "dummy", "seed": 1}]
    changes += [{"backend": "reference"}] if is_available()[0] else []
    digests = [digest_of(stories_dir, **change) for change in changes]
    digests.append(digest_of(shared_dir / "goldens" / "tiny" / "smollm3"))
    assert len(set(digests)) == len(digests)
    assert digest_of(stories_dir, threads=1, num_blocks=50, max_running=3, max_context=64) == digests[0]
    copied = tmp_path / "copied"
    shutil.copytree(stories_dir, copied, copy_function=shutil.copyfile)  # with times of its own
    assert digest_of(copied) != digests[0], "weights may be changed in place while their blocks lie on a disk"
    assert digest_of(copied, is_for_disk=False) == digest_of(stories_dir, is_for_disk=False)


def test_what_can_not_work_is_refused(stories_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="kv_disk is set, but prefix_caching is off"):
        opened(stories_dir, tmp_path, prefix_caching=False)
    with pytest.raises(InvalidConfig, match="already in host memory"):
        opened(stories_dir, None, kv_host_gb=1.0)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="can't be used for KV blocks"):
        opened(stories_dir, tmp_path / "file")
