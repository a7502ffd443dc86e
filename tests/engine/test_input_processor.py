"""What the input processor makes of a request, and what it refuses, by name, before anything is queued."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from tests.support.scripted_engine import MAX_CONTEXT, VOCAB, byte_input_processor
from tokenmill.engine.input_processor import MAX_CHARACTERS_PER_TOKEN, ClientRequest, InputProcessor, longest_prompt
from tokenmill.errors import ContextLengthExceeded, InvalidRequest, ModelError
from tokenmill.params import Guided, SamplingParams
from tokenmill.text.tokenizer import Tokenizer, byte_tokenizer
from tokenmill.types import ChatRequest, EmbedRequest, Message, PromptRequest, Tenant


def chat(content: str, **changes: Any) -> ChatRequest:
    return ChatRequest(messages=[Message(role="user", content=content)], **changes)


def prompt(ids: list[int] | str, **params: Any) -> PromptRequest:
    return PromptRequest(prompt=ids, params=SamplingParams(**params), add_special_tokens=False)


def test_a_grammar_belongs_to_its_tenant() -> None:
    asked = prompt([1], guided=Guided.regex("a+"))
    for tenant in ("", "alice"):
        made = byte_input_processor().process(structs.replace(asked, tenant=Tenant(id=tenant)))
        assert made.params.guided == Guided("regex", "a+", tenant)


def test_limits_and_seeds_are_settled() -> None:
    request = byte_input_processor().process(prompt([1, 2, 3], max_tokens=MAX_CONTEXT))
    assert request.max_tokens == MAX_CONTEXT - 3 and request.request_id and request.eos_token_ids == [257]
    assert byte_input_processor().process(prompt("abc")).max_tokens == MAX_CONTEXT - 3
    assert byte_input_processor().process(prompt([1], seed=-5)).seed == -5
    several = byte_input_processor().process(prompt([1], best_of=3)).params
    assert (several.n, several.best_of, several.logprobs) == (3, None, 0)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (prompt([]), "prompt"),
        (prompt(""), "prompt"),
        (prompt([VOCAB]), "prompt"),
        (prompt([True]), "prompt"),
        (prompt([1], allowed_token_ids=[-1]), "allowed_token_ids"),
        (prompt([1], banned_token_ids=[1.5]), "banned_token_ids"),
        (prompt([1], stop_token_ids=[VOCAB]), "stop_token_ids"),
        (prompt([1], logit_bias={VOCAB: 1.0}), "logit_bias"),
        (prompt([1], stop_regex=["("]), "stop_regex"),
        (prompt([1], thinking_budget=3), "thinking_budget"),
        (prompt([1], context_keep=3), "context_keep"),
        (PromptRequest(prompt=[1], cache_salt="\ud800"), "cache_salt"),
        (PromptRequest(prompt=[1], request_id="\ud800"), "request_id"),
        (ChatRequest(messages=[]), "messages"),
        (chat("hi", template_args={"messages": []}), "template_args"),
        (chat("hi", template_args={"tools": []}), "template_args"),
    ],
)
def test_what_is_wrong_is_named(asked: ClientRequest, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        byte_input_processor().process(asked)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (prompt([1] * MAX_CONTEXT), "prompt"),
        (chat("x" * MAX_CONTEXT), "messages"),
        (EmbedRequest(prompt=[1] * (MAX_CONTEXT + 1)), "input"),
        (prompt([1] * (longest_prompt(MAX_CONTEXT) + 1), context_shift=True), "prompt"),
    ],
)
def test_what_does_not_fit_is_told_as_such(asked: ClientRequest, param: str) -> None:
    with pytest.raises(ContextLengthExceeded) as refused:
        byte_input_processor().process(asked)
    assert refused.value.param == param


def test_megabytes_of_conversation_are_not_even_tokenised() -> None:
    most = longest_prompt(MAX_CONTEXT) * MAX_CHARACTERS_PER_TOKEN
    with pytest.raises(ContextLengthExceeded, match="characters does not fit"):
        byte_input_processor().process(chat("x" * most))


def test_a_template_that_does_not_compile_is_in_the_way_of_conversations_only(caplog: pytest.LogCaptureFixture) -> None:
    plain = byte_tokenizer()
    traits = replace(plain.traits, chat_templates={"default": "{% for %}"})
    tokenizer = Tokenizer(plain.backend, plain.spelling, traits)
    input_processor = InputProcessor(
        tokenizer=tokenizer, vocab_size=VOCAB, max_context=MAX_CONTEXT, eos_token_ids=(257,)
    )
    assert "conversations are refused" in caplog.text
    assert input_processor.process(prompt("abc")).prompt_token_ids == [97, 98, 99]
    for _ in range(2):
        with pytest.raises(ModelError, match="does not compile"):
            input_processor.process(chat("hi"))


def test_a_model_without_a_template_gets_plain_text_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Markers that are no tokens of its vocabulary would only be noise, which it repeats."""
    processor = byte_input_processor()
    asked = ChatRequest(messages=[Message(role="system", content="Be brief."), Message(role="user", content="hi")])
    first, second = processor.process(asked), processor.process(chat("hi"))
    assert processor.tokenizer.decode(first.prompt_token_ids) == "Be brief.\n\nUser: hi\nAssistant:"
    assert first.params.stop == second.params.stop == ["\nUser:"]  # the next turn is not the model's to write
    assert sum("no chat template" in record.message for record in caplog.records) == 1


def test_a_model_without_a_tokenizer_takes_ids_only() -> None:
    bare = InputProcessor(tokenizer=None, vocab_size=VOCAB, max_context=MAX_CONTEXT, eos_token_ids=())
    assert bare.process(prompt([1, 2])).prompt_token_ids == [1, 2]
    for asked in (prompt("text"), chat("text"), prompt([1], stop=["a"]), prompt([1], stop_regex=["a"])):
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            bare.process(asked)


def test_a_thinking_budget_beside_a_grammar_needs_a_conversation() -> None:
    params = SamplingParams(thinking_budget=1, thinking_markers=("<t>", "</t>"), guided=Guided("regex", "a"))
    with pytest.raises(InvalidRequest, match="allows no think section"):
        byte_input_processor().process(PromptRequest(prompt="p", params=params))
