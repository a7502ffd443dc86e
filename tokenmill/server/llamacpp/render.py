"""Replies and errors in llama.cpp's native form.

    whole     {"content": text, "stop": true, "stop_type": "eos", "tokens_predicted": n, "timings": {…}, …}
    streamed  data: {"index": 0, "content": "Hel", "tokens": [9906], "stop": false, …}   …  the last one as above

llama.cpp's server assigns requests to slots; here any request may use any row, so `id_slot` is always -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from starlette.responses import Response

from tokenmill.engine.status import ModelInfo
from tokenmill.errors import ContextLengthExceeded, TokenmillError
from tokenmill.params import SamplingParams
from tokenmill.server.dialect import SSE_HEADERS, SSE_PING, Dialect, sse_frame
from tokenmill.server.generation import GenerationFacts
from tokenmill.server.llamacpp.parse import NativeCall
from tokenmill.server.routing import COUNT, TEXT, json_response, object_of
from tokenmill.types import Event, TokenInfo, Usage

ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "unavailable_error",
    500: "server_error",
    503: "unavailable_error",
}


def error_content(error: TokenmillError, request_id: str) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.http_status, "invalid_request_error")
    if isinstance(error, ContextLengthExceeded):
        kind = "exceed_context_size_error"
    return {"error": {"code": error.http_status, "message": str(error), "type": kind}}


LLAMACPP = Dialect(
    name="llama.cpp",
    prefixes=("/completion", "/infill", "/props", "/slots", "/apply-template"),
    error_content=error_content,
    error_schema=object_of(error=object_of(code=COUNT, message=TEXT, type=TEXT)),
    key_hint="send `Authorization: Bearer KEY`",
)


class NativeRendering:
    """Replies of /completion and /infill. `prompts`: the texts of the prompts, which replies repeat."""

    stream_headers: Sequence[tuple[bytes, bytes]] = SSE_HEADERS
    ping = SSE_PING

    def __init__(self, call: NativeCall, info: ModelInfo, prompts: list[str]) -> None:
        self._call = call
        self._info = info
        self._prompts = prompts
        self._settings = generation_settings(call.requests[0].params, is_stream=call.is_stream)
        self._num_tokens = [0] * len(prompts)
        self._has_line_break = [False] * len(prompts)
        self._lasts: dict[int, Event] = {}

    def begin(self, facts: GenerationFacts) -> bytes:
        return b""

    def event(self, choice: int, event: Event) -> bytes:
        self._num_tokens[choice] += len(event.token_ids)
        self._has_line_break[choice] |= "\n" in event.text
        if event.finish_reason is not None:
            self._lasts[choice] = event
        if not event.text:
            return b""
        chunk = {
            "index": choice,
            "content": event.text,
            "tokens": event.token_ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._num_tokens[choice],
            **_probabilities(event),
        }
        return sse_frame(orjson.dumps(chunk))

    def end(self, facts: GenerationFacts) -> bytes:
        """Return the last chunks, one per prompt, with the counts and times of the request."""
        finals = [self._final(choice, "", [], last, facts) for choice, last in sorted(self._lasts.items())]
        return b"".join(sse_frame(orjson.dumps(final)) for final in finals)

    def failure(self, error: TokenmillError, request_id: str) -> bytes:
        return sse_frame(LLAMACPP.error_body(error, request_id))

    def whole(self, choices: list[Event], facts: GenerationFacts) -> Response:
        replies = []
        for index, choice in enumerate(choices):
            self._has_line_break[index] = "\n" in choice.text
            tokens = choice.token_ids if self._call.wants_tokens else []
            replies.append({**self._final(index, choice.text, tokens, choice, facts), **_probabilities(choice)})
        return json_response(replies if self._call.is_listed else replies[0])

    def _final(
        self, index: int, text: str, token_ids: list[int], last: Event, facts: GenerationFacts
    ) -> dict[str, Any]:
        usage = last.usage or facts.usage
        return {
            "index": index,
            "content": text,
            "tokens": token_ids,
            "id_slot": -1,
            "stop": True,
            "model": self._info.name,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": self._settings,
            "prompt": self._prompts[index],
            "has_new_line": self._has_line_break[index],
            "truncated": False,
            **_ending(last),
            "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
            "timings": timings(usage, facts),
        }


def _ending(last: Event) -> dict[str, str]:
    if last.finish_reason == "length":
        return {"stop_type": "limit", "stopping_word": ""}
    if isinstance(last.stop_reason, str):
        return {"stop_type": "word", "stopping_word": last.stop_reason}
    return {"stop_type": "eos", "stopping_word": ""}


def timings(usage: Usage, facts: GenerationFacts) -> dict[str, Any]:
    """Return the times of prompt and answer in milliseconds; waiting time is part of neither."""
    num_read = usage.prompt_tokens - usage.cached_tokens
    prompt_ms = max(0.001, (facts.begun_s - facts.waited_s) * 1000)
    answer_ms = max(0.001, (facts.elapsed_s - facts.begun_s) * 1000)
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": num_read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(1, num_read),
        "prompt_per_second": num_read / prompt_ms * 1000,
        "predicted_n": usage.completion_tokens,
        "predicted_ms": answer_ms,
        "predicted_per_token_ms": answer_ms / max(1, usage.completion_tokens),
        "predicted_per_second": usage.completion_tokens / answer_ms * 1000,
    }


def _probabilities(event: Event) -> dict[str, Any]:
    infos = event.logprobs
    return {} if infos is None else {"completion_probabilities": [_probability(info) for info in infos]}


def _probability(info: TokenInfo) -> dict[str, Any]:
    top = [_token(token_id, text, raw, logprob) for token_id, text, raw, logprob in info.top]
    return {**_token(info.token_id, info.text, info.raw, info.logprob), "top_logprobs": top}


def _token(token_id: int, text: str, raw: bytes, logprob: float) -> dict[str, Any]:
    return {"id": token_id, "token": text, "bytes": list(raw), "logprob": logprob}


SETTINGS = (
    *("temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma"),
    *("xtc_probability", "xtc_threshold", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta", "stop", "ignore_eos"),
)


def generation_settings(params: SamplingParams, *, is_stream: bool) -> dict[str, Any]:
    """Return the parameters of a call under llama.cpp's names."""
    return {
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "seed": -1 if params.seed is None else params.seed,
        **{name: getattr(params, name) for name in SETTINGS},
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": -1,
        "n_probs": params.logprobs or 0,
        "stream": is_stream,
    }
