"""ArrivalProcess, traces and prompts."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tokenmill.bench.traffic import ArrivalProcess, Lengths, TraceScale, read_trace
from tokenmill.bench.workloads import Workload, trace_session
from tokenmill.errors import InvalidConfig


def gaps(arrivals: ArrivalProcess, count: int = 20_000) -> np.ndarray:
    return np.diff(np.fromiter(islice(arrivals.times(3), count), dtype=float))


def test_processes_have_their_mean_and_their_spread() -> None:
    for arrivals, variation in (
        (ArrivalProcess(50, "constant"), 0.0),
        (ArrivalProcess(50, "poisson"), 1.0),
        (ArrivalProcess(50, "gamma", burstiness=0.25), 2.0),
    ):
        found = gaps(arrivals)
        assert found.mean() == pytest.approx(1 / 50, rel=0.03)
        assert found.std() / found.mean() == pytest.approx(variation, abs=0.08)
    assert list(islice(ArrivalProcess(5).times(1), 9)) == list(islice(ArrivalProcess(5).times(1), 9))


def test_a_ramp_grows() -> None:
    times = list(islice(ArrivalProcess(10, "ramp", rate_end=100, duration_s=10).times(0), 550))
    assert sum(t < 1 for t in times) < 25 < 60 < sum(9 <= t < 10 for t in times)
    with pytest.raises(InvalidConfig):
        ArrivalProcess(10, "ramp")


def test_azure_trace(shared_dir: Path) -> None:
    path = shared_dir / "traces" / "AzureLLMInferenceTrace_conv.csv"
    rows = read_trace(path, TraceScale(first_s=600))
    assert (rows[0].at_s, rows[0].input_len, rows[0].output_len) == (0.0, 374, 44)
    assert rows[1].at_s == pytest.approx(4.314579)
    assert rows[-1].at_s <= 600 and len(rows) > 1000
    few = read_trace(path, TraceScale(first_s=600, share=0.1))
    assert len(few) == pytest.approx(len(rows) / 10, rel=0.2) and set(few) <= set(rows)
    bent = read_trace(path, TraceScale(time=0.5, length=0.1, first_s=600, max_output=20))
    assert bent[1].at_s == pytest.approx(rows[1].at_s / 2) and bent[0].input_len == 37
    assert max(row.output_len for row in bent) == 20


def test_mooncake_trace_shares_prefixes(shared_dir: Path) -> None:
    rows = read_trace(shared_dir / "traces" / "conversation_trace.jsonl", TraceScale(first_s=2))
    assert rows[0].hash_ids[0] == rows[1].hash_ids[0] and rows[0].hash_ids[1] != rows[1].hash_ids[1]
    first, second = (trace_session(row, n, 0).turns[0] for n, row in enumerate(rows[:2]))
    words, others = first.prompt.split(), second.prompt.split()
    assert len(words) == rows[0].input_len
    assert words[:512] == others[:512] and words[512:1024] != others[512:1024]


def test_wrong_traces_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidConfig, match="neither"):
        read_trace(path)
    with pytest.raises(InvalidConfig, match="can't be read"):
        read_trace(tmp_path / "missing.csv")
    with pytest.raises(InvalidConfig, match="share"):
        read_trace(path, TraceScale(share=0))
    lines, row = tmp_path / "x.jsonl", '{"timestamp": 1000, "input_length": %s, "output_length": 5, "hash_ids": []}\n\n'
    lines.write_text(row % "7")
    assert [(found.at_s, found.input_len) for found in read_trace(lines)] == [(0.0, 7)]
    lines.write_text(row % '"many"')
    with pytest.raises(InvalidConfig, match="neither"):
        read_trace(lines)


@pytest.mark.parametrize("kind", ["random", "shared-prefix", "schema"])
def test_prompts_have_the_length_asked_for(kind: str) -> None:
    for session in islice(Workload(kind, Lengths(20, 40), Lengths(3, 5), prefix_len=10).sessions(), 30):
        ask = session.turns[0]
        assert len(ask.prompt.split()) == ask.input_len and 3 <= ask.output_len <= 5
        assert (ask.schema is not None) == (kind == "schema")


def test_words_are_single_tokens(smollm2_path: Path) -> None:
    from tokenmill.engine.frontend import tokenizer_of

    tokenizer = tokenizer_of(smollm2_path)
    assert tokenizer is not None
    for session in islice(Workload(input_len=Lengths(200, 200)).sessions(), 5):
        assert len(tokenizer.encode(session.turns[0].prompt)) == pytest.approx(200, rel=0.03)


def test_prefixes_are_shared_and_few() -> None:
    sessions = list(islice(Workload("shared-prefix", prefix_len=50, num_prefixes=3).sessions(), 40))
    assert len({" ".join(s.turns[0].prompt.split()[:50]) for s in sessions}) == 3
    assert len({s.turns[0].prompt for s in sessions}) == 40


def test_a_conversation_carries_what_was_said() -> None:
    session = next(iter(Workload("multi-turn", turns=3).sessions()))
    ask = session.next_ask(2, [("q1", "a1"), ("q2", "a2")])
    assert [m["content"] for m in ask.messages[:4]] == ["q1", "a1", "q2", "a2"]
    assert ask.messages[-1] == session.turns[2].messages[0]


def test_files(tmp_path: Path, shared_dir: Path) -> None:
    csv = shared_dir / "traces" / "chat_lengths.csv"
    for session in islice(Workload("lengths", file=csv, max_input=100, max_output=50).sessions(), 50):
        assert len(session.turns[0].prompt.split()) <= 100 and 1 <= session.turns[0].output_len <= 50
    sonnet = Workload("text", Lengths(64, 64), file=shared_dir / "traces" / "sonnet.txt")
    assert all(200 < len(s.turns[0].prompt) <= 256 for s in islice(sonnet.sessions(), 20))
    for kind, match in (("lengths", "needs --file"), ("poems", "no workload")):
        with pytest.raises(InvalidConfig, match=match):
            next(iter(Workload(kind).sessions()))
