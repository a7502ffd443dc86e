"""Compressed request bodies: `Content-Encoding: gzip` and `zstd`, decompressed piece by piece.

A few kilobytes can decompress to gigabytes, so decompression is lazy: an `Unpacker` yields pieces of limited size, and
its reader stops at the size limit of bodies. The size of zstd's window, which the frame header sets, is limited too.
A body may consist of several gzip members or zstd frames, as RFC 9110 allows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from backports import zstd

from tokenmill.errors import InvalidRequest
from tokenmill.server.errors import BodyTooLarge, WrongContentType

PIECE_BYTES = 64 << 10
MAX_WINDOW_LOG = 23  # 8 MiB, which RFC 8878 recommends every decoder to support
GZIP_WINDOW_BITS = 31  # the largest window of zlib, in gzip's container


class Part(Protocol):
    """The decompressor of one gzip member or zstd frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def needs_input(self) -> bool: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class GzipMember:
    """Adapts zlib's decompressor, which returns unread input to the caller, to the interface of `Part`, which keeps
    it."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(GZIP_WINDOW_BITS)
        self._is_full = False  # the last piece had the maximum length, so there may be more output

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail and not self._is_full

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        piece = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        self._is_full = len(piece) == max_length
        return piece


def zstd_frame() -> Part:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG})


PARTS: dict[str, Callable[[], Part]] = {"gzip": GzipMember, "x-gzip": GzipMember, "zstd": zstd_frame}


def unpacker_of(encoding: str) -> Unpacker | None:
    """Return a decompressor for a Content-Encoding header; None if the body is not compressed."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in PARTS:
        raise WrongContentType(
            f"content encoding {encoding[:60]!r} is not supported", hint="send gzip, zstd or an uncompressed body"
        )
    return Unpacker(encoding)


class Unpacker:
    """Decompresses one body while it arrives."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._part: Part | None = None
        self._num_packed = 0

    def push(self, data: bytes) -> Iterator[bytes]:
        """Decompress more bytes lazily; yield the output in pieces."""
        self._num_packed += len(data)
        while data or (self._part is not None and not self._part.eof and not self._part.needs_input):
            if self._part is None or self._part.eof:
                self._part = PARTS[self._encoding]()
            try:
                piece = self._part.decompress(data, PIECE_BYTES)
            except (zlib.error, zstd.ZstdError) as error:
                raise self._refusal(error) from None
            data = self._part.unused_data if self._part.eof else b""
            if piece:
                yield piece

    def finish(self) -> None:
        """Refuse a body that ends before its compressed data does."""
        if self._num_packed and (self._part is None or not self._part.eof):
            raise InvalidRequest(f"the body ends before its {self._encoding} data does")

    def _refusal(self, error: Exception) -> InvalidRequest:
        if "memory" in str(error):  # the frame's window is too large; zstd has no separate exception for it
            return BodyTooLarge(f"the body's zstd window is larger than {1 << MAX_WINDOW_LOG} bytes")
        return InvalidRequest(f"the body is not valid {self._encoding} data")
