"""TGI's routes, asked by huggingface_hub's own client: text whole, streamed and with details, chat, errors by type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import GenerationError, HfHubHTTPError, OverloadedError, ValidationError

from tests.support.fake_engine import STORY
from tests.support.loopback import Serving
from tests.support.scripted_server import ScriptedServer, scripted_server
from tokenmill.config.server import ServerConfig

ANSWERS = [
    {"match": "fail", "say": ["some ", {"fail": True}]},
    {"match": "forever", "say": "ha ", "repeat": True},
    {"match": "refuse", "say": "No, never!", "stubborn": True},
    {"say": "Il était une fois – 🌞."},
]
SAID = "Il était une fois – 🌞."


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    with scripted_server(ANSWERS, max_context=500) as server:
        yield server


@pytest.fixture
def hub(scripted: ScriptedServer) -> Iterator[InferenceClient]:
    with InferenceClient(scripted.url) as client:
        yield client


def test_plain_text(hub: InferenceClient) -> None:
    assert hub.text_generation("Once") == SAID
    assert hub.text_generation("Once", return_full_text=True) == f"Once{SAID}"
    assert hub.text_generation("forever", max_new_tokens=7) == "ha ha h"
    assert hub.text_generation("Once", stop=["une"]) == "Il était une", "TGI keeps a stop sequence"


@pytest.mark.parametrize(
    ("prompt", "extra", "reason", "text"),
    [
        ("Once", {}, "eos_token", SAID),
        ("Once", {"stop": ["une"]}, "stop_sequence", "Il était une"),
        ("forever", {"max_new_tokens": 5}, "length", "ha ha"),
    ],
)
def test_details_whole_and_streamed_agree(
    hub: InferenceClient, prompt: str, extra: dict[str, Any], reason: str, text: str
) -> None:
    whole = hub.text_generation(prompt, details=True, top_n_tokens=2, seed=3, **extra)
    assert whole.generated_text == text and whole.details is not None
    assert (whole.details.finish_reason, whole.details.seed) == (reason, 3)
    assert whole.details.generated_tokens == len(whole.details.tokens)
    assert "".join(token.text for token in whole.details.tokens) == text
    events = list(hub.text_generation(prompt, details=True, stream=True, top_n_tokens=2, seed=3, **extra))
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    shown = [(event.token.id, event.token.special) for event in events]
    assert shown == [(token.id, token.special) for token in whole.details.tokens]
    assert "".join(event.token.text for event in events) == text == events[-1].generated_text
    assert all(event.generated_text is None and event.details is None for event in events[:-1])
    last = events[-1].details
    assert last is not None and (last.finish_reason, last.generated_tokens) == (reason, len(events))
    assert all(event.token.logprob <= 0 and event.top_tokens for event in events if not event.token.special)
    assert events[-1].token.special is (reason == "eos_token")


def test_plain_stream(hub: InferenceClient) -> None:
    pieces = list(hub.text_generation("Once", stream=True))
    assert "".join(pieces) == SAID and len(pieces) > 5


def test_the_prompts_tokens(hub: InferenceClient) -> None:
    reply = hub.text_generation("Once", details=True, decoder_input_details=True, max_new_tokens=1)
    assert reply.details is not None
    assert [token.text for token in reply.details.prefill] == ["<s>", "O", "n", "c", "e"]
    assert [token.logprob is None for token in reply.details.prefill] == [True, False, False, False, False]


def test_parameters_act(hub: InferenceClient, scripted: ScriptedServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    grammar: Any = {"type": "json", "value": schema}
    assert json.loads(hub.text_generation("refuse", grammar=grammar, max_new_tokens=60))["a"] == "No, never!"
    assert hub.text_generation("refuse", grammar={"type": "regex", "value": "N[a-z]{3}"}) == "Noaa"  # type: ignore[arg-type]
    drawn = hub.text_generation("Once", do_sample=True, temperature=0.9, top_k=5, top_p=0.9, typical_p=0.9, best_of=2)
    assert drawn == SAID
    truncated = {"inputs": "forever and Once", "parameters": {"truncate": 4, "details": True}}
    assert scripted.post("/generate", truncated).json()["generated_text"] == SAID, "what is cut off is not seen"
    assert scripted.post("/generate", truncated).headers["x-prompt-tokens"] == "4"


def test_the_routes_differ_as_they_do_in_tgi(scripted: ScriptedServer) -> None:
    body = {"inputs": "Once", "parameters": {"max_new_tokens": 2}}
    assert scripted.post("/generate", body).json() == {"generated_text": "Il"}
    assert scripted.post("/", body).json() == [{"generated_text": "Il"}]
    for path, more in (("/generate_stream", {}), ("/", {"stream": True})):
        streamed = scripted.post(path, {**body, **more})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert [block[:5] for block in streamed.text.strip().split("\n\n")] == ["data:", "data:"]


def test_chat(hub: InferenceClient) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert hub.chat_completion(messages, model="scripted").choices[0].message.content == SAID
    chunks = hub.chat_completion(messages, model="scripted", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SAID


def test_errors_by_type(hub: InferenceClient, scripted: ScriptedServer) -> None:
    with pytest.raises(ValidationError, match="top_p"):
        hub.text_generation("Once", top_p=7.0)
    with pytest.raises(ValidationError, match="tokens"):
        hub.text_generation("x" * 600)
    for parameter in ({"watermark": True}, {"best_of": 2}):
        with pytest.raises(ValidationError, match=next(iter(parameter))):
            list(hub.text_generation("Once", stream=True, **parameter))  # type: ignore[call-overload]
    with pytest.raises(GenerationError):
        hub.text_generation("fail")
    with pytest.raises(GenerationError):
        list(hub.text_generation("fail", stream=True))
    assert scripted.post("/generate", {}).status_code == 422
    assert scripted.post("/generate", {"inputs": "Once", "parameters": {"adapter_id": "x"}}).status_code == 404
    assert (
        scripted.post("/generate", {"inputs": "Once", "parameters": {"top_p": 7}}).json()["error_type"] == "validation"
    )


def test_a_full_server_and_a_missing_key(serving: Serving) -> None:
    server = serving(ServerConfig(api_key=("secret",)))
    with InferenceClient(server.url, token="secret") as client:
        assert client.text_generation("Hi") == STORY
        server.engine.max_running = 0
        with pytest.raises(OverloadedError):
            client.text_generation("Hi")
    with InferenceClient(server.url, token="wrong") as client, pytest.raises(HfHubHTTPError) as refused:
        client.text_generation("Hi")
    assert refused.value.response.status_code == 401


def test_info_and_health(scripted: ScriptedServer) -> None:
    with InferenceClient(scripted.url, provider="hf-inference", api_key="unused") as client:
        info = client.get_endpoint_info()
        assert client.health_check()
    assert (info["model_id"], info["max_total_tokens"], info["max_input_tokens"]) == ("scripted", 500, 499)


def test_tokens_are_placed_in_the_text(scripted: ScriptedServer) -> None:
    text = "café 🌞"
    tokens = scripted.post("/tokenize", {"inputs": text}).json()
    assert tokens[0] == {"id": 256, "text": "", "start": 0, "stop": 0}
    assert "".join(token["text"] for token in tokens) == text
    assert all(text[token["start"] : token["stop"]] == token["text"] for token in tokens)
    assert len(scripted.post("/tokenize", {"inputs": text, "add_special_tokens": False}).json()) == len(tokens) - 1
