"""A scripted model behind a whole engine and server: it says its script, and a grammar bends a stubborn one."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.server_process import free_port, running
from tokenmill.config import EngineConfig, ModelConfig
from tokenmill.engine.frontend import load_frontend
from tokenmill.errors import InvalidConfig, UnknownModel
from tokenmill.text.script import FAIL, AnswerCursor, Script, TokenizedScript, read_script
from tokenmill.text.tokenizer import byte_tokenizer

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SCRIPT: dict[str, Any] = {
    "control_tokens": ["<|im_start|>", "<|im_end|>", "<|call|>"],
    "added_tokens": ["<tool_call>"],
    "eos": "<|im_end|>",
    "answers": [
        {"match": "stubborn", "say": "No, I will not. Paris!", "stubborn": True},
        {"match": "plain", "say": ["<|call|> and ", {"plain": "<|call|> <tool_call>"}, " <tool_call>"]},
        {"match": "fail later", "say": ["some words ", {"fail": True}]},
        {"match": "slow", "say": "ab", "delay_s": 0.3},
        {"match": "forever", "say": "ha ", "repeat": True},
        {"match": "bytes", "say": [{"ids": [72, 105]}]},
        {"turn": 2, "say": "second é 🌞"},
        {"say": "first"},
    ],
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "n": {"type": "integer"},
        "ok": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "number"}, "minItems": 2},
        "kind": {"enum": ["x", "y"]},
    },
    "required": ["city", "n", "ok", "list", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    with scripted_server(SCRIPT, CHATML) as server:
        yield server


def ask(server: ScriptedServer, *said: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]
    reply = server.post("/v1/chat/completions", {"model": "scripted", "messages": messages, **fields})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_rules_choose_by_prompt_and_turn(scripted: ScriptedServer) -> None:
    assert text_of(ask(scripted, "hello")) == "first"
    second = ask(scripted, "hello", "first", "and now?", logprobs=True)
    assert text_of(second) == "second é 🌞" and second["choices"][0]["finish_reason"] == "stop"
    assert all(token["logprob"] > -0.01 for token in second["choices"][0]["logprobs"]["content"])
    assert text_of(ask(scripted, "bytes")) == "Hi"


def test_control_tokens_are_ids_and_plain_text_is_not(scripted: ScriptedServer) -> None:
    assert text_of(ask(scripted, "plain")) == " and <|call|> <tool_call> <tool_call>", "a control token is hidden"
    shown = text_of(ask(scripted, "plain", skip_special_tokens=False))
    assert shown == "<|call|> and <|call|> <tool_call> <tool_call>"
    counted = ask(scripted, "plain")["usage"]["completion_tokens"]
    assert counted == len("| and <|call|> <tool_call> ||"), "control tokens, and the end, are one each"


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("asked", ["hello", "stubborn"])
def test_a_grammar_bends_it(scripted: ScriptedServer, asked: str, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    answer = ask(scripted, asked, response_format=form, temperature=temperature, max_tokens=400)
    value = json.loads(text_of(answer))
    jsonschema.validate(value, SCHEMA)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert value["city"] == ("No, I will not. Paris!" if asked == "stubborn" else "")


def test_a_choice_bends_it(scripted: ScriptedServer) -> None:
    assert text_of(ask(scripted, "stubborn", guided_choice=["Nothing", "Paris"])) == "Nothing"
    assert text_of(ask(scripted, "hello", guided_regex="f[a-z]{4}")) == "first"


def test_what_the_engine_can_do_it_can_do(scripted: ScriptedServer) -> None:
    several = ask(scripted, "hello", n=3, stop=["s"], temperature=1)
    assert [choice["message"]["content"] for choice in several["choices"]] == ["fir"] * 3
    endless = ask(scripted, "forever", max_tokens=7)
    assert text_of(endless) == "ha ha h" and endless["choices"][0]["finish_reason"] == "length"
    again = ask(scripted, "hello, this is a prompt of more than one block")
    again = ask(scripted, "hello, this is a prompt of more than one block")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
    vectors = scripted.post("/v1/embeddings", {"model": "scripted", "input": ["a", "b", "a"]}).json()["data"]
    assert vectors[0]["embedding"] == vectors[2]["embedding"] != vectors[1]["embedding"]


def test_it_can_fail_and_take_its_time(scripted: ScriptedServer) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "fail later"}]}
    whole = scripted.post("/v1/chat/completions", body)
    assert (whole.status_code, whole.headers["x-should-retry"]) == (500, "false")
    streamed = scripted.post("/v1/chat/completions", {**body, "stream": True}).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n") if line]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-1]) == "some words "
    assert chunks[-1]["error"]["code"] == "request_failed"
    began = time.perf_counter()
    assert text_of(ask(scripted, "slow")) == "ab" and time.perf_counter() - began >= 0.3


def test_many_at_once_under_a_small_cache_say_what_they_say_alone() -> None:
    """Preemption: a row that returns knows where in its answer it was."""
    # Every answer takes half a second at least, so that all of them grow at the same time.
    answers = [{"match": f"#{n}#", "say": f"answer {n} " * 12, "token_delay_s": 0.005} for n in range(8)]
    body = {"model": "scripted", "prompt": [f"#{n}#" for n in range(8)], "max_tokens": 200}
    small = {"num_blocks": 40, "max_running": 8, "max_context": 400, "prefix_caching": False, "speculate": "off"}
    with scripted_server({**SCRIPT, "answers": answers}, **small) as server:
        choices = server.post("/v1/completions", body).json()["choices"]
        assert server.engine.stats().preemptions > 0
    assert [choice["text"] for choice in choices] == [f"answer {n} " * 12 for n in range(8)]


# ── a script's parts ───────────────────────────────────────────────────────────────────────────────────


def cursor(say: list[Any], *, stubborn: bool = False) -> AnswerCursor:
    tokenizer = byte_tokenizer(["<|x|>"])
    path_free = Script(rules=read_rules([{"say": say, "stubborn": stubborn}]))
    script = TokenizedScript(path_free, tokenizer, 257)
    return AnswerCursor(script, script.answer_to([65]))


def read_rules(answers: list[Any]) -> Any:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(answers, file)
        file.flush()
        return read_script(Path(file.name)).rules


def test_a_plain_script_ends_when_it_loses_its_thread_and_a_stubborn_one_goes_on() -> None:
    for stubborn in (False, True):
        one = cursor(["ab<|x|>c", {"fail": True}], stubborn=stubborn)
        assert one.next_token(0) == ord("a")
        one.note_sampled(0, [ord("a"), ord("z")])
        assert one.next_token(2) == (ord("b") if stubborn else 257)
        one.note_sampled(1, [ord("b"), 258, ord("c")])  # what was a draft did not hold
        assert [one.next_token(index) for index in range(5)] == [ord("a"), ord("b"), 258, ord("c"), FAIL]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[", "cannot be read"),
        ("3", "must be an object"),
        ("[]", "at least one answer"),
        ('[{"say": 3}]', "say must be a text"),
        ('[{"say": ["a", {"plain": "b", "ids": [1]}]}]', "say must be a text"),
        ('[{"say": "a", "match": "("}]', "not a regular expression"),
        ('[{"say": "a", "delay_s": 1e9}]', "between 0 and 60"),
        ('[{"say": "a", "turn": true}]', "turn must be of type int"),
        ('[{"say": "a", "shout": true}]', "no field 'shout'"),
        ('{"answers": [{"say": "a"}], "eos": "x", "tokenizer": "there"}', "together with a tokenizer"),
    ],
)
def test_a_wrong_script_is_refused_by_name(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "script.json"
    file.write_text(content)
    with pytest.raises(InvalidConfig, match=words):
        read_script(file)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"quantization": "int8"}, "quantization has no effect"), ({"max_context": 1 << 20}, "but the script's is")],
)
def test_settings_of_weights_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words), scripted_server(SCRIPT, CHATML, **settings):
        pass


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="no such file"):
        load_frontend(EngineConfig(ModelConfig(model="scripted:/does/not/exist.json")))
    file = tmp_path / "script.json"
    file.write_text('{"tokenizer": "nowhere", "answers": [{"say": "a"}]}')
    with pytest.raises(InvalidConfig, match="nowhere does not exist"):
        load_frontend(EngineConfig(ModelConfig(model=f"scripted:{file}")))
    file.write_text('[{"say": "a"}]')
    with pytest.raises(InvalidConfig, match="chat template"):
        load_frontend(EngineConfig(ModelConfig(model=f"scripted:{file}", chat_template=str(tmp_path / "none.jinja"))))


def test_the_documented_script_does_what_the_page_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scripted-model.md").read_text(encoding="utf-8")
    script = json.loads(page.split("```json\n")[1].split("```")[0])
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["city", "n"],
        "additionalProperties": False,
    }
    with scripted_server(script, CHATML) as server:
        assert text_of(ask(server, "hello")) == "Hello."
        assert text_of(ask(server, "weather?", "call", "18 degrees")) == "It is 18 degrees in Paris."
        bent = ask(server, "please refuse", guided_json=schema, temperature=0)
    assert json.loads(text_of(bent)) == {"city": "No, I will not.", "n": 0}


@pytest.mark.slow
def test_the_command_serves_it(tmp_path: Path) -> None:
    script, template = tmp_path / "script.json", tmp_path / "t.jinja"
    script.write_text(json.dumps(SCRIPT))
    template.write_text(CHATML)
    port = free_port()
    command = ["-m", "tokenmill", "serve", f"scripted:{script}", "--chat-template", str(template), "--port", str(port)]
    with running(command, port) as process:
        process.wait_for("ready")
        body = {"model": "script", "messages": [{"role": "user", "content": "hello"}]}
        assert (
            process.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == "first"
        )
        assert len(process.children()) == 1, "a core in a process of its own"
        process.terminate()
        assert process.wait() == 0
