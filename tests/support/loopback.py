"""A server under test, with its URL, application, engine and HTTP client."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette

from tests.support.fake_engine import FakeEngine
from tokenmill.server.keys import KeyRecord, write_keys

CHAT: dict[str, Any] = {"model": "fake/tiny", "messages": [{"role": "user", "content": "Hi"}]}
GENERATIONS: dict[str, tuple[str, dict[str, Any]]] = {  # one request in every dialect: path and body
    "openai": ("/v1/chat/completions", CHAT),
    "anthropic": ("/v1/messages", {**CHAT, "max_tokens": 9}),
    "ollama": ("/api/chat", CHAT),
    "tgi": ("/", {"inputs": "Hi"}),
    "llama.cpp": ("/completion", {"prompt": "Hi"}),
}


@dataclass
class RunningServer:
    url: str
    app: Starlette
    engine: FakeEngine
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=20, verify=False))

    def post(self, path: str, body: object = None, **extra: object) -> httpx.Response:
        return self.http.post(self.url + path, json=body, **extra)  # type: ignore[arg-type]

    def status(self, path: str, headers: dict[str, str]) -> int:
        """Return the status of a GET whose body may never end."""
        with self.http.stream("GET", self.url + path, headers=headers) as reply:
            return reply.status_code

    def get(self, path: str, **extra: object) -> httpx.Response:
        return self.http.get(self.url + path, **extra)  # type: ignore[arg-type]


Serving = Callable[..., RunningServer]


def keys_file(folder: Path, **records: dict[str, Any]) -> Path:
    """Write a file of API keys, each named like the key itself."""
    made = [
        KeyRecord(id=name, sha256=hashlib.sha256(name.encode()).hexdigest(), **fields)
        for name, fields in records.items()
    ]
    write_keys(folder / "keys.toml", made)
    return folder / "keys.toml"
