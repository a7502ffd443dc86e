"""Client of a running server for `run --url` and `chat --url`: Tokenmill's own server, or any other with OpenAI's chat
and completions routes.

Only parameters that differ from the defaults are sent, for servers that know fewer parameters.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec
import orjson

from tokenmill.errors import EngineDead, InvalidConfig, InvalidRequest, RequestFailed, TokenmillError, UnknownModel
from tokenmill.params import Guided, SamplingParams
from tokenmill.types import Event, Part, TextPart, ThoughtPart, Usage

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 600.0  # a long prompt on a slow machine
MAX_ERROR_BYTES = 64 << 10
MAX_LINE_BYTES = 8 << 20
FINISH_REASONS = ("stop", "length", "tool_calls")
DEFAULTS = SamplingParams()
NOT_SENT = ("guided", "beam", "watermark", "logits_processors", "thinking_markers")


class RemoteModel:
    """One model of a server."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        """`model`: its name on the server, by default the first that it lists. `key`: by default TOKENMILL_API_KEY or
        OPENAI_API_KEY."""
        self._server = RemoteServer(url, key or os.environ.get("TOKENMILL_API_KEY") or os.environ.get("OPENAI_API_KEY"))
        listed = {str(row.get("id")): row for row in self._server.get("/models").get("data") or []}
        if model is None and not listed:
            raise UnknownModel(f"the server at {url} lists no models")
        self.name = model or next(iter(listed))
        length = listed.get(self.name, {}).get("max_model_len")  # a field of vLLM and Tokenmill
        self.max_context = length if isinstance(length, int) and length > 0 else None

    def stream(self, prompt: str, params: SamplingParams) -> RemoteEvents:
        return self._events("/completions", {"prompt": prompt}, params)

    def stream_chat(self, messages: list[dict[str, Any]], params: SamplingParams) -> RemoteEvents:
        return self._events("/chat/completions", {"messages": messages}, params)

    def close(self) -> None:
        """Do nothing: no connection is kept between answers."""

    def _events(self, path: str, asked: dict[str, Any], params: SamplingParams) -> RemoteEvents:
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return RemoteEvents(self._server.post(path, {"model": self.name, **asked, **sent(params), **stream}))


def sent(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters as request fields: those that differ from the default, and the temperature."""
    given = {name: getattr(params, name) for name in params.__struct_fields__ if name not in NOT_SENT}
    fields = {name: value for name, value in given.items() if value != getattr(DEFAULTS, name)}
    if params.guided is not None:
        fields |= constraint(params.guided)
    if params.watermark is not None:
        fields["watermark"] = msgspec.to_builtins(params.watermark)
    return {"temperature": params.temperature, **fields}


def constraint(guided: Guided) -> dict[str, Any]:
    """Return a constraint as OpenAI's field for JSON, or as vLLM's fields for other kinds."""
    match guided.kind:
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            schema = {"name": "answer", "schema": orjson.loads(guided.text)}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case "choice":
            return {"guided_choice": orjson.loads(guided.text)}
        case "regex":
            return {"guided_regex": guided.text}
        case "lark" | "gbnf":
            return {"guided_grammar": guided.text}


class RemoteServer:
    """HTTP client of one server: routes below /v1, and routes that change its state."""

    def __init__(self, url: str, key: str | None) -> None:
        address = urlsplit(url if "://" in url else f"http://{url}")
        if address.scheme not in ("http", "https") or not address.hostname:
            raise InvalidConfig(f"{url} is not the URL of a server", param="url", hint="http://127.0.0.1:8000")
        self._address = address
        self._where = f"{address.scheme}://{address.netloc}"
        path = address.path.rstrip("/")
        self._root = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def get(self, path: str) -> dict[str, Any]:
        return self._object(self._request("GET", self._root + path))

    def change(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a POST request to a route outside /v1."""
        return self._object(self._request("POST", self._root.removesuffix("/v1") + path, orjson.dumps(body)))

    def _object(self, opened: _OpenReply) -> dict[str, Any]:
        try:
            found = orjson.loads(opened.reply.read(MAX_LINE_BYTES))
        except orjson.JSONDecodeError as problem:
            raise RequestFailed(f"{self._where} does not answer like OpenAI's API") from problem
        finally:
            opened.close()
        return found if isinstance(found, dict) else {}

    def post(self, path: str, body: dict[str, Any]) -> _OpenReply:
        return self._request("POST", self._root + path, orjson.dumps(body))

    def _connect(self) -> http.client.HTTPConnection:
        host, port = str(self._address.hostname), self._address.port
        if self._address.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT_S, context=context)
        return http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)

    def _request(self, method: str, path: str, body: bytes | None = None) -> _OpenReply:
        connection = self._connect()
        try:
            connection.connect()
            connection.sock.settimeout(SILENCE_TIMEOUT_S)
            connection.request(method, path, body, self._headers)
            opened = _OpenReply(connection, connection.getresponse())
        except (OSError, http.client.HTTPException) as problem:
            connection.close()
            raise EngineDead(
                f"no server answers at {self._where}: {problem}",
                hint="start one with `tokenmill serve`, or set --url",
            ) from problem
        if opened.reply.status != 200:
            try:
                raise _refusal(opened.reply)
            finally:
                opened.close()
        return opened


def _refusal(reply: http.client.HTTPResponse) -> TokenmillError:
    """Return an error with the message of the server's refusal."""
    text = reply.read(MAX_ERROR_BYTES)
    try:
        message = str(orjson.loads(text)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = text.decode("utf-8", "replace").strip()[:200] or reply.reason
    if reply.status == 401:
        return InvalidRequest(f"the server requires an API key: {message}", hint="set TOKENMILL_API_KEY")
    kind = InvalidRequest if 400 <= reply.status < 500 else RequestFailed
    return kind(f"the server refused the request ({reply.status}): {message}")


class _OpenReply:
    def __init__(self, connection: http.client.HTTPConnection, reply: http.client.HTTPResponse) -> None:
        self.reply = reply
        self._connection = connection
        self._socket = connection.sock  # the connection drops its reference if the reply ends with the connection

    def break_off(self) -> None:
        """Shut down the connection, so that reading ends immediately; may be called by a signal handler."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.reply.close()
        self._connection.close()


class RemoteEvents(Iterator[Event]):
    """The events of one streamed answer."""

    def __init__(self, opened: _OpenReply) -> None:
        self._opened = opened
        self._is_stopped = False
        self._finish_reason: str | None = None

    def __next__(self) -> Event:
        while not self._is_stopped:
            data = self._data()
            if data is None:
                break
            event = self._event(data)
            if event is not None:
                return event
        raise StopIteration

    def _data(self) -> bytes | None:
        """Return the data of the next server-sent event; None at the end of the stream."""
        while True:
            try:
                line = self._opened.reply.readline(MAX_LINE_BYTES)
            except (OSError, ValueError, http.client.HTTPException) as problem:
                if self._is_stopped:
                    return None
                raise RequestFailed(f"the connection was lost during the answer: {problem}") from problem
            if not line:
                if self._is_stopped or self._finish_reason is not None:
                    return None
                raise RequestFailed("the server closed the connection before the end of the answer")
            if line.startswith(b"data:"):
                data = line.removeprefix(b"data:").strip()
                return None if data == b"[DONE]" else data

    def _event(self, data: bytes) -> Event | None:
        try:
            said = orjson.loads(data)
        except orjson.JSONDecodeError as problem:
            raise RequestFailed("the server sent an invalid event") from problem
        if error := said.get("error"):
            raise RequestFailed(str(error.get("message") if isinstance(error, dict) else error))
        usage = _usage(said.get("usage"))
        choice = next(iter(said.get("choices") or ()), None)
        if choice is None:
            return (
                None if usage is None else Event(request_id="", usage=usage, finish_reason=_reason(self._finish_reason))
            )
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        parts: list[Part] = [*([ThoughtPart(thought)] if thought else []), *([TextPart(text)] if text else [])]
        return Event(request_id="", text=text, parts=parts, usage=usage)

    def stop(self) -> None:
        """Stop the answer by closing the connection, on which the server aborts the request."""
        self._is_stopped = True
        self._opened.break_off()

    def close(self) -> None:
        self._opened.close()


def _reason(name: str | None) -> Any:
    return name if name in FINISH_REASONS else None


def _usage(given: Any) -> Usage | None:
    if not isinstance(given, dict):
        return None
    details = given.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=int(given.get("prompt_tokens") or 0),
        completion_tokens=int(given.get("completion_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
    )
