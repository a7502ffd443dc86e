"""The events of one response, and the response object that they add up to.

    created ─► in_progress ─► items ─► completed | incomplete | failed            (`queued` first, in the background)

    message          output_item.added ─► content_part.added ─► output_text.delta … ─► output_text.done
                     ─► content_part.done ─► output_item.done
    reasoning        the same with reasoning_text; with a summary: reasoning_summary_part.added ─►
                     reasoning_summary_text.delta … ─► .done ─► reasoning_summary_part.done
    function_call    output_item.added ─► function_call_arguments.delta … ─► .done ─► output_item.done
    custom_tool_call the same with custom_tool_call_input
    tool_search_call output_item.added ─► output_item.done

Events are numbered from 0 without gaps; an event's name is its type. The newest SDKs assert that every item is finished
and the same in `added`, in `done` and in the final response. So an answer that is cut off in the middle of an item
still closes it, with the status `incomplete`.

A response that is not streamed is made by the same writer from the merged events. The deltas of an item differ only in
their number and text, so the other bytes are made once per item.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.responses import Response

from tokenmill.engine.results import text_parts
from tokenmill.errors import ContextLengthExceeded, Overloaded, TokenmillError
from tokenmill.server.dialect import SSE_HEADERS, SSE_PING, named_sse_frame
from tokenmill.server.generation import GenerationFacts
from tokenmill.server.openai.render import chat_logprobs
from tokenmill.server.openai.responses.items import ID_PREFIXES, Item
from tokenmill.server.openai.responses.parse import ResponseCall
from tokenmill.server.openai.responses.tools import CalledTool
from tokenmill.server.request_ids import new_id
from tokenmill.server.routing import json_response
from tokenmill.server.signatures import ThoughtSigner
from tokenmill.types import CallArguments, CallEnd, CallStart, Event, FinishReason, Part, TextPart, ThoughtPart, Usage

Payload = dict[str, Any]
CALL_ITEMS = {"function": "function_call", "custom": "custom_tool_call", "tool_search": "tool_search_call"}
CALL_EVENTS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


class ResponseWriter:
    """Turns the parts of one answer into events, each as the bytes of one frame, and updates the response object."""

    def __init__(self, response_id: str, created_s: float, call: ResponseCall, signer: ThoughtSigner) -> None:
        self.call = call
        self.response: Payload = {
            "id": response_id,
            "object": "response",
            "created_at": int(created_s),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            "completed_at": None,
            **call.repeated,
        }
        self._signer = signer
        self._num_events = 0
        self._open: _OpenItem | None = None
        self._held: list[Any] = []  # logprobs whose text was not sent yet

    @property
    def output(self) -> list[Item]:
        """The finished items."""
        output: list[Item] = self.response["output"]
        return output

    # ── lifecycle ──────────────────────────────────────────────────────────────────────────────────────

    def queued(self) -> list[bytes]:
        """Return the first events of a response that is queued."""
        self.response["status"] = "queued"
        return [self._lifecycle("created"), self._lifecycle("queued")]

    def begin(self) -> list[bytes]:
        is_new = self._num_events == 0
        self.response["status"] = "in_progress"
        return [*([self._lifecycle("created")] if is_new else []), self._lifecycle("in_progress")]

    def event(self, event: Event) -> list[bytes]:
        """Return the events for the next part of the answer."""
        if event.parts is None and event.logprobs is None and isinstance(self._open, _OpenMessage):
            return [self._open.delta(event.text, b"[]")] if event.text else []
        frames: list[bytes] = []
        self._hold(event)
        for part in text_parts(event.text) if event.parts is None else event.parts:
            self._part(part, frames)
        return frames

    def end(self, finish: FinishReason, usage: Usage) -> list[bytes]:
        """Return the last events of an answer that is complete or reached its limit."""
        is_cut = finish == "length"
        frames: list[bytes] = []
        if not self.output and self._open is None:
            self._begin(_OpenMessage(self), frames)  # clients expect at least one item
        self._close(frames, "incomplete" if is_cut else "completed")
        self.response["usage"] = usage_object(usage)
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*frames, self._final("incomplete" if is_cut else "completed")]

    def fail(self, error: TokenmillError) -> list[bytes]:
        frames: list[bytes] = []
        self._close(frames, "incomplete")
        self.response["error"] = failure_object(error)
        return [*frames, self._final("failed")]

    def cancel(self) -> list[bytes]:
        """Return the last events of a cancelled response. The API has no event `cancelled`, so it is `failed`."""
        frames: list[bytes] = []
        self._close(frames, "incomplete")
        return [*frames, self._final("failed", status="cancelled")]

    def _final(self, name: str, status: str | None = None) -> bytes:
        self.response["status"] = status or name
        self.response["completed_at"] = int(time.time()) if name == "completed" else None
        return self._lifecycle(name)

    def _lifecycle(self, name: str) -> bytes:
        return self.frame(f"response.{name}", {"response": self.response})

    def frame(self, kind: str, payload: Payload) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_sse_frame(kind, orjson.dumps({"type": kind, "sequence_number": number, **payload}))

    def delta_frame(self, head: bytes, text: str, tail: bytes) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return b"%b%d%b%b%b}\n\n" % (head, number, b',"delta":', orjson.dumps(text), tail)

    # ── parts ──────────────────────────────────────────────────────────────────────────────────────────

    def _part(self, part: Part, frames: list[bytes]) -> None:
        match part:
            case TextPart(text):
                if not isinstance(self._open, _OpenMessage):
                    self._close(frames, "completed")
                    self._begin(_OpenMessage(self), frames)
                assert self._open is not None
                frames.append(self._open.delta(text, self._logprobs()))
            case ThoughtPart(text):
                if not isinstance(self._open, _OpenReasoning):
                    self._close(frames, "completed")
                    self._begin(_OpenReasoning(self, self._signer), frames)
                assert self._open is not None
                frames.append(self._open.delta(text))
            case CallStart(_, call_id, name, kind):
                called = self.call.called.get(name) or CalledTool(kind, name)
                self._close(frames, "completed")
                self._begin(_OpenCall(self, called, call_id), frames)
            case CallArguments(_, fragment):
                assert isinstance(self._open, _OpenCall)
                frames += self._open.arguments(fragment)
            case CallEnd():
                self._close(frames, "completed")

    def _begin(self, item: _OpenItem, frames: list[bytes]) -> None:
        self._open = item
        frames += item.begin()

    def _close(self, frames: list[bytes], status: str) -> None:
        if self._open is not None:
            closing, self._open = self._open, None
            done = closing.end(status)
            self.output.append(closing.item)
            frames += [*done, self.frame("response.output_item.done", closing.item_fields(item=closing.item))]

    def _hold(self, event: Event) -> None:
        """Hold the logprobs of text until it is sent. Those of reasoning and calls are not part of the API."""
        is_text = event.parts is None or any(isinstance(part, TextPart) for part in event.parts)
        if event.logprobs is not None and (is_text or not event.parts):
            self._held += event.logprobs

    def _logprobs(self) -> bytes:
        infos, self._held = self._held, []
        if not infos:
            return b"[]"
        assert isinstance(self._open, _OpenMessage)
        logprobs: list[Payload] = chat_logprobs(infos)["content"]
        self._open.logprobs += logprobs
        return orjson.dumps(logprobs)


# ── open items ─────────────────────────────────────────────────────────────────────────────────────────


class _OpenItem:
    """An item of the output between its events `added` and `done`."""

    def __init__(self, writer: ResponseWriter, kind: str, **fields: Any) -> None:
        self._writer = writer
        self.item: Item = {"id": new_id(ID_PREFIXES[kind]), "type": kind, "status": "in_progress", **fields}
        self._index = len(writer.output)
        self._texts: list[str] = []
        self._head = b""  # the bytes of a delta event up to its number

    def item_fields(self, **fields: Any) -> Payload:
        """Return the fields of an event about the item."""
        return {"output_index": self._index, **fields}

    def part_fields(self, **fields: Any) -> Payload:
        """Return the fields of an event about a part of the item."""
        return {"item_id": self.item["id"], "output_index": self._index, **fields}

    def begin(self) -> list[bytes]:
        return [self._writer.frame("response.output_item.added", self.item_fields(item=self.item))]

    def end(self, status: str) -> list[bytes]:
        raise NotImplementedError

    def delta(self, text: str, logprobs: bytes = b"") -> bytes:
        self._texts.append(text)
        return self._writer.delta_frame(self._head, text, b',"logprobs":' + logprobs if logprobs else b"")

    def _set_head(self, kind: str, fields: Payload) -> None:
        payload = orjson.dumps({"type": kind, **fields})
        self._head = b"event: %b\ndata: %b" % (kind.encode(), payload[:-1] + b',"sequence_number":')

    @property
    def text(self) -> str:
        return "".join(self._texts)


class _OpenMessage(_OpenItem):
    def __init__(self, writer: ResponseWriter) -> None:
        super().__init__(writer, "message", role="assistant", content=[])
        self.logprobs: list[Payload] = []

    def begin(self) -> list[bytes]:
        fields = self.part_fields(content_index=0)
        self._set_head("response.output_text.delta", fields)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [*super().begin(), self._writer.frame("response.content_part.added", {**fields, "part": part})]

    def end(self, status: str) -> list[bytes]:
        fields, text = self.part_fields(content_index=0), self.text
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}
        self.item |= {"status": status, "content": [part]}
        done = {**fields, "text": text, "logprobs": self.logprobs}
        return [
            self._writer.frame("response.output_text.done", done),
            self._writer.frame("response.content_part.done", {**fields, "part": part}),
        ]


class _OpenReasoning(_OpenItem):
    def __init__(self, writer: ResponseWriter, signer: ThoughtSigner) -> None:
        super().__init__(writer, "reasoning", summary=[], content=[], encrypted_content=None)
        self._signer = signer
        self._has_summary = writer.call.has_summary
        summary, content = ("reasoning_summary_part", "reasoning_summary_text"), ("content_part", "reasoning_text")
        self._part_kind, self._text_kind = summary if self._has_summary else content
        self._part_type = "summary_text" if self._has_summary else "reasoning_text"

    def _fields(self) -> Payload:
        return self.part_fields(**{"summary_index" if self._has_summary else "content_index": 0})

    def begin(self) -> list[bytes]:
        fields = self._fields()
        self._set_head(f"response.{self._text_kind}.delta", fields)
        part = {"type": self._part_type, "text": ""}
        return [*super().begin(), self._writer.frame(f"response.{self._part_kind}.added", {**fields, "part": part})]

    def end(self, status: str) -> list[bytes]:
        fields, text = self._fields(), self.text
        part = {"type": self._part_type, "text": text}
        self.item |= {"status": status, "content": [{"type": "reasoning_text", "text": text}]}
        if self._has_summary:
            self.item["summary"] = [part]
        if self._writer.call.is_sealed:
            self.item["encrypted_content"] = self._signer.sign(text, is_shown=False)
        return [
            self._writer.frame(f"response.{self._text_kind}.done", {**fields, "text": text}),
            self._writer.frame(f"response.{self._part_kind}.done", {**fields, "part": part}),
        ]


class _OpenCall(_OpenItem):
    def __init__(self, writer: ResponseWriter, called: CalledTool, call_id: str) -> None:
        kind = CALL_ITEMS[called.kind]
        super().__init__(writer, kind, call_id=call_id)
        if kind == "tool_search_call":
            self.item |= {"execution": "client", "arguments": {}}
            return
        self._event, self._field = CALL_EVENTS[kind]
        self.item |= {"name": called.name, self._field: ""}
        if called.namespace is not None:
            self.item["namespace"] = called.namespace
        self._set_head(f"{self._event}.delta", self.part_fields())

    def arguments(self, fragment: str) -> list[bytes]:
        if self._head:
            return [self.delta(fragment)]
        self._texts.append(fragment)
        return []

    def end(self, status: str) -> list[bytes]:
        text = self.text
        self.item["status"] = status
        if not self._head:
            self.item["arguments"] = _object(text)
            return []
        self.item[self._field] = text
        done = self.part_fields(**{self._field: text, "name": self.item["name"]})
        return [self._writer.frame(f"{self._event}.done", done)]


def _object(text: str) -> Any:
    """Return the arguments of a tool search as an object, which clients expect; incomplete ones stay text."""
    try:
        return orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return text


# ── objects ────────────────────────────────────────────────────────────────────────────────────────────


def usage_object(usage: Usage) -> Payload:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def failure_object(error: TokenmillError) -> Payload:
    """Return the error object of a failed response. Clients know few codes; Codex reacts to
    `context_length_exceeded`."""
    if isinstance(error, Overloaded):
        code = "rate_limit_exceeded"
    elif isinstance(error, ContextLengthExceeded):
        code = error.code
    else:
        code = "invalid_prompt" if error.http_status < 500 else "server_error"
    return {"code": code, "message": str(error)}


# ── the rendering of a generation ──────────────────────────────────────────────────────────────────────


class ResponseRendering:
    """Renders a response, whole or as a stream."""

    stream_headers: Sequence[tuple[bytes, bytes]] = SSE_HEADERS
    ping = SSE_PING

    def __init__(self, writer: ResponseWriter) -> None:
        self.writer = writer
        self.output_ids: list[int] = []  # token ids of the answer, for a response that continues this one
        self._finish: FinishReason = "stop"
        self._has_begun = False

    def begin(self, facts: GenerationFacts) -> bytes:
        """Return the first events, unless the answer's first part was rendered already, which includes them."""
        return b"".join(self.first_frames())

    def first_frames(self) -> list[bytes]:
        if self._has_begun:
            return []
        self._has_begun = True
        return self.writer.begin()

    def event(self, choice: int, event: Event) -> bytes:
        return b"".join(self.frames(event))

    def frames(self, event: Event) -> list[bytes]:
        self.output_ids += event.token_ids
        self._finish = event.finish_reason or self._finish
        return [*self.first_frames(), *self.writer.event(event)]

    def end(self, facts: GenerationFacts) -> bytes:
        return b"".join(self.last_frames(facts))

    def last_frames(self, facts: GenerationFacts) -> list[bytes]:
        return self.writer.end(self._finish, facts.usage)

    def failure(self, error: TokenmillError, request_id: str) -> bytes:
        return b"".join(self.writer.fail(error))

    def whole(self, choices: list[Event], facts: GenerationFacts) -> Response:
        self.event(0, choices[0])
        self.end(facts)
        return json_response(self.writer.response)
