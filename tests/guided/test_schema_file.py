"""`tokenmill run --schema FILE`: the file becomes the constraint, and what is wrong with it is said before loading."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.cli.run import with_schema
from tokenmill.errors import InvalidRequest
from tokenmill.params import MAX_GUIDED_BYTES, Guided, SamplingParams


def test_the_file_s_text_is_the_schema(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    params = with_schema(file, SamplingParams(temperature=0.3))
    assert params.guided == Guided("json_schema", '{"type": "integer"}')
    assert params.temperature == 0.3
    assert with_schema(None, params) is params


@pytest.mark.parametrize("content", ["", " " * 10, "1" * (MAX_GUIDED_BYTES + 1)])
def test_an_unusable_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "schema.json"
    file.write_text(content)
    with pytest.raises(InvalidRequest, match=r"schema\.json"):
        with_schema(file, SamplingParams())


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be read"):
        with_schema(tmp_path / "absent.json", SamplingParams())
