"""`tokenmill detect` on texts that carry a watermark and on texts that don't."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.cli.detect import command
from tokenmill.errors import InvalidRequest
from tokenmill.params import Watermark


@pytest.fixture(scope="module")
def marked_text(stories_dir: Path) -> str:
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=1, watermark=Watermark(key=7))
    return LLM(str(stories_dir), threads=1).generate("Once upon a time", params, progress=False)[0].outputs[0].text


def detected(capsys: pytest.CaptureFixture[str], *arguments: str, **options: Any) -> dict[str, Any]:
    assert command(*arguments, json=True, **options) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_marked_text_is_found_with_its_key_only(
    marked_text: str, stories_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text"
    file.write_text(marked_text)
    found = detected(capsys, str(file), model=str(stories_dir), key=7)
    assert found["watermarked"] and found["z_score"] > 4 and found["p_value"] < 1e-4
    assert found["scored_tokens"] > 100
    assert not detected(capsys, str(file), model=str(stories_dir), key=8)["watermarked"]
    assert not detected(capsys, str(file), model=str(stories_dir), key=7, context=2)["watermarked"]


def test_stdin_and_words(
    stories_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, word in (("Plain words that nobody marked in any way.", "no watermark"), ("", "too short")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert command("-", model=str(stories_dir), key=7) == 0
        assert word in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "word"), [({"key": -1}, "key"), ({"key": 1, "gamma": 1.5}, "gamma"), ({"key": 1}, "can't be read")]
)
def test_wrong_use_is_one_clear_error(options: dict[str, Any], word: str, stories_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=word):
        command(str(tmp_path / "absent"), model=str(stories_dir), **options)
