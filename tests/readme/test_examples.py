"""Every program in `examples/` runs and prints what it should."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.terminal import ROOT, Terminal

EXAMPLES = ROOT / "examples"
# What each prints, as patterns in order; `{url}` is a server's address.
EXPECTED = {
    "async_engine.py": ("", [r"France\? The capital of France is Paris", r"Italy\? .*Rome", r"begins with: \S"]),
    "guided_output.py": ("", [r"schema: \['legs', 'name'\]", r"choice: Paris", r"regex: 20\d\d-[01]\d-[0-3]\d"]),
    "embeddings.py": ("", [r"The cat sleeps on the sofa\.", r"0\.\d+ ", r"0\.\d+ "]),
    "logits_processor.py": ("", [r"letter e: 0"]),
    "openai_streaming.py": ("{url}/v1", [r"capital of France is Paris.* tokens in, \d+ out\)", r"Rome.*out\)"]),
    "curl.sh": ("{url}", [r'"ready"', r'"object":"list"', r"Paris", r'"text":', r"data: \[DONE\]",
                          r'"content":"(yes|no)"', r'"embedding":\[', r'"count":2']),
    "capacity.sh": ("{url} 60000", [r"H100", r'"benchmark"', r'"benchmark"', r"two"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Terminal]:
    place = Terminal(tmp_path_factory.mktemp("examples"), smollm2_path)
    yield place
    place.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_prints_what_it_should(terminal: Terminal, name: str) -> None:
    arguments, expected = EXPECTED[name]
    if arguments:
        terminal.serve("tokenmill serve")
    arguments = arguments.format(url="http://127.0.0.1:8000")
    program = "python -W error::ResourceWarning" if name.endswith(".py") else "sh"
    code, printed = terminal.run(f"{program} {EXAMPLES / name} {arguments}")
    assert code == 0, printed
    found = 0
    for pattern in expected:
        match = re.compile(pattern).search(printed, found)
        assert match, f"{pattern} is not in:\n{printed}"
        found = match.end()


@pytest.mark.timeout(600)
def test_a_file_of_prompts_becomes_a_file_of_answers(terminal: Terminal) -> None:
    prompts = [{"id": 1, "prompt": "What is the capital of France?"}, {"id": 2, "prompt": "Say hello."}]
    (terminal.folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    code, printed = terminal.run(f"python {EXAMPLES / 'offline_batch.py'} prompts.jsonl answers.jsonl")
    assert code == 0, printed
    answers = [json.loads(line) for line in (terminal.folder / "answers.jsonl").read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [1, 2]
    assert answers[0]["answer"] == "The capital of France is Paris." and answers[0]["finish_reason"] == "stop"


def test_every_example_is_run_and_listed() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert files == {*EXPECTED, "offline_batch.py"}
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [name for name in files if f"]({name})" not in index] == []
