from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tokenmill.bench import compare
from tokenmill.errors import InvalidConfig, RequestFailed

FAKE = """
import json, sys
print("a library's own chatter", flush=True)
print(json.dumps({"ready": True, "version": "fake 1"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"prefill_tok_s": SPEED * 10.0, "decode_tok_s": SPEED * (1.0 + asked["seed"])}), flush=True)
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, speed in (("llama.cpp", 2.0), (compare.OURS, 3.0)):
        script = tmp_path / f"{name}.py"
        script.write_text(FAKE.replace("SPEED", str(speed)))
        monkeypatch.setitem(compare.PEERS, name, str(script))


@pytest.mark.usefixtures("fakes")
def test_engines_take_turns_and_ratios_are_round_by_round() -> None:
    shapes = [{"input_len": 8, "output_len": 4, "concurrency": c} for c in (1, 4)]
    with compare.engines(["llama.cpp", compare.OURS], sys.executable, Path("m.gguf"), 1) as running:
        turns = list(compare.take_turns(running, shapes, 3))
    assert [name for name, _, _ in turns[:4]] == ["llama.cpp", "tokenmill"] * 2
    assert turns[4][0] == "tokenmill"  # another one begins the second round
    found = {(c.engine, c.concurrency, c.figure): c for c in compare.compared(turns)}
    theirs = found["llama.cpp", 4, "decode_tok_s"]
    assert theirs.values == [2.0, 4.0, 6.0]
    assert theirs.ratio is not None and (theirs.ratio.median, theirs.ratio.rounds) == (1.5, 3)
    assert found["tokenmill", 4, "decode_tok_s"].ratio is None


def test_a_peer_that_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no such model')")
    monkeypatch.setitem(compare.PEERS, "openvino", str(script))
    with (
        pytest.raises(RequestFailed, match=r"openvino ended.*no such model"),
        compare.engines(["openvino"], sys.executable, Path("m.gguf"), 1),
    ):
        pass
    with pytest.raises(InvalidConfig, match="no peer"), compare.engines(["vllm"], sys.executable, Path("m"), 1):
        pass
