"""`run --url` and `chat --url`: a running server as the model."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_process import ROOT, real
from tests.support.loopback import RunningServer, Serving
from tokenmill.cli.remote import RemoteModel, sent
from tokenmill.cli.session import write_answer
from tokenmill.config.server import ServerConfig
from tokenmill.errors import EngineDead, InvalidConfig, InvalidRequest
from tokenmill.params import Guided, SamplingParams

ASKED: dict[str, Any] = {"model": "fake/tiny", "messages": [{"role": "user", "content": "hi"}]}


def test_an_answer_comes_as_from_a_model_here(server: RunningServer) -> None:
    model, out = RemoteModel(server.url), io.StringIO()
    answer = write_answer(model.stream_chat(ASKED["messages"], SamplingParams(max_tokens=4)), out)
    whole = server.post("/v1/chat/completions", {**ASKED, "max_tokens": 4}).json()
    assert answer.text == whole["choices"][0]["message"]["content"] != ""
    assert answer.usage is not None and answer.usage.completion_tokens == whole["usage"]["completion_tokens"]
    assert out.getvalue().startswith(answer.text)
    raw = write_answer(model.stream("hi", SamplingParams(max_tokens=2)), out)
    assert raw.finish_reason == "length" and "cut off" in raw.ending


def test_run_asks_a_server(server: RunningServer) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = real(environment, "run", "--url", server.url, "hi", "--max-tokens", "3", "--stats")
    assert done.returncode == 0 and done.stdout.strip() and "answer 3 tokens" in done.stderr


def test_stopping_leaves_the_connection(server: RunningServer) -> None:
    events = RemoteModel(server.url).stream("hi", SamplingParams(max_tokens=1000))
    next(events)
    events.stop()
    assert len(list(events)) < 999
    events.close()


def test_what_goes_wrong_is_told_in_the_servers_words(
    server: RunningServer, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineDead, match=r"no server answers at http://127\.0\.0\.1:9"):
        RemoteModel("127.0.0.1:9")
    with pytest.raises(InvalidConfig, match="is not the URL"):
        RemoteModel("ftp://x")
    with pytest.raises(InvalidRequest, match=r"refused the request .404.*nobody"):
        RemoteModel(server.url, "nobody").stream("hi", SamplingParams())
    keyed = serving(ServerConfig(api_key=("k",)))
    monkeypatch.delenv("TOKENMILL_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(InvalidRequest, match="requires an API key"):
        RemoteModel(keyed.url)
    assert RemoteModel(keyed.url, key="k").name


def test_flags_of_an_engine_are_refused_by_name(server: RunningServer, tmp_path: Path) -> None:
    settings = tmp_path / "here.toml"
    settings.write_text("[ops]\nthreads = 2\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for verb in ("run", "chat"):
        done = real(environment, verb, "--url", server.url, "--threads", "2", "fake/tiny")
        assert done.returncode == 2 and "--threads has no effect with --url" in done.stderr
    done = real(environment, "run", "--url", server.url, "--max-tokens", "2", "hi", "--config", str(settings))
    assert done.returncode == 0 and done.stdout.strip()  # a file's settings are for engines that run here


@pytest.mark.parametrize(
    ("guided", "fields"),
    [
        (Guided.json(), {"response_format": {"type": "json_object"}}),
        (Guided.choice(["yes", "no"]), {"guided_choice": ["yes", "no"]}),
        (Guided.regex("a+"), {"guided_regex": "a+"}),
        (Guided.grammar('root ::= "a"'), {"guided_grammar": 'root ::= "a"'}),
        (Guided.grammar('start: "a"'), {"guided_grammar": 'start: "a"'}),
    ],
)
def test_constraints_of_all_kinds_are_sent(guided: Guided, fields: dict[str, Any], server: RunningServer) -> None:
    params = SamplingParams(guided=guided, max_tokens=4)
    assert sent(params) == {"temperature": 1.0, "max_tokens": 4, **fields}
    RemoteModel(server.url).stream("hi", params).close()  # the server reads it


def test_only_what_was_set_is_sent() -> None:
    assert sent(SamplingParams(temperature=0.5, seed=3, stop=["x"])) == {"temperature": 0.5, "seed": 3, "stop": ["x"]}
    assert sent(SamplingParams(context_shift=False)) == {"temperature": 1.0, "context_shift": False}
    guided = sent(SamplingParams(guided=Guided.json({"type": "object"})))
    assert guided["response_format"]["json_schema"]["schema"] == {"type": "object"}
