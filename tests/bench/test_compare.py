from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tokenmill.bench import compare
from tokenmill.bench.peers import batched_bench_peer
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
    with (
        pytest.raises(InvalidConfig, match="unknown peer vllm"),
        compare.engines(["vllm"], sys.executable, Path("m"), 1),
    ):
        pass


TABLE = """\
main: n_kv_max = 2304, n_batch = 512, n_ubatch = 512, flash_attn = -1, is_pp_shared = 0, n_gpu_layers = 0

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |    128 |    1 |    256 |    0.108 |  1186.64 |    3.079 |    41.57 |    3.187 |    80.32 |
|   128 |    128 |    4 |   1024 |    0.373 |  1373.96 |    6.878 |    74.44 |    7.251 |   141.23 |

llama_perf_context_print:        load time =     375.71 ms
"""
ASKED = {"input_len": 128, "output_len": 128, "concurrency": 4}


def test_the_table_of_llama_batched_bench_is_read() -> None:
    assert batched_bench_peer.figures(TABLE, ASKED) == {"prefill_tok_s": 1373.96, "decode_tok_s": 74.44}
    assert batched_bench_peer.figures(TABLE, {**ASKED, "concurrency": 1})["decode_tok_s"] == 41.57
    for missing in ({**ASKED, "concurrency": 2}, {**ASKED, "input_len": 64}):
        with pytest.raises(SystemExit, match="no row"):
            batched_bench_peer.figures(TABLE, missing)
    with pytest.raises(SystemExit, match="no row"):
        batched_bench_peer.figures("", ASKED)


def binary(folder: Path, body: str) -> Path:
    path = folder / "llama-batched-bench"
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}")
    path.chmod(0o700)
    return path


@pytest.mark.usefixtures("fakes")
def test_a_given_binary_takes_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is told the shape and the threads; what it prints is compared like any other engine's speed."""
    echo = "flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
    echo += "assert flags['-m'] == 'm.gguf' and flags['-t'] == flags['-tb'] == '2' and int(flags['-c']) >= 256, flags\n"
    echo += "print('| PP | TG | B | S_PP t/s | S_TG t/s |')\n"
    echo += "print('|', flags['-npp'], '|', flags['-ntg'], '|', flags['-npl'], '| 60.0 | 1.5 |')\n"
    monkeypatch.chdir(tmp_path)
    given = Path(binary(tmp_path, echo).name)  # beside us, not on the path of programs
    with compare.engines([compare.OURS], sys.executable, Path("m.gguf"), 2, given) as running:
        turns = list(compare.take_turns(running, [ASKED], 2))
    found = {(c.engine, c.figure): c for c in compare.compared(turns)}
    assert found[compare.BINARY, "decode_tok_s"].values == [1.5, 1.5]
    ratio = found[compare.BINARY, "prefill_tok_s"].ratio
    assert ratio is not None and ratio.median == 0.5


def test_a_binary_that_fails_says_why(tmp_path: Path) -> None:
    given = binary(tmp_path, "sys.exit('unable to load model')")
    with (
        pytest.raises(RequestFailed, match=r"llama-batched-bench ended.*unable to load model"),
        compare.engines([], sys.executable, Path("m.gguf"), 1, given) as running,
    ):
        running[0].measure(ASKED)
