"""A model's own sampling parameters, for requests that say nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.engine.sampling_defaults import sampling_defaults
from tokenmill.store.catalog import load_catalog


@pytest.fixture
def folder(stories_dir: Path, tmp_path: Path) -> Path:
    """A model that wants greedy answers."""
    copied = tmp_path / "model"
    shutil.copytree(stories_dir, copied)
    (copied / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "top_k": 5, "max_new_tokens": 3}))
    return copied


def test_a_call_without_params_is_drawn_as_the_model_wants(folder: Path) -> None:
    llm = LLM(str(folder), threads=1, max_context=64)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_k=5)
    first, second = llm.generate(["Once upon a time"] * 2, progress=False)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    plain = LLM(str(folder), threads=1, max_context=64, sampling_defaults=False)
    assert plain.get_default_sampling_params() == SamplingParams()


def test_values_that_make_no_sense_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    assert sampling_defaults("m", folder) == {} and "not used" in caplog.text
    (folder / "generation_config.json").write_text("{")
    assert sampling_defaults("m", folder) == {}


def test_the_catalog_says_it_for_files_that_carry_none(tmp_path: Path) -> None:
    assert sampling_defaults("smollm2:135m", tmp_path / "m.gguf") == {"temperature": 0.2, "top_p": 0.9}
    assert sampling_defaults(str(tmp_path / "m.gguf"), tmp_path / "m.gguf") == {}
    for entry in load_catalog().values():
        SamplingParams(**entry.sampling)
