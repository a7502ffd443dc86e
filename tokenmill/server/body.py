"""Request bodies: reading with limits, parsing as JSON, and strict access to the fields.

Bodies must be JSON, and their size and transfer time are limited. They are read as a stream, so a body that is too
large is refused without being held in memory. A compressed body is decompressed while it arrives (`compression.py`);
the limits apply to its decompressed size.

Every dialect's parser is built on `BodyFields`. A value of the wrong type or out of range is refused with the field's
name. `true` is not a number and `2.0` is not an integer. A null counts as absent. Fields that no parser reads are
ignored: clients add new ones every month.
"""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import orjson
from starlette.requests import ClientDisconnect, Request

from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidRequest, Overloaded, TokenmillError
from tokenmill.server.compression import unpacker_of
from tokenmill.server.errors import BodyTooLarge, BodyTooSlow, MissingBody, WrongContentType

DISCARD_BYTES = 64 * 1024 * 1024  # read and discarded after a refusal, so that the client sees the error
DISCARD_S = 2.0
MAX_RECEIVING_BYTES = 256 * 1024 * 1024  # total of all bodies being received
SMALL_BYTES = 64 * 1024  # smaller bodies are exempt from that total
SHOWN_CHARACTERS = 60
BROWSER_HEADERS = ("origin", "sec-fetch-site")
JSON_NAMES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}


class BodyReader:
    """Reads request bodies. The total size of all bodies being received is limited too: slow clients hold theirs for a
    long time."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.num_under_way = 0  # bytes

    async def read(self, request: Request, *, takes_any_type: bool = False) -> bytes:
        """Return the bytes of a JSON body, for `parse_object`. `takes_any_type`: accept any content type."""
        require_json(request, takes_any_type=takes_any_type)
        timeout_s = self._config.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read_bounded(request)
        except TimeoutError:
            raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s") from None

    async def _read_bounded(self, request: Request) -> bytes:
        encoding = request.headers.get("content-encoding")
        unpacker = None if encoding is None else unpacker_of(encoding)
        announced = request.headers.get("content-length", "")
        refusal = self._refusal(int(announced)) if announced.isdigit() else None
        if refusal is not None:  # before reading anything: the connection discards the rest (`http_protocol.py`)
            raise refusal
        stream = request.stream()
        kept = KeptBody(self)
        try:
            async for chunk in stream:
                if unpacker is None:
                    kept.add(chunk)
                    continue
                kept.note_packed(len(chunk))
                for piece in unpacker.push(chunk):
                    kept.add(piece)
                    await asyncio.sleep(0)  # decompression is slow: let other tasks run between pieces
            if unpacker is not None:
                unpacker.finish()
            return b"".join(kept.pieces)
        except TokenmillError:
            kept.pieces.clear()
            await discard(stream)
            raise
        finally:
            self.num_under_way -= kept.size

    def require_room(self, size: int) -> None:
        """Refuse a body that has grown to this size, if it is too large."""
        refusal = self._refusal(size)
        if refusal is not None:
            raise refusal

    def _refusal(self, size: int) -> TokenmillError | None:
        """Return why a body of this size (so far, or as announced) is refused; None if it is not."""
        limit = self._config.max_body_bytes
        if size > limit:
            return BodyTooLarge(f"the body is larger than {limit} bytes", hint="--max-body-bytes sets the limit")
        if size > SMALL_BYTES and self.num_under_way > MAX_RECEIVING_BYTES:
            return Overloaded("too many large bodies are being sent at the same time", retry_after_s=2.0)
        return None


class KeptBody:
    """The decompressed pieces of one body that is being received."""

    def __init__(self, reader: BodyReader) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self._num_packed = 0  # compressed bytes; limited too, since endless input may decompress to nothing
        self._reader = reader

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        self._reader.num_under_way += len(piece)
        self._reader.require_room(self.size)
        self.pieces.append(piece)

    def note_packed(self, num_bytes: int) -> None:
        self._num_packed += num_bytes
        self._reader.require_room(self._num_packed)


def require_json(request: Request, *, takes_any_type: bool = False) -> None:
    """Refuse a body that is not declared as JSON. Web pages can send other content types to any server without CORS, so
    a browser must declare JSON in every dialect."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    is_lenient = takes_any_type and not any(name in request.headers for name in BROWSER_HEADERS)
    if not is_lenient and kind != "application/json" and not kind.endswith("+json"):
        raise WrongContentType(
            f"the body must be JSON, got content type {kind[:60]!r}", hint="send `Content-Type: application/json`"
        )


async def discard(stream: Any) -> None:
    """Read and drop the rest of a body: a client that is still sending would see a broken connection, not the 413."""
    size = 0
    try:
        async with asyncio.timeout(DISCARD_S):
            async for chunk in stream:
                size += len(chunk)
                if size > DISCARD_BYTES:
                    return
    except (TimeoutError, ClientDisconnect):
        return


# ── fields ─────────────────────────────────────────────────────────────────────────────────────────────


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object. orjson refuses NaN, Infinity, numbers beyond a double, lone surrogates
    and nesting deeper than 1024."""
    if not body.strip():
        raise MissingBody("the body is empty; send a JSON object", hint="see /docs")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    """Return the JSON type of a value, for error messages."""
    if value is None:
        return "null"
    return JSON_NAMES.get(type(value), "an object")


def shown(value: object) -> str:
    """Return a value as error messages quote it: shortened."""
    if isinstance(value, list | dict):
        return kind_of(value)
    text = orjson.dumps(value).decode() if not isinstance(value, str) else repr(value[:SHOWN_CHARACTERS])
    return text if len(text) <= SHOWN_CHARACTERS + 2 else text[:SHOWN_CHARACTERS] + "…"


def refuse(name: str, problem: str, hint: str | None = None) -> NoReturn:
    """Raise the InvalidRequest of a field: "NAME PROBLEM"."""
    raise InvalidRequest(f"{name} {problem}", param=name, hint=hint)


class BodyFields:
    """Strict access to the fields of one JSON object. `prefix`: its path in the body (`messages[2].`), for error
    messages."""

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def name(self, key: str) -> str:
        return self.prefix + key

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def integer(self, key: str, low: int, high: int) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if type(value) is not int:
            refuse(self.name(key), f"must be an integer, got {shown(value)}")
        if not low <= value <= high:
            refuse(self.name(key), f"must be between {low} and {high}, got {value}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if type(value) not in (int, float):
            refuse(self.name(key), f"must be a number, got {shown(value)}")
        if not low <= value <= high:
            refuse(self.name(key), f"must be between {low:g} and {high:g}, got {shown(value)}")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            refuse(self.name(key), f"must be true or false, got {shown(value)}")
        return value

    def text(self, key: str, max_length: int | None = None) -> str | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            refuse(self.name(key), f"must be a string, got {shown(value)}")
        if max_length is not None and len(value) > max_length:
            refuse(self.name(key), f"must be at most {max_length} characters long, got {len(value)}")
        return value

    def required_text(self, key: str) -> str:
        value = self.text(key)
        if value is None:
            refuse(self.name(key), "is required")
        return value

    def one_of(self, key: str, choices: tuple[str, ...]) -> str | None:
        value = self.text(key)
        if value is not None and value not in choices:
            refuse(self.name(key), f"must be one of {', '.join(choices)}, got {shown(value)}")
        return value

    def items(self, key: str, max_items: int) -> list[Any] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            refuse(self.name(key), f"must be a list, got {shown(value)}")
        if len(value) > max_items:
            refuse(self.name(key), f"takes at most {max_items} items, got {len(value)}")
        return value

    def object(self, key: str) -> BodyFields | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            refuse(self.name(key), f"must be an object, got {shown(value)}")
        return BodyFields(value, f"{self.name(key)}.")

    def token_ids(self, key: str, max_items: int, vocab_size: int) -> list[int] | None:
        ids = self.items(key, max_items)
        if ids is not None:
            require_token_ids(ids, self.name(key), vocab_size)
        return ids

    def refuse_any(self, keys: tuple[str, ...], hint: str | None = None) -> None:
        """Refuse known fields that this server cannot honour, unless they are null or false."""
        if self.values.keys().isdisjoint(keys):  # nearly always
            return
        for key in keys:
            value = self.get(key)
            if value is not None and value is not False:  # 0 is refused too
                refuse(self.name(key), "is not supported by this server", hint)


def require_token_ids(ids: list[Any], name: str, vocab_size: int) -> None:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            refuse(name, f"must hold token ids between 0 and {vocab_size - 1}, got {shown(token_id)}")
