"""The load generator against servers of other makers, in their own wire formats."""

from __future__ import annotations

from dataclasses import fields
from itertools import islice

import anthropic
import huggingface_hub
import ollama
import pytest
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from pydantic import TypeAdapter, with_config

from tests.support.wire_servers import SERVERS, WORDS, wire_server
from tokenmill.bench.dialects import DIALECTS, RequestSpec
from tokenmill.bench.load import ClosedLoop, Target, run_load
from tokenmill.bench.result import without_key
from tokenmill.bench.traffic import Lengths
from tokenmill.bench.workloads import Workload

SCHEMA = {"type": "object"}
ASK = RequestSpec(({"role": "user", "content": "Hi"},), 8, schema=SCHEMA)


@pytest.mark.parametrize("maker", SERVERS)
def test_other_makers_streams_are_read(maker: str) -> None:
    dialect, path, script = SERVERS[maker]
    sessions = islice(Workload(input_len=Lengths(4, 4), output_len=Lengths(8, 8)).sessions(), 6)
    with wire_server(path, script) as url:
        run = run_load(Target(url, "some-model", dialect, "secret"), ClosedLoop(2, sessions), keep_texts=True)
    for record in run.records:
        assert record.error is None, (record.error, record.detail)
        assert record.texts == list(WORDS) and len(record.times_s) == len(WORDS)
        assert (record.input_tokens, record.output_tokens) == (25, 3)
        assert record.finish_reason in ("stop", "length", "end_turn")


# ── the makers' own clients read the same servers, and know every field that is asked with ──────────────────────────


def by_anthropic(url: str) -> tuple[list[str], int, int]:
    with anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as client:
        asked = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
        with client.messages.stream(**asked) as stream:
            words = list(stream.text_stream)
            usage = stream.get_final_message().usage
    return words, usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens


def by_ollama(url: str) -> tuple[list[str], int | None, int | None]:
    client = ollama.Client(host=url)
    try:
        messages = [{"role": "user", "content": "Hi"}]
        *pieces, end = client.chat("m", messages=messages, stream=True, options={"num_predict": 8})
    finally:
        client.close()
    return [piece.message.content or "" for piece in pieces], end.prompt_eval_count, end.eval_count


def by_huggingface_hub(url: str) -> tuple[list[str], int, int]:
    client = huggingface_hub.InferenceClient(model=f"{url}/generate_stream")
    pieces = list(client.text_generation("Hi", stream=True, details=True, max_new_tokens=8))
    end = pieces[-1].details
    assert end is not None
    return [piece.token.text for piece in pieces], end.input_length, end.generated_tokens


CLIENTS = {"anthropic": by_anthropic, "ollama": by_ollama, "tgi": by_huggingface_hub}


@pytest.mark.parametrize("maker", CLIENTS)
def test_the_makers_own_clients_read_the_same_streams(maker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_AUTH_TOKEN", raising=False)  # it would be sent beside the key
    _, path, script = SERVERS[maker]
    with wire_server(path, script) as url:
        assert CLIENTS[maker](url) == (list(WORDS), 25, 3)


def test_the_makers_own_types_know_every_field_that_is_asked_with() -> None:
    body = DIALECTS["anthropic"].body(ASK, "m")
    anthropic_request = TypeAdapter(with_config(extra="forbid")(MessageCreateParamsStreaming))
    assert anthropic_request.validate_python(body)["output_config"] == body["output_config"]
    assert body["output_config"]["format"] == {"type": "json_schema", "schema": SCHEMA}

    body = DIALECTS["ollama"].body(ASK, "m")
    asked = ollama._types.ChatRequest.model_validate(body, extra="forbid")
    assert asked.format == SCHEMA and ollama.Options.model_validate(asked.options, extra="forbid").num_predict == 8

    body = DIALECTS["tgi"].body(ASK, "m")
    parameters = huggingface_hub.TextGenerationInputGenerateParameters.parse_obj_as_instance(body["parameters"])
    assert set(parameters.__dict__) == {field.name for field in fields(parameters)}
    assert parameters.grammar.type == "json" and parameters.grammar.value == SCHEMA

    assert DIALECTS["openai-chat"].body(ASK, "m")["response_format"]["json_schema"]["schema"] == SCHEMA


def test_a_kept_command_has_no_key_in_it() -> None:
    asked = ["bench", "serve", "--api-key", "k1", "--rate", "2", "--api-key=k2"]
    assert without_key(asked) == ["bench", "serve", "--api-key", "…", "--rate", "2", "--api-key=…"]
