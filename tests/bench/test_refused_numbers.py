"""Numbers and files that make no sense are refused before anything is loaded or sent: one line, exit code 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tokenmill.bench import compare
from tokenmill.bench import startup as starts
from tokenmill.bench.peers import ours
from tokenmill.cli import main
from tokenmill.cli.bench_engine import tell

STAGES = (*starts.STAGES, *starts.RUN_STAGES, *starts.SERVER_STAGES)
SERVER = ["--url", "http://127.0.0.1:9", "--model", "m"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["offline", "--rounds", "0"], ["--rounds", "1"]),
        (["offline", "--num-requests", "-1"], ["--num-requests"]),
        (["offline", "--concurrency", ""], ["concurrency", "1,4,16"]),
        (["offline", "--concurrency", "0,x"], ["concurrency", "0,x"]),
        (["latency", "--batch-sizes", ""], ["batch-sizes"]),
        (["latency", "--output-len", "1"], ["--output-len", "2"]),
        (["startup", "--rounds", "0"], ["--rounds"]),
        (["compare", "m.gguf", "--threads", "0"], ["--threads"]),
        (["compare", "m.gguf", "--input-len", "0"], ["--input-len"]),
        (["compare", "m.gguf", "--rounds", "-1"], ["--rounds"]),
        (["serve", *SERVER, "--concurrency", "0"], ["--concurrency"]),
        (["serve", *SERVER, "--num-requests", "0"], ["--num-requests"]),
        (["serve", *SERVER, "--duration-s", "0"], ["--duration-s"]),
        (["serve", *SERVER, "--warmup", "-1"], ["--warmup"]),
        (["serve", *SERVER, "--num-prefixes", "0"], ["--num-prefixes"]),
        (["serve", *SERVER, "--turns", "0"], ["--turns"]),
        (["serve", *SERVER, "--rate", "1", "--concurrency", "2"], ["--concurrency and --rate exclude each other"]),
        (["serve", *SERVER, "--trace-s", "5"], ["--trace-s needs --trace"]),
        (["serve", *SERVER, "--arrivals", "gamma"], ["--arrivals needs --rate"]),
        (["serve", *SERVER, "--rate", "1", "--burstiness", "2"], ["--burstiness needs --arrivals gamma"]),
        (["serve", *SERVER, "--file", "/etc/hostname"], ["--file needs --workload text"]),
        (["serve", *SERVER, "--output", "/not/there/a.json"], ["--output /not/there/a.json", "folder"]),
        (["serve", *SERVER, "--html", "/not/there/a.html"], ["--html /not/there/a.html", "folder"]),
        (["serve", *SERVER, "--known-model", "m.json", "--device", "nothing"], ["no device is called 'nothing'"]),
        (["search", *SERVER, "--turns", "2"], ["--turns needs --workload multi-turn"]),
        (["serve", "--url", "nonsense"], ["nonsense", "http://"]),
        (["search", *SERVER, "--over", "rate", "--waves", "2"], ["--waves needs --over concurrency"]),
        (["search", *SERVER, "--trial-s", "9"], ["--trial-s needs --over rate"]),
        (["serve", *SERVER, "--workload", "lengths", "--output-len", "9"], ["--output-len needs another workload"]),
        (["search", *SERVER, "--resume", "/no/where/s.json"], ["--resume", "its folder does not exist"]),
        (["search", *SERVER, "--resume", "/tmp"], ["--resume", "it is a folder"]),
        (["serve", *SERVER, "--max-input", "9"], ["--max-input needs --workload lengths or --trace"]),
        (["serve", *SERVER, "--trace", "t.csv", "--input-len", "9"], ["--input-len needs a load without --trace"]),
        (["search", *SERVER, "--waves", "0"], ["--waves"]),
        (["search", *SERVER, "--waves", "9" * 20], ["--waves"]),
        (["search", *SERVER, "--most", "inf"], ["--most"]),
        (["serve", *SERVER, "--warmup", "9" * 20], ["--warmup"]),
        (["serve", *SERVER, "--turns", "1.5"], ["--turns takes an integer, not 1.5"]),
        (["search", *SERVER, "--start", "10", "--most", "2"], ["10", "above the highest, 2"]),
        (["search", *SERVER, "--start", "1.5"], ["1.5", "integer"]),
        (["search", *SERVER, "--over", "rate", "--trial-s", "0"], ["--trial-s"]),
    ],
)
def test_wrong_numbers(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and not told.out
    for word in words:
        assert word in told.err


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [("schema", "{x", "can't be read"), ("schema", "[]", "not a JSON schema"), ("lengths", "a,b\n", "no line behind")],
)
def test_wrong_files(tmp_path: Path, flag: str, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "given"
    path.write_text(text)
    file = ["--schema" if flag == "schema" else "--file", str(path)]
    assert main(["bench", "serve", *SERVER, "--workload", flag, *file]) == 2
    assert words in capsys.readouterr().err


def test_a_peer_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, script = tmp_path / "m.gguf", tmp_path / "peer.py"
    model.write_bytes(b"GGUF")
    script.write_text("import no_such_engine")
    monkeypatch.setitem(compare.PEERS, "openvino", str(script))
    assert main(["bench", "compare", str(model), "--peers", "openvino"]) == 1
    assert "pip install llama-cpp-python" in (told := capsys.readouterr().err) and "--peer-python" in told
    assert main(["bench", "compare", str(model), "--peers", "", "--batched-bench", str(model)]) == 2
    assert "is not an executable program" in capsys.readouterr().err
    assert main(["bench", "compare", str(model), "--peers", "openvino,tokenmill"]) == 2
    assert "is always compared" in capsys.readouterr().err


def test_our_own_room_is_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences and longer prompts than any fixed limit."""
    seen = []
    monkeypatch.setattr(ours, "open_measured", seen.append)
    monkeypatch.setattr(sys, "stdin", [])
    most = {"input_len": 9000, "output_len": 8, "concurrency": 100, "seed": 0}
    monkeypatch.setattr(sys, "argv", ["ours.py", "m.gguf", "2", "8", json.dumps(most)])
    ours.main()
    assert (seen[0].model.max_context, seen[0].scheduler.max_running) == (9009, 100)


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *SERVER[:2]]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "can't be reached" in told and "refused" in told and "tokenmill serve" in told
    assert main(["bench", "serve", *SERVER, "--num-requests", "2", "--max-lag-ms", "60000"]) == 1
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("0 of 2 requests") and second == "2 failed: connect 2 times"


def test_each_measurement_is_told_as_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"concurrency": 1, "input_len": 32.0, "prefill_tok_s": 400.0, "decode_tok_s": 50.0}
    tell(result)
    tell(result | {"concurrency": 4})
    one, four = capsys.readouterr().err.splitlines()
    assert one == "1 sequence of 32: prefill 400 tok/s, decode 50.0 tok/s" and four.startswith("4 sequences of 32: ")
    for kind in ("starts", "runs", "server_starts"):
        monkeypatch.setattr(starts, f"measure_{kind}", lambda *_: dict.fromkeys(STAGES, 1.0))
    monkeypatch.setattr("tokenmill.cli.session.fetch", lambda _: None)
    assert main(["bench", "startup", "m", "--rounds", "2"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "starting tokenmill serve, 2 times"
