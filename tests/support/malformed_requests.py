"""Malformed bodies for every route of the OpenAI dialect, and the shape of the error response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import orjson

CHAT, COMPLETION, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSE = "/v1/responses"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake/tiny", "messages": [{"role": "user", "content": "Hi"}]},
    COMPLETION: {"model": "fake/tiny", "prompt": "Hi"},
    EMBED: {"model": "fake/tiny", "input": "Hi"},
    RESPONSE: {"model": "fake/tiny", "input": "Hi", "store": False},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72]},
}
SAMPLING = ["temperature", "top_p", "n", "presence_penalty", "frequency_penalty", "seed", "min_p", "typical_p", "top_k"]
SAMPLING += [
    "repetition_penalty",
    "min_tokens",
    "max_tokens",
    "prompt_logprobs",
    "priority",
    "best_of",
    "length_penalty",
    "top_n_sigma",
    "top_a",
    "epsilon_cutoff",
    "eta_cutoff",
    "dynatemp_range",
    "dynatemp_exponent",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "xtc_probability",
    "xtc_threshold",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "no_repeat_ngram_size",
    "thinking_token_budget",
]
NUMERIC = {
    CHAT: [*SAMPLING, "max_completion_tokens", "top_logprobs"],
    COMPLETION: [*SAMPLING, "logprobs"],
    EMBED: ["dimensions", "priority"],
    RESPONSE: [*SAMPLING, "max_output_tokens", "top_logprobs", "max_tool_calls"],
}
# As raw JSON, since JSON libraries refuse to write some of these.
NOT_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", "true", "[]", "{}", '"1"', "[1]", "1" * 30]
FLAGS = ["stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "use_beam_search"]
WRONG_BODIES = [
    b"",
    b"  ",
    b"{",
    b"[]",
    b'"text"',
    b"123",
    b"null",
    b"true",
    b'{"model": "fa',
    b"\xff\xfe",
    b"[" * 5000,
]
WRONG_BODIES += [b"[" * 5000, b'{"model": "\\ud800"}', b"{'model': 1}", b'{"a":1}{"b":2}']

CHAT_CASES: list[tuple[str, Any]] = [
    *(("messages", value) for value in (None, "text", [], {}, 5, [123], [{}], [None], [[]], ["x"])),
    ("messages", [{"role": 5, "content": "x"}]),
    ("messages", [{"role": "wizard", "content": "x"}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": None}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": []}]),
    ("messages", [{"role": "user", "content": ["x"]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
    ("messages", [{"role": "user", "content": "x"}, {}, {"role": "user", "content": "x"}]),
    ("messages", [{"role": "assistant", "content": None}]),
    ("messages", [{"role": "assistant", "content": None, "tool_calls": [{}]}]),
    ("messages", [{"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": 5}}]}]),
    ("messages", [{"role": "tool", "content": "x"}]),
    ("messages", [{"role": "user", "content": "x", "name": 5}]),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_completion_tokens", 0),
    ("top_logprobs", 21),
    ("top_logprobs", 10**6),
    ("top_logprobs", 5),  # without logprobs
    ("logprobs", 5),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": 123}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}),
    ("response_format", {"type": "hiccup"}),
    ("response_format", {}),
    ("response_format", 5),
    ("tools", []),
    ("tools", [{"type": "function", "function": {}}]),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "web_search"}]),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}]),
    ("tools", [{"type": "function", "function": {"name": "f", "strict": "yes"}}]),
    ("tools", [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]),
    ("tools", [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": {"syntax": "x"}}}}]),
    ("tools", [{"type": "function", "function": {"name": f"f{n}"}} for n in range(513)]),
    ("tools", [5]),
    ("tools", 5),
    ("tool_choice", "required"),
    ("tool_choice", "any"),
    ("tool_choice", 5),
    ("tool_choice", {"type": "function"}),
    ("tool_choice", {"type": "mcp"}),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [{}]}}),
    ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
    ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}}),
    ("parallel_tool_calls", "no"),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("audio", {"voice": "alloy", "format": "wav"}),
    ("modalities", ["text", "audio"]),
    ("modalities", "audio"),
    ("prediction", {"type": "content", "content": "x"}),
    ("store", True),
    ("web_search_options", {}),
    ("reasoning_effort", "huge"),
    ("service_tier", "slow"),
    ("guided_json", 5),
    ("guided_json", "{"),
    ("guided_regex", ""),
    ("guided_choice", []),
    ("guided_choice", ["a", 1]),
    ("guided_grammar", ["a"]),
    ("chat_template", "{{ x }}"),
    ("chat_template_kwargs", 5),
    ("chat_template_kwargs", {"tools": []}),
    ("add_generation_prompt", "yes"),
    ("echo", True),
]
COMPLETION_CASES: list[tuple[str, Any]] = [
    *(("prompt", value) for value in (None, 5, {}, [], [[]], [None], ["a", 5], ["a", [1]], [[1], "a"], [1, "a"])),
    *(("prompt", value) for value in ([-1], [512], [[0, 512]], [True], [1.5], [[1], []], [[[1]]], ["x"] * 10**5)),
    ("prompt", [1] * 600),
    ("suffix", "the end"),
    ("echo", "yes"),
    ("logprobs", 6),
    ("logprobs", -1),
    ("logprobs", True),
    ("best_of", 21),
    ("max_tokens", -1),
]
SHARED_CASES: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (2.5, -0.1, 1e308)),
    *(("top_p", value) for value in (-1, 1.1)),
    *(("n", value) for value in (0, -1, 129, 10**6, 1.5)),
    *(("presence_penalty", value) for value in (3, -3)),
    *(("frequency_penalty", value) for value in (3, -3)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, 2**64, 1.5)),
    *(("stop", value) for value in (5, [5], [""], "", ["x"] * 10**5, ["x" * 5000], {}, [None])),
    *(("logit_bias", value) for value in (5, [], {"x": 1}, {"512": 1}, {"-1": 1}, {"1.5": 1}, {"1": 101}, {"1": "x"})),
    *(("logit_bias", value) for value in ({"1": None}, {"1": True}, {str(key): 1 for key in range(10**5)})),
    ("stream_options", {"include_usage": True}),  # without stream
    ("stream_options", 5),
    ("stop_token_ids", [512]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", 5),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("banned_token_ids", [True]),
    ("min_tokens", 10**12),
    *(("stop_regex", value) for value in (5, [5], [""], ["x"] * 9, ["x" * 2000])),
    *(("dry_sequence_breakers", value) for value in (5, [""], ["x"] * 33, ["x" * 41])),
    *(("thinking_markers", value) for value in (5, ["a"], ["a", 5], ["a", "b"])),
    *(("watermark", value) for value in (5, {}, {"key": -1}, {"key": 1, "gamma": 0}, {"key": 1, "delta": "x"})),
    ("watermark", {"key": 1, "context": 99}),
    ("mirostat", 1),
    ("logits_processors", ["x"]),
    *(("structured_outputs", value) for value in (5, {}, {"regex": "a", "json": {}}, {"structural_tag": "x"})),
    *(("structured_outputs", value) for value in ({"choice": []}, {"json": "{"}, {"json_object": 1})),
    ("top_k", -2),
    ("repetition_penalty", 0),
    ("length_penalty", 2.0),  # without beam search
    ("early_stopping", True),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("user", 5),
    ("model", 5),
    ("model", None),
    ("model", ["fake/tiny"]),
]
OTHER_CASES: list[tuple[str, str, Any]] = [
    *((EMBED, "input", value) for value in (None, "", [], [""], ["a", ""], 5, {}, [-1], [512], [[]], ["a", [1]])),
    (EMBED, "input", "x" * 600),
    (EMBED, "input", ["x"] * 2049),
    (EMBED, "encoding_format", "int8"),
    (EMBED, "encoding_format", 5),
    (EMBED, "pooling", "max"),
    (EMBED, "pooling", 5),
    (EMBED, "dimensions", 0),
    (EMBED, "dimensions", 17),
    (EMBED, "user", 5),
    *(("/tokenize", "prompt", value) for value in (None, 5, [], {}, ["a"])),
    ("/tokenize", "add_special_tokens", 1),
    ("/tokenize", "model", "other"),
    *(("/detokenize", "tokens", value) for value in (None, 5, "a", [-1], [512], ["a"], [True], {})),
]


def cases() -> Iterator[tuple[str, bytes, str | None]]:
    """Return (path, body, the field that the error must name)."""
    for path in GOOD:
        for body in WRONG_BODIES:
            yield path, body, None
    for path, names in NUMERIC.items():
        for name in names:
            for value in NOT_NUMBERS:
                yield path, with_raw(GOOD[path], name, value), name if value not in NOT_NUMBERS[:4] else None
    for path in (CHAT, COMPLETION):
        for name in FLAGS:
            yield path, with_raw(GOOD[path], name, '"true"'), name
            yield path, with_raw(GOOD[path], name, "1"), name
        for name, value in SHARED_CASES:
            yield path, orjson_or_raw({**GOOD[path], name: value}), name
    for name, value in CHAT_CASES:
        yield CHAT, orjson.dumps({**GOOD[CHAT], name: value}), name
    for name, value in COMPLETION_CASES:
        yield COMPLETION, orjson.dumps({**GOOD[COMPLETION], name: value}), name
    for path, name, value in OTHER_CASES:
        yield path, orjson.dumps({**GOOD[path], name: value}), name


def with_raw(body: dict[str, Any], name: str, value: str) -> bytes:
    return orjson.dumps(body)[:-1] + f',"{name}":{value}}}'.encode()


def orjson_or_raw(body: dict[str, Any]) -> bytes:
    import json  # orjson writes no integers beyond 64 bits

    return json.dumps(body).encode()


def require_error_body(reply: httpx.Response) -> dict[str, Any]:
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and isinstance(error["type"], str) and isinstance(error["code"], str)
    return error
