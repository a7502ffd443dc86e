"""Compressed bodies: what they unpack to counts, a bomb is refused before it goes off, other encodings by name."""

from __future__ import annotations

import gzip
import sys
import zlib
from pathlib import Path

import httpx
import orjson
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_engine import STORY
from tests.support.loopback import RunningServer
from tests.support.server_process import free_port, running
from tokenmill.errors import InvalidRequest
from tokenmill.server.compression import PIECE_BYTES, Unpacker

CHAT = "/v1/chat/completions"
BODY = orjson.dumps({"model": "fake/tiny", "messages": [{"role": "user", "content": "Hi"}]})
PACKERS = {"gzip": gzip.compress, "x-gzip": gzip.compress, "zstd": zstd.compress, "GZIP": gzip.compress}


def post(url: str, content: bytes, encoding: str) -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return httpx.post(url + CHAT, content=content, headers=headers, timeout=60)


def bomb(size: int) -> bytes:
    """A zstd frame that unpacks to so many spaces, made without ever having them all."""
    packer = zstd.ZstdCompressor()
    piece = b" " * (1 << 20)
    return b"".join(packer.compress(piece) for _ in range(size >> 20)) + packer.flush()


@pytest.mark.parametrize("encoding", PACKERS)
def test_compressed_bodies_are_read(server: RunningServer, encoding: str) -> None:
    pack = PACKERS[encoding]
    for content in (pack(BODY), pack(BODY[:10]) + pack(BODY[10:])):  # one part, and several
        reply = post(server.url, content, encoding)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == STORY


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, zstd", "nonsense"])
def test_other_encodings_are_refused_by_name(server: RunningServer, encoding: str) -> None:
    reply = post(server.url, BODY, encoding)
    assert reply.status_code == 415 and encoding in reply.text and "zstd" in reply.text


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_damaged_and_truncated_bodies_are_the_clients_mistake(server: RunningServer, encoding: str) -> None:
    packed = PACKERS[encoding](BODY)
    for content in (BODY, packed[:-5], packed + b"more", packed[:5]):
        reply = post(server.url, content, encoding)
        assert reply.status_code == 400 and encoding in reply.text, content
    assert post(server.url, b"", encoding).status_code == 400, "an empty body is empty, however it is packed"


def test_a_window_that_takes_too_much_memory_is_refused(server: RunningServer) -> None:
    options = {zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.content_size_flag: 0}
    packer = zstd.ZstdCompressor(options=options)
    reply = post(server.url, packer.compress(BODY) + packer.flush(), "zstd")
    assert reply.status_code == 413 and "window" in reply.text


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_what_unpacks_to_nothing_is_bounded_too(server: RunningServer, encoding: str) -> None:
    empty = PACKERS[encoding](b"")
    reply = post(server.url, empty * ((9 << 20) // len(empty)), encoding)
    assert reply.status_code == 413


def test_a_bomb_is_refused_and_takes_no_memory() -> None:
    port = free_port()
    with running(["-m", "tests.support.server_process", str(port)], port) as process:
        process.wait_for("ready")
        assert post(process.url, zstd.compress(BODY), "zstd").status_code == 200
        peaks = [peak_mib(process.child.pid)]
        for content, encoding in ((bomb(1 << 30), "zstd"), (zlib_bomb(100 << 20), "gzip")):
            reply = post(process.url, content, encoding)
            assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
            peaks.append(peak_mib(process.child.pid))
        assert peaks[-1] - peaks[0] < 50, peaks
        assert post(process.url, zstd.compress(BODY), "zstd").status_code == 200


def zlib_bomb(size: int) -> bytes:
    packer = zlib.compressobj(wbits=31)
    piece = b" " * (1 << 20)
    return b"".join(packer.compress(piece) for _ in range(size >> 20)) + packer.flush()


def peak_mib(pid: int) -> int:
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))


@given(st.binary(max_size=5000), st.integers(1, 60), st.sampled_from(["gzip", "zstd"]), st.integers(0, 300_000))
def test_however_the_bytes_arrive_they_unpack_to_the_same(data: bytes, size: int, encoding: str, num_same: int) -> None:
    data += b"a" * num_same
    packed = PACKERS[encoding](data)
    unpacker = Unpacker(encoding)
    pieces = [piece for at in range(0, len(packed), size) for piece in unpacker.push(packed[at : at + size])]
    unpacker.finish()
    assert b"".join(pieces) == data and all(0 < len(piece) <= PIECE_BYTES for piece in pieces)
    cut = Unpacker(encoding)
    list(cut.push(packed[:-1]))
    with pytest.raises(InvalidRequest, match="ends before"):
        cut.finish()
