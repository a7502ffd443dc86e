"""The real openai package against a real HTTP server."""

from __future__ import annotations

import math

import openai
import pytest

from tests.support.fake_engine import STORY
from tests.support.loopback import RunningServer, Serving
from tokenmill.config.server import ServerConfig
from tokenmill.errors import EngineDead, RequestFailed

MODEL = "fake/tiny"
HELLO = [{"role": "user", "content": "Hello"}]


def test_chat_has_all_required_fields(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=1)
    assert reply.id.startswith("chatcmpl-") and reply.object == "chat.completion"
    assert reply.model == MODEL and reply.system_fingerprint == "fp_fake"
    choice = reply.choices[0]
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content == "Once " and choice.message.refusal is None and choice.logprobs is None
    assert reply.usage.completion_tokens == 1
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 1
    assert reply.usage.prompt_tokens_details.cached_tokens == 2


def test_streamed_text_equals_the_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO)
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    assert whole.choices[0].message.content == STORY
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == STORY


def test_stream_helper_accumulates_n_choices(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO, n=3, logprobs=True) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [STORY] * 3
    assert "".join(token.token for token in final.choices[2].logprobs.content) == STORY


def test_usage_chunk(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}, max_tokens=2
        )
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 2


def test_stop_and_seed_reach_the_engine(client: openai.OpenAI, server: RunningServer) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=HELLO, stop="Lily", seed=-(2**63))
    assert reply.choices[0].message.content == STORY[: STORY.index("Lily")]
    assert reply.choices[0].finish_reason == "stop"
    assert server.engine.seen[0].params.seed == -(2**63)


@pytest.mark.parametrize("num_top", [0, 5])
def test_chat_logprobs(client: openai.OpenAI, num_top: int) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=num_top)
    tokens = reply.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == reply.choices[0].message.content
    assert all(bytes(token.bytes).decode() == token.token for token in tokens)
    assert all(len(token.top_logprobs) == num_top for token in tokens)
    for token in tokens:
        values = [top.logprob for top in token.top_logprobs]
        assert values == sorted(values, reverse=True) and all(value <= 0 for value in values)


@pytest.mark.parametrize(
    ("prompt", "num_prompts"), [("Hi", 1), (["a", "b", "c"], 3), ([1, 2, 3], 1), ([[1, 2], [3]], 2)]
)
def test_completion_prompts(client: openai.OpenAI, prompt: object, num_prompts: int) -> None:
    reply = client.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=3)
    assert reply.object == "text_completion"
    assert [choice.index for choice in reply.choices] == list(range(2 * num_prompts))
    assert {choice.text for choice in reply.choices} == {"Once upon a "}


def test_completion_lists_keep_their_order(client: openai.OpenAI, server: RunningServer) -> None:
    reply = client.completions.create(model=MODEL, prompt=["first", "second"], n=2, echo=True, max_tokens=1)
    assert [choice.text for choice in reply.choices] == ["firstOnce "] * 2 + ["secondOnce "] * 2
    assert reply.usage.prompt_tokens == 6 + 7 and reply.usage.completion_tokens == 4


def test_completion_stream_interleaves_prompts(client: openai.OpenAI, server: RunningServer) -> None:
    server.engine.delay_s = 0.002
    texts = dict.fromkeys(range(4), "")
    finishes: list[int] = []
    for chunk in client.completions.create(model=MODEL, prompt=["a", "b"], n=2, echo=True, stream=True, max_tokens=9):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        finishes += [chunk.choices[0].index] if chunk.choices[0].finish_reason else []
    assert sorted(finishes) == [0, 1, 2, 3]
    assert texts[0] == texts[1] and texts[0].startswith("aOnce upon") and texts[3].startswith("bOnce upon")


def test_default_length_of_completions_is_16(client: openai.OpenAI, server: RunningServer) -> None:
    client.completions.create(model=MODEL, prompt="a")
    assert server.engine.seen[0].params.max_tokens == 16


def test_legacy_logprobs(client: openai.OpenAI) -> None:
    choice = client.completions.create(model=MODEL, prompt="Hi", logprobs=2, max_tokens=3).choices[0]
    assert choice.logprobs.tokens == ["Once ", "upon ", "a "]
    assert choice.logprobs.text_offset == [0, 5, 10]
    assert choice.logprobs.token_logprobs == [-0.5] * 3
    assert choice.logprobs.top_logprobs[0] == {"Once ": -0.5, "Once 1": -1.5}


def test_legacy_logprobs_stream_goes_on_counting(client: openai.OpenAI) -> None:
    chunks = client.completions.create(model=MODEL, prompt="Hi", logprobs=0, max_tokens=3, stream=True)
    offsets = [
        offset for chunk in chunks if chunk.choices[0].logprobs for offset in chunk.choices[0].logprobs.text_offset
    ]
    assert offsets == [0, 5, 10]


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    choice = client.completions.create(model=MODEL, prompt="Hey", echo=True, logprobs=1, max_tokens=0).choices[0]
    assert choice.text == "Hey" and choice.finish_reason == "length"
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert "".join(choice.logprobs.tokens) == "Hey"
    assert choice.logprobs.text_offset == [0, 0, 1, 2]
    assert choice.logprobs.top_logprobs[0] is None


def test_echo_of_token_ids_scores_every_choice(client: openai.OpenAI) -> None:
    choices = client.completions.create(
        model=MODEL, prompt=[72, 101, 121], echo=True, logprobs=0, max_tokens=1, n=2
    ).choices
    for choice in choices:
        assert choice.text == "HeyOnce "
        assert choice.logprobs.tokens == ["H", "e", "y", "Once "]
        assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]


def test_embeddings(client: openai.OpenAI) -> None:
    inputs = ["one", "two", "three", "four"]
    floats = client.embeddings.create(model=MODEL, input=inputs, encoding_format="float")
    packed = client.embeddings.create(model=MODEL, input=inputs)  # the SDK asks for base64 and unpacks it
    assert [item.index for item in floats.data] == [0, 1, 2, 3]
    for one, other in zip(floats.data, packed.data, strict=True):
        assert math.isclose(math.hypot(*one.embedding), 1.0, rel_tol=1e-6)
        assert one.embedding == pytest.approx(other.embedding, rel=1e-6)
    assert floats.usage.prompt_tokens == sum(len(text) + 1 for text in inputs) == floats.usage.total_tokens


def test_embedding_dimensions_and_ids(client: openai.OpenAI) -> None:
    vector = client.embeddings.create(model=MODEL, input=[1, 2, 3], dimensions=8).data[0].embedding
    assert len(vector) == 8 and math.isclose(math.hypot(*vector), 1.0, rel_tol=1e-6)


def test_large_embedding_batches_keep_their_order(client: openai.OpenAI, server: RunningServer) -> None:
    server.engine.max_running = 40  # fewer than there are inputs: the batch is fed in portions
    reply = client.embeddings.create(model=MODEL, input=[[place % 500 + 1] * 2 for place in range(300)], dimensions=1)
    assert [item.index for item in reply.data] == list(range(300)) and len(server.engine.seen) == 300
    assert server.engine.running == {}


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    card = client.models.retrieve(MODEL)
    assert (card.object, card.created, card.owned_by) == ("model", 1_700_000_000, "tokenmill")


# ── every error class the SDK knows ────────────────────────────────────────────────────────────────────


def test_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=2.5)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_context_length(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 600}], stream=stream)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x" * 600, stream=stream)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_overloaded(client: openai.OpenAI, server: RunningServer) -> None:
    server.engine.max_running = 0
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO)
    assert caught.value.response.headers["retry-after"] == "3" and caught.value.code == "rate_limit_exceeded"


def test_a_list_is_refused_as_a_whole(client: openai.OpenAI, server: RunningServer) -> None:
    server.engine.max_running = 2
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model=MODEL, prompt=["a", "b", "c"])
    assert server.engine.running == {} and len(server.engine.aborted) == 2


@pytest.mark.parametrize("state", ["draining", "dead", "loading"])
def test_not_ready_is_503(client: openai.OpenAI, server: RunningServer, state: str) -> None:
    server.engine.state = state
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO)
    assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"]


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_has_a_status(
    client: openai.OpenAI, server: RunningServer, stream: bool
) -> None:
    server.engine.failure, server.engine.fail_after = EngineDead("the engine process is gone"), 0
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
    assert caught.value.status_code == 503 and caught.value.code == "engine_dead"


def test_failure_in_the_middle_of_a_stream_is_raised(client: openai.OpenAI, server: RunningServer) -> None:
    server.engine.failure = RequestFailed("logits are not numbers")
    seen = ""
    with pytest.raises(openai.APIError, match="logits are not numbers"):
        for chunk in client.chat.completions.create(model=MODEL, messages=HELLO, stream=True):
            seen += chunk.choices[0].delta.content or ""
    assert seen == "Once upon a "


def test_failure_in_the_middle_of_a_whole_reply(client: openai.OpenAI, server: RunningServer) -> None:
    server.engine.failure = RequestFailed("logits are not numbers")
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model=MODEL, prompt=["a", "b"])
    assert caught.value.status_code == 500 and server.engine.running == {}


def test_keys(serving: Serving) -> None:
    keyed = serving(ServerConfig(api_key=("alpha", "béta")))
    for key in ("alpha", "béta"):
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert keyed.get("/v1/models", headers=headers).status_code == 200
    wrong = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError) as caught:
        wrong.models.list()
    assert caught.value.code == "invalid_api_key" and "Bearer" in caught.value.response.headers["www-authenticate"]
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="alpha", max_retries=0) as client:
        assert client.models.retrieve(MODEL).id == MODEL
