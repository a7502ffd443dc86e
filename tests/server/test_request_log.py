"""The request log: kept only when asked for, redacted, bounded, and replayed by the benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_server import scripted_server
from tokenmill.bench.traffic import read_trace
from tokenmill.bench.workloads import trace_session
from tokenmill.cli import main
from tokenmill.config.server import ServerConfig
from tokenmill.server import request_log
from tokenmill.server.request_log import FILE_NAME, RequestLog

CONTENT = "I am bob@example.org, my card is 4111 1111 1111 1111"
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": CONTENT}], "max_tokens": 4, "temperature": 0.5}
TEMPLATE = "{{ messages[0].content }}"


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines()]


def test_requests_are_kept_redacted_and_can_be_sent_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = [{"say": "Call +49 30 901820 now"}]
    config = ServerConfig(request_log=tmp_path / "log")
    with scripted_server(script, template=TEMPLATE, config=config) as server:
        server.post("/v1/chat/completions", {**CHAT, "max_tokens": 64})
        server.post("/v1/completions", {"model": "scripted", "prompt": "Once", "max_tokens": 4, "stream": True})
        server.post("/v1/chat/completions", {**CHAT, "temperature": -1})
        server.get("/v1/models")
    file = tmp_path / "log" / FILE_NAME
    assert file.stat().st_mode & 0o077 == 0
    chat, completion = lines(tmp_path / "log")
    assert chat["messages"][0]["content"] == "I am <EMAIL_1>, my card is <CARD_1>"
    assert chat["answers"] == ["Call <PHONE_1> now"] and chat["params"]["temperature"] == 0.5
    assert (chat["outcome"], chat["status"], chat["path"]) == ("stop", 200, "/v1/chat/completions")
    assert completion["prompts"] == ["Once"] and completion["output_length"] == 4
    rows = read_trace(file)
    (ask,) = trace_session(rows[0], 0, 0).turns
    assert ask.messages == ({"role": "user", "content": "I am <EMAIL_1>, my card is <CARD_1>"},)
    assert ask.output_len == chat["output_length"] and rows[1].messages[0]["content"] == "Once"
    with scripted_server(script, template=TEMPLATE, config=ServerConfig(request_log=tmp_path / "again")) as server:
        replay = ["--trace", str(file), "--time-scale", "0.01", "--warmup", "0", "--max-lag-ms", "60000"]
        assert main(["bench", "serve", "--url", server.url, *replay]) == 0
    again = lines(tmp_path / "again")
    assert sorted(line["messages"][0]["content"] for line in again) == ["I am <EMAIL_1>, my card is <CARD_1>", "Once"]
    capsys.readouterr()


def test_nothing_is_kept_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log.random, "random", lambda: 0.3)
    assert RequestLog(ServerConfig()).begin([]) is None
    with scripted_server([{"say": "Fine."}], template=TEMPLATE, config=ServerConfig()) as server:
        server.post("/v1/chat/completions", CHAT)
    for share, number in ((0.2, 0), (0.4, 1)):
        config = ServerConfig(request_log=tmp_path / str(number), request_log_share=share, request_log_redact=False)
        with scripted_server([{"say": "Fine."}], template=TEMPLATE, config=config) as server:
            server.post("/v1/chat/completions", CHAT)
        assert (tmp_path / str(number)).exists() == bool(number)
    assert lines(tmp_path / "1")[0]["messages"][0]["content"] == CONTENT


def test_the_oldest_lines_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "ROTATE_BYTES", 1 << 18)
    log = RequestLog(ServerConfig(request_log=tmp_path, request_log_bytes=1 << 20))
    for number in range(60):
        log._write([{"number": number, "answers": ["word " * 8000]}])
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert sum(sizes) <= (1 << 20) + (1 << 18) and len(sizes) >= 3
    kept = [json.loads(line)["number"] for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert max(kept) == 59 and sorted(kept) == list(range(min(kept), 60))
