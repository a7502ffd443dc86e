"""A server under test, as the tests hold it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
from starlette.applications import Starlette

from tests.support.fake_engine import FakeEngine


@dataclass
class RunningServer:
    url: str
    app: Starlette
    engine: FakeEngine
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=20, verify=False))

    def post(self, path: str, body: object = None, **extra: object) -> httpx.Response:
        return self.http.post(self.url + path, json=body, **extra)  # type: ignore[arg-type]

    def get(self, path: str, **extra: object) -> httpx.Response:
        return self.http.get(self.url + path, **extra)  # type: ignore[arg-type]


Serving = Callable[..., RunningServer]
