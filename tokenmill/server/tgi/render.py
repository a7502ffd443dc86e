"""Replies and errors in TGI's form.

    whole     {"generated_text": text, "details": {…}}
    streamed  data:{"index": 1, "token": {id, text, logprob, special}, "generated_text": null, "details": null}
              …  one event per token; the last one has the whole text and the details

A token that ends an answer has an empty text and `special: true`. If a character takes several tokens, the last of them
has its text, so that the texts of all tokens concatenate to the answer.

Errors are `{"error": text, "error_type": kind}`; `huggingface_hub` chooses its exception by the kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from starlette.responses import Response

from tokenmill.errors import Overloaded, TokenmillError
from tokenmill.server.dialect import SSE_HEADERS, SSE_PING, Dialect, RequestHead
from tokenmill.server.generation import GenerationFacts
from tokenmill.server.routing import TEXT, json_response
from tokenmill.server.tgi.parse import TextGenerationCall
from tokenmill.types import Event, TokenInfo

ERROR_KINDS = {400: "validation", 429: "overloaded", 500: "generation", 503: "overloaded"}


def error_content(error: TokenmillError, request_id: str) -> dict[str, Any]:
    """Return the body of an error. Without a kind, as for a missing key, clients use the HTTP status."""
    kind = "overloaded" if isinstance(error, Overloaded) else ERROR_KINDS.get(error.http_status)
    return {"error": str(error), **({} if kind is None else {"error_type": kind})}


def is_plain_post(head: RequestHead) -> bool:
    """Return whether a request is `POST /`, to which clients that know only the server's URL send generations."""
    return head.path == "/" and head.method == "POST"


TGI = Dialect(
    name="tgi",
    prefixes=("/generate", "/info"),
    error_content=error_content,
    error_schema={"type": "object", "required": ["error"], "properties": {"error": TEXT, "error_type": TEXT}},
    key_hint="send `Authorization: Bearer KEY`",
    statuses={400: 422, 500: 424},
    shared={"/": is_plain_post},
)


class TextGenerationRendering:
    """Replies of /generate and /generate_stream. `is_listed`: the reply is a list of one, as for `POST /`."""

    stream_headers: Sequence[tuple[bytes, bytes]] = SSE_HEADERS
    ping = SSE_PING

    def __init__(self, call: TextGenerationCall, *, is_listed: bool) -> None:
        self._call = call
        self._is_listed = is_listed
        self._num_tokens = 0
        self._text = ""
        self._logprob_sum = 0.0
        self._last: Event | None = None
        self._final: dict[str, Any] | None = None  # the last token, sent together with the whole text

    def begin(self, facts: GenerationFacts) -> bytes:
        return b""

    def event(self, choice: int, event: Event) -> bytes:
        self._text += event.text
        self._last = event
        tokens = token_objects(event, self._call.num_top_tokens)
        self._logprob_sum += sum(info.logprob for info in event.logprobs or [])
        if event.finish_reason is not None:
            tokens += self._final_token(event, has_tokens=bool(tokens))
            self._final = tokens.pop()
        return b"".join(self._frame(token, None, None) for token in tokens)

    def _final_token(self, event: Event, *, has_tokens: bool) -> list[dict[str, Any]]:
        """Return the end-of-sequence token, which has no text. Without one, return a token only if the last event has
        none to carry the whole text."""
        is_end = isinstance(event.stop_reason, int)
        if not is_end and has_tokens:
            return []
        token_id = event.stop_reason if isinstance(event.stop_reason, int) else event.token_ids[-1]
        logprob = (event.cumulative_logprob or 0.0) - self._logprob_sum
        return [{"token": {"id": token_id, "text": "", "logprob": min(0.0, logprob), "special": is_end}}]

    def _frame(self, token: dict[str, Any], text: str | None, details: dict[str, Any] | None) -> bytes:
        self._num_tokens += 1
        content = {"index": self._num_tokens, **token, "generated_text": text, "details": details}
        return b"data:" + orjson.dumps(content) + b"\n\n"

    def end(self, facts: GenerationFacts) -> bytes:
        assert self._final is not None and self._last is not None, "the last event has a finish reason"
        details = {**self._ending(self._last, facts), "input_length": facts.usage.prompt_tokens}
        return self._frame(self._final, self._call.shown_prompt + self._text, details)

    def failure(self, error: TokenmillError, request_id: str) -> bytes:
        return b"data:" + TGI.error_body(error, request_id) + b"\n\n"

    def whole(self, choices: list[Event], facts: GenerationFacts) -> Response:
        (choice,) = choices
        reply: dict[str, Any] = {"generated_text": self._call.shown_prompt + choice.text}
        if self._call.wants_details:
            reply["details"] = self._details(choice, facts)
        headers = {
            "x-prompt-tokens": str(facts.usage.prompt_tokens),
            "x-generated-tokens": str(facts.usage.completion_tokens),
        }
        return json_response([reply] if self._is_listed else reply, headers=headers)

    def _details(self, choice: Event, facts: GenerationFacts) -> dict[str, Any]:
        tokens = token_objects(choice, self._call.num_top_tokens)
        self._logprob_sum = sum(info.logprob for info in choice.logprobs or [])
        tokens += self._final_token(choice, has_tokens=True) if isinstance(choice.stop_reason, int) else []
        first = self._call.first_prompt_token
        details = {
            **self._ending(choice, facts),
            "prefill": [] if first is None else _prompt_tokens(first, choice.prompt_logprobs or []),
            "tokens": [token["token"] for token in tokens],
        }
        if self._call.num_top_tokens:
            details["top_tokens"] = [token.get("top_tokens", []) for token in tokens]
        return details

    def _ending(self, last: Event, facts: GenerationFacts) -> dict[str, Any]:
        return {
            "finish_reason": finish_reason(last),
            "generated_tokens": facts.usage.completion_tokens,
            "seed": self._call.request.params.seed,
        }


def finish_reason(event: Event) -> str:
    if event.finish_reason == "length":
        return "length"
    return "stop_sequence" if isinstance(event.stop_reason, str) else "eos_token"


def token_objects(event: Event, num_top: int) -> list[dict[str, Any]]:
    """Return the tokens of an event. If their texts do not concatenate to the event's text, the last one has all of
    it."""
    infos = event.logprobs or []
    texts = [info.text for info in infos]
    if "".join(texts) != event.text:
        texts = [""] * (len(infos) - 1) + [event.text]
    return [_token(info, text, num_top) for info, text in zip(infos, texts, strict=False)]


def _token(info: TokenInfo, text: str, num_top: int) -> dict[str, Any]:
    token: dict[str, Any] = {"token": {"id": info.token_id, "text": text, "logprob": info.logprob, "special": False}}
    if num_top:
        token["top_tokens"] = [
            {"id": token_id, "text": top, "logprob": logprob, "special": False}
            for token_id, top, _, logprob in info.top[:num_top]
        ]
    return token


def _prompt_tokens(first: tuple[int, str], infos: Sequence[TokenInfo | None]) -> list[dict[str, Any]]:
    """Return the tokens of a prompt. Nothing predicts the first one, so it has no logprob."""
    rest = [{"id": info.token_id, "text": info.text, "logprob": info.logprob} for info in infos if info is not None]
    return [{"id": first[0], "text": first[1], "logprob": None}, *rest]
