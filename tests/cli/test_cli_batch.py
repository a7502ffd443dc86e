"""`tokenmill batch`: rows of all kinds in, each answered once, whatever interrupts it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cli_process import real
from tokenmill.cli.batch import RowAsker, template_pieces
from tokenmill.cli.batch_files import AnswerFile, fingerprint, num_lines, require_same_row
from tokenmill.errors import InvalidConfig, InvalidRequest
from tokenmill.params import SamplingParams
from tokenmill.types import ChatRequest, PromptRequest

CHAT = {"model": "model", "messages": [{"role": "user", "content": "capital?"}]}
NUM_ROWS = 5000


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path) -> dict[int, dict[str, Any]]:
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    by_line = {answer["line"]: answer for answer in answers}
    assert len(by_line) == len(answers), "a line was answered twice"
    return by_line


def asker(template: str | None = None, system: str | None = None, raw: bool = False) -> RowAsker:
    return RowAsker("prompt", template, system, SamplingParams(), raw)


# ── rows ───────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_become_requests() -> None:
    asked = asker(system="Be brief.").ask({"prompt": "Hi"})
    assert isinstance(asked, ChatRequest) and [m.role for m in asked.messages] == ["system", "user"]
    asked = asker('{{"q"}}: {q} ({n})').ask({"q": "why", "n": [1, 2]})
    assert isinstance(asked, ChatRequest) and asked.messages[0].content == '{"q"}: why ([1,2])'
    asked = asker(raw=True).ask({"prompt": "Once"})
    assert isinstance(asked, PromptRequest) and asked.prompt == "Once"
    asked = asker().ask({"messages": [{"role": "user", "content": "Hi"}]})
    assert isinstance(asked, ChatRequest) and asked.messages[0].content == "Hi"


@pytest.mark.parametrize(
    ("template", "row", "words"),
    [
        (None, {"text": "Hi"}, "no text in the field 'prompt'"),
        (None, {"prompt": 7}, "no text in the field 'prompt'"),
        (None, {"messages": "Hi"}, "a conversation must be a list of messages"),
        ("{a} {b}", {"a": "x"}, "no field 'b'"),
    ],
)
def test_rows_that_lack_something_say_what(template: str | None, row: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        asker(template).ask(row)


@pytest.mark.parametrize("template", ["{", "no field", "{0}", "{a.b}", "{a!r}", "{a:>5}", "{}"])
def test_wrong_templates_are_refused_before_anything_runs(template: str) -> None:
    with pytest.raises(InvalidConfig, match="template"):
        template_pieces(template)


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_file_of_answers_says_what_is_done(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"custom_id": "c", "url": "/v1/x", "body": {}}]
    done = [
        {"line": 2, "input": rows[1], "output": "x", "error": None},
        {"line": 3, "custom_id": "c", "response": {"status_code": 400}, "error": None},
        {"line": 9, "input": None, "output": None, "error": {"code": "x"}},
    ]
    target = written(tmp_path / "out", done)
    with target.open("a") as file:
        file.write('{"line": 1, "inp')
    answers = AnswerFile(target)
    assert (answers.num_done, answers.num_failed) == (3, 2)
    assert [bool(answers.print_of(line)) for line in (1, 2, 3, 9, 5000)] == [False, True, True, True, False]
    with pytest.raises(InvalidConfig, match="another run is writing"):
        AnswerFile(target)
    require_same_row(2, rows[1], answers.print_of(2), target)
    require_same_row(3, rows[2], answers.print_of(3), target)
    require_same_row(9, {"anything": 1}, answers.print_of(9), target)
    for other in (rows[0], None):
        with pytest.raises(InvalidRequest, match="answers a different row than line 2"):
            require_same_row(2, other, answers.print_of(2), target)
    answers.append(json.dumps({"line": 1, "input": rows[0], "output": "", "error": None}).encode())
    answers.close()
    assert set(read(target)) == {1, 2, 3, 9}, "half a line was cut off"
    again = AnswerFile(target, retry_failed=True)
    assert again.num_done == 2 and not again.print_of(3) and not again.print_of(9)
    again.append(b'{"line": 3}')
    again.close()
    assert set(read(target)) == {1, 2, 3} and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("content", ["hello\n", "[1]\n", '{"line": 0}\n', '{"line": 1}\n{"line": 1}\n'])
def test_files_that_are_no_answers_are_left_alone(tmp_path: Path, content: str) -> None:
    target = tmp_path / "precious.txt"
    target.write_text(content)
    with pytest.raises(InvalidConfig, match="precious"):
        AnswerFile(target)
    assert target.read_text() == content


def test_lines_are_counted_and_rows_told_apart(tmp_path: Path) -> None:
    for content, expected in (("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2), ("a\n\n", 2)):
        (tmp_path / "f").write_text(content)
        assert num_lines(tmp_path / "f") == expected
    prints = {fingerprint({"prompt": str(n)}) for n in range(5000)}
    assert len(prints) == 5000 and not any(value < 2 for value in prints)


# ── runs ───────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_of_all_kinds_and_what_is_left_of_them(tmp_path: Path, environment: dict[str, str]) -> None:
    script = written(tmp_path / "model.json", [json.dumps([{"match": "capital", "say": "Paris."}, {"say": "Hello."}])])
    rows = [
        {"prompt": "What is the capital of France?", "n": 1},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
        "{broken",
        {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "temperature": 9}},
        {"custom_id": "c", "method": "POST", "url": "/v1/nothing", "body": CHAT},
        "",
        {"nothing": 1},
        {"custom_id": "d", "url": "/v1/embeddings", "body": {"input": "no model is named"}},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ]
    source, target = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = ["batch", str(source), str(target), "--model", f"scripted:{script}"]
    done = real(environment, *command)
    assert done.returncode == 0 and done.stdout == "", done
    assert "answered 9 of 9 lines, 5 of them with an error" in done.stderr and "line 3: the line is not" in done.stderr
    answers = read(target)
    assert set(answers) == set(range(1, 10))
    assert answers[1]["output"] == "Paris." and answers[1]["input"] == rows[0] and answers[1]["error"] is None
    assert answers[1]["finish_reason"] == "stop" and answers[1]["usage"]["completion_tokens"] > 0
    assert answers[2]["custom_id"] == "a"
    assert answers[2]["response"]["body"]["choices"][0]["message"]["content"] == "Paris."
    assert answers[3]["error"]["code"] == "invalid_json_line" and answers[3]["input"] is None
    assert answers[4]["response"]["status_code"] == 400
    assert answers[5]["error"]["param"] == "url" and answers[5]["custom_id"] == "c"
    assert answers[6]["error"]["message"] == "the line is blank"
    assert answers[7]["error"]["param"] == "prompt"
    assert answers[9]["output"] == "Hello."
    lines = [json.dumps(answers[line]) + "\n" for line in sorted(answers)]
    target.write_text("".join(lines[:4]) + lines[4][:10])
    again = real(environment, *command, "--retry-failed")
    assert again.returncode == 0 and set(read(target)) == set(range(1, 10)), again
    assert "answered 7 of 9 lines, 5 of them with an error (and 2 by earlier runs)" in again.stderr


@pytest.mark.slow
def test_thousands_of_rows_killed_twice(tmp_path: Path, environment: dict[str, str], stories_dir: Path) -> None:
    """Every row once, bad ones with their number, and memory that does not grow with the rows."""
    bad = set(random.Random(1).sample(range(1, NUM_ROWS + 1), NUM_ROWS // 100))
    rows = ["{broken" if n in bad else {"prompt": f"Once upon a time {n}", "n": n} for n in range(1, NUM_ROWS + 1)]
    source, target = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    arguments = ["batch", str(source), str(target), "--model", str(stories_dir), "--raw", "--max-tokens", "16"]
    command = [sys.executable, "-m", "tokenmill", *arguments, "--temperature", "0", "--threads", "1"]
    for share in (0.2, 0.6):
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as child:
            grown = killed_at(child, target, int(share * NUM_ROWS))
        assert grown < 20 << 20, f"{grown >> 20} MB more than at the first answers"
    last = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert last.returncode == 0 and "by earlier runs" in last.stderr
    answers = read(target)
    assert set(answers) == set(range(1, NUM_ROWS + 1))
    assert {line for line, answer in answers.items() if answer["error"]} == bad
    assert all(answer["input"]["n"] == line for line, answer in answers.items() if line not in bad)


def num_answers(target: Path) -> int:
    return target.read_bytes().count(b"\n") if target.exists() else 0


def killed_at(child: subprocess.Popen[bytes], target: Path, least: int) -> int:
    """Kill a run with all its processes once there are so many answers; how much its front has grown meanwhile."""
    first, process = 0, psutil.Process(child.pid)
    before = num_answers(target)
    deadline = time.monotonic() + 250
    while (count := num_answers(target)) < least:
        assert child.poll() is None and time.monotonic() < deadline
        if not first and count > before + 100:
            first = process.memory_info().rss
        time.sleep(0.05)
    last = process.memory_info().rss
    for one in [*process.children(recursive=True), process]:
        os.kill(one.pid, signal.SIGKILL)
    return last - first
