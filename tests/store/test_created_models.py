"""Modelfiles and the models made by them: what is read, what is refused, what the command line does with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.cli import main
from tokenmill.errors import InvalidRequest
from tokenmill.store import Store, parse_modelfile, resolve_model
from tokenmill.store.modelfile import as_modelfile

MODELFILE = '''
# a comment
from ./tiny.gguf
PARAMETER temperature 0.3
PARAMETER stop "<end>"
PARAMETER stop two words
PARAMETER num_predict 12
SYSTEM """You are Mario.
Answer as he would."""
MESSAGE user Who are you?
MESSAGE assistant """It's-a me,
Mario!"""
LICENSE "MIT"
TEMPLATE """{% for m in messages %}{{ m.content }}{% endfor %}"""
'''


def test_a_modelfile_is_read() -> None:
    found = parse_modelfile(MODELFILE)
    assert found.base == "./tiny.gguf"
    assert found.parameters == {"temperature": 0.3, "stop": ["<end>", "two words"], "num_predict": 12}
    assert found.texts["system"] == "You are Mario.\nAnswer as he would." and found.texts["license"] == "MIT"
    assert found.messages == [("user", "Who are you?"), ("assistant", "It's-a me,\nMario!")]
    again = parse_modelfile(as_modelfile(found.base, found.customization))
    assert again.customization == found.customization


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no FROM"),
        ("SYSTEM hi", "no FROM"),
        ("FROM a\nFROM b", "line 2"),
        ("FROM", "needs a value"),
        ("FROM a\nDANCE now", "no instruction"),
        ('FROM a\nSYSTEM """open', "never closed"),
        ("FROM a\nPARAMETER temperature", "needs a value"),
        ("FROM a\nMESSAGE wizard hi", "role of a message must be one of"),
        ("FROM a\nTEMPLATE {{ if .System }}x{{ end }}", "Go templates"),
        ("FROM a\nTEMPLATE {{- range .Messages }}x{{- end }}", "Go templates"),
    ],
)
def test_what_is_wrong_in_a_modelfile_is_named(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        parse_modelfile(text)


def test_create_list_and_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    file = tmp_path / "Modelfile"
    file.write_text(MODELFILE)
    assert main(["create", "mario", "-f", str(file)]) == 0
    resolved = resolve_model("mario:latest")
    assert resolved.path == tmp_path / "tiny.gguf" and resolved.name == "tiny"
    assert resolved.custom is not None and resolved.custom.parameters["num_predict"] == 12
    assert main(["list"]) == 0 and "created from tiny" in capsys.readouterr().out
    (tmp_path / "tiny.gguf").rename(tmp_path / "gone.gguf")
    assert Store().get("mario") is None, "what it was made from is no longer there"
    assert main(["rm", "mario"]) == 0 and Store().names() == []


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("FROM {gguf}\nADAPTER ./lora.gguf", "not an adapter"),
        ("FROM {gguf}\nPARAMETER num_gpu 1", "num_gpu"),
        ("FROM ./missing.gguf", "there is no model"),
        ("FROM scripted:{script}", "scripted"),
    ],
)
def test_create_refuses_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: str, problem: str
) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    (tmp_path / "Modelfile").write_text(lines.format(gguf=tmp_path / "tiny.gguf", script=__file__))
    assert main(["create", "mario", "--file", str(tmp_path / "Modelfile")]) != 0
    assert problem in capsys.readouterr().err
