"""What a client may send: JSON only, of bounded size, within bounded time. Read as a stream, so that a large body
is refused without ever being in memory."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from tokenmill.config.server import ServerConfig
from tokenmill.engine.lengths import longest_prompt
from tokenmill.engine.status import ModelInfo
from tokenmill.errors import Overloaded, TokenmillError
from tokenmill.params import SamplingParams
from tokenmill.server.errors import BodyTooLarge, BodyTooSlow, WrongContentType
from tokenmill.server.fields import parse_object

DISCARD_BYTES = 64 * 1024 * 1024  # read and thrown away after a refusal, so that the client gets to see it
DISCARD_S = 2.0
MAX_UNDER_WAY_BYTES = 256 * 1024 * 1024  # of all bodies that are being received
SMALL_BYTES = 64 * 1024  # a body of this size always finds room


class BodyReader:
    """All the bodies that are being received; together they are bounded too, as a slow client may hold one for long."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._num_under_way = 0  # bytes

    async def read_json(self, request: Request) -> dict[str, Any]:
        require_json(request)
        return parse_object(await self.read(request))

    async def read(self, request: Request) -> bytes:
        timeout_s = self._config.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read_bounded(request)
        except TimeoutError:
            raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s") from None

    async def _read_bounded(self, request: Request) -> bytes:
        chunks, size = [], 0
        announced = request.headers.get("content-length", "")
        refusal = self._refusal(int(announced)) if announced.isdigit() else None
        if refusal is not None and "expect" in request.headers:  # it waits for a word before it sends anything
            raise refusal
        stream = request.stream()
        try:
            async for chunk in stream:
                size += len(chunk)
                self._num_under_way += len(chunk)
                refusal = refusal or self._refusal(size)
                if refusal is not None:
                    break
                chunks.append(chunk)
        finally:
            self._num_under_way -= size
        if refusal is not None:
            chunks.clear()
            await _discard(stream)
            raise refusal
        return b"".join(chunks)

    def _refusal(self, size: int) -> TokenmillError | None:
        """Why a body of this size, as far as it is known, is not taken."""
        most = self._config.max_body_bytes
        if size > most:
            return BodyTooLarge(f"the body is larger than {most} bytes", hint="--max-body-bytes sets the limit")
        if size > SMALL_BYTES and self._num_under_way > MAX_UNDER_WAY_BYTES:
            return Overloaded("too many large bodies are being sent at the same time", retry_after_s=2.0)
        return None


def require_json(request: Request) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise WrongContentType(
            f"the body must be JSON, got content type {kind[:60]!r}", hint="send `Content-Type: application/json`"
        )
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise WrongContentType(
            f"content encoding {encoding[:60]!r} is not supported", hint="send the body uncompressed"
        )


async def _discard(stream: Any) -> None:
    """A client that is still sending does not read; without this it would see a broken connection, not a 413."""
    size = 0
    try:
        async with asyncio.timeout(DISCARD_S):
            async for chunk in stream:
                size += len(chunk)
                if size > DISCARD_BYTES:
                    return
    except (TimeoutError, ClientDisconnect):
        return


def prompt_limit(params: SamplingParams, info: ModelInfo) -> int:
    """Tokens of the longest prompt that such a request may have."""
    shifts = info.shifts_context if params.context_shift is None else params.context_shift
    return longest_prompt(info.max_context) if shifts and params.beam is None else info.max_context
