"""What a client may send: JSON only, of bounded size, within bounded time. Read as a stream, so that a large body
is refused without ever being in memory."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from tokenmill.config.server import ServerConfig
from tokenmill.engine.lengths import longest_prompt
from tokenmill.engine.status import ModelInfo
from tokenmill.params import SamplingParams
from tokenmill.server.failures import BodyTooLarge, BodyTooSlow, WrongContentType
from tokenmill.server.fields import parse_object

DISCARD_BYTES = 64 * 1024 * 1024  # read and thrown away after a refusal, so that the client gets to see it
DISCARD_S = 2.0


async def read_json(request: Request, config: ServerConfig) -> dict[str, Any]:
    require_json(request)
    return parse_object(await read_body(request, config))


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


async def read_body(request: Request, config: ServerConfig) -> bytes:
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await _read_bounded(request, config.max_body_bytes)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {config.body_timeout_s:g} s") from None


async def _read_bounded(request: Request, max_bytes: int) -> bytes:
    chunks, size = [], 0
    announced = request.headers.get("content-length", "")
    stream = request.stream()
    is_refused = announced.isdigit() and int(announced) > max_bytes
    async for chunk in stream:
        size += len(chunk)
        is_refused = is_refused or size > max_bytes
        if is_refused:
            break
        chunks.append(chunk)
    if is_refused:
        await _discard(stream)
        raise BodyTooLarge(f"the body is larger than {max_bytes} bytes", hint="--max-body-bytes sets the limit")
    return b"".join(chunks)


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
