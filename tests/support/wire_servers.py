"""Imitations of other engines' servers, as documented by their makers: expected path, headers and fields, events
sent.

anthropic   Messages API, streaming: "Basic streaming request" of its documentation, with its ping and block events
ollama      docs/api.md, "Generate a chat completion": one JSON object a line, durations in nanoseconds
tgi         text-generation-inference, POST /generate_stream: the last token carries text and details
vllm        OpenAI-compatible server: a first chunk with the role, usage in a last chunk without choices
llama.cpp   the same with timings beside the usage, and comments to keep the connection alive
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
WORDS = ("Hello", " there", ".")


def event(payload: Body, name: str = "", space: str = " ") -> bytes:
    first = f"event: {name}\n" if name else ""
    return f"{first}data:{space}{json.dumps(payload)}\n\n".encode()


def anthropic(body: Body, headers: Any) -> Iterator[bytes]:
    assert headers["anthropic-version"] and headers["authorization"] == "Bearer secret"
    assert headers["x-api-key"] in (None, "secret")  # the field's former place; current clients no longer send it
    assert {"model", "max_tokens", "messages", "stream"} <= set(body)
    usage = {"input_tokens": 5, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 0, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": body["model"],
               "stop_reason": None, "stop_sequence": None, "usage": usage}  # fmt: skip
    yield event({"type": "message_start", "message": message}, "message_start")
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    yield event(block, "content_block_start")
    yield event({"type": "ping"}, "ping")
    for word in WORDS:
        delta = {"type": "text_delta", "text": word}
        yield event({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")
    yield event({"type": "content_block_stop", "index": 0}, "content_block_stop")
    end = {"stop_reason": "end_turn", "stop_sequence": None}
    yield event({"type": "message_delta", "delta": end, "usage": {"output_tokens": 3}}, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


def ollama(body: Body, headers: Any) -> Iterator[bytes]:
    assert body["stream"] is True and body["options"]["num_predict"] == 8
    head = {"model": body["model"], "created_at": "2023-08-04T08:52:19.385406455-07:00"}
    for word in WORDS:
        message = {"role": "assistant", "content": word, "images": None}
        yield json.dumps({**head, "message": message, "done": False}).encode() + b"\n"
    end = {"message": {"role": "assistant", "content": ""}, "done_reason": "stop", "done": True,
           "total_duration": 4883583458, "load_duration": 1334875, "prompt_eval_count": 25,
           "prompt_eval_duration": 342546000, "eval_count": 3, "eval_duration": 4535599000}  # fmt: skip
    yield json.dumps({**head, **end}).encode() + b"\n"


def tgi(body: Body, headers: Any) -> Iterator[bytes]:
    assert {"inputs", "parameters"} <= set(body) <= {"inputs", "parameters", "stream"}
    assert body["parameters"]["max_new_tokens"] == 8
    for number, word in enumerate(WORDS):
        is_last = number == len(WORDS) - 1
        details = {"finish_reason": "length", "generated_tokens": 3, "seed": None, "input_length": 25}
        token = {"id": 100 + number, "text": word, "logprob": -0.5, "special": False}
        piece = {"index": number + 1, "token": token, "generated_text": "".join(WORDS) if is_last else None}
        yield event({**piece, "details": details if is_last else None}, space="")


def vllm(body: Body, headers: Any) -> Iterator[bytes]:
    assert headers["authorization"] == "Bearer secret" and body["stream_options"] == {"include_usage": True}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
    for delta in ({"role": "assistant", "content": ""}, *({"content": word} for word in WORDS)):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        yield event({**head, "choices": [choice]})
    end = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    yield event({**head, "choices": [end]})
    usage = {"prompt_tokens": 25, "total_tokens": 28, "completion_tokens": 3}
    yield event({**head, "choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def llama_cpp(body: Body, headers: Any) -> Iterator[bytes]:
    head = {"created": 1, "id": "chatcmpl-1", "model": body["model"], "system_fingerprint": "b1"}
    yield b": keep-alive\n\n"
    for delta in ({"role": "assistant", "content": None}, *({"content": word} for word in WORDS)):
        yield event({**head, "choices": [{"finish_reason": None, "index": 0, "delta": delta}]})
    yield event({**head, "choices": [{"finish_reason": "stop", "index": 0, "delta": {}}]})
    usage = {"completion_tokens": 3, "prompt_tokens": 25, "total_tokens": 28}
    timings = {"prompt_n": 25, "prompt_ms": 12.3, "predicted_n": 3, "predicted_ms": 4.5}
    yield event({**head, "choices": [], "usage": usage, "timings": timings}) + b"data: [DONE]\n\n"


Script = Callable[[Body, Any], Iterator[bytes]]
SERVERS: dict[str, tuple[str, str, Script]] = {
    "anthropic": ("anthropic", "/v1/messages", anthropic),
    "ollama": ("ollama", "/api/chat", ollama),
    "tgi": ("tgi", "/generate_stream", tgi),
    "vllm": ("openai-chat", "/v1/chat/completions", vllm),
    "llama.cpp": ("openai-chat", "/v1/chat/completions", llama_cpp),
}


@contextmanager
def wire_server(path: str, script: Script) -> Iterator[str]:
    class Wire(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            pieces = list(script(body, self.headers)) if self.path == path else []
            self.send_response(200 if pieces else 404)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for piece in (*pieces, b""):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Wire)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
