"""A server under test, as the tests hold it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import httpx
from fake_engine import FakeEngine
from fastapi import FastAPI


@dataclass
class RunningServer:
    url: str
    app: FastAPI
    engine: FakeEngine

    def post(self, path: str, body: object = None, **extra: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=20, **extra)  # type: ignore[arg-type]

    def get(self, path: str, **extra: object) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20, **extra)  # type: ignore[arg-type]


Serving = Callable[..., RunningServer]
