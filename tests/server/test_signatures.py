"""Thoughts that clients carry: the server's own come back, all others are dropped; sealed ones show nothing."""

from __future__ import annotations

import base64
import hashlib
import hmac
import zlib
from pathlib import Path

import pytest

from tokenmill.server.signatures import ThoughtSigner

KEY = bytes(range(32))
THOUGHT = "The password is swordfish. " * 20


@pytest.fixture
def signer(tmp_path: Path) -> ThoughtSigner:
    return signer_with(tmp_path, KEY)


def signer_with(folder: Path, key: bytes) -> ThoughtSigner:
    path = folder / f"{key[:2].hex()}.key"
    path.write_bytes(key)
    return ThoughtSigner(path)


def sealed_by(signer: ThoughtSigner, text: str) -> bytes:
    return base64.b64decode(signer.sign(text, is_shown=False))


def opened(signer: ThoughtSigner, raw: bytes) -> str | None:
    return signer.verified("", base64.b64encode(raw).decode())


def test_only_own_thoughts_come_back(tmp_path: Path) -> None:
    path = tmp_path / "home" / "signing.key"
    signer = ThoughtSigner(path)
    shown, sealed = signer.sign("I think"), signer.sign("I think", is_shown=False)
    again = ThoughtSigner(path)  # as after a restart
    assert again.verified("I think", shown) == again.verified("", sealed) == "I think"
    assert path.stat().st_mode & 0o777 == 0o600
    forged = [("I thinK", shown), ("", shown), ("I think", sealed), ("I think", ""), ("I think", "äö"), ("x", "AAAA")]
    for text, signature in forged:
        assert again.verified(text, signature) is None
    assert ThoughtSigner(tmp_path / "other.key").verified("I think", shown) is None


@pytest.mark.parametrize("content", [None, b"short"])
def test_without_a_key_file_thoughts_are_known_until_the_server_ends(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a file" / "signing.key" if content is None else tmp_path / "signing.key"
    (tmp_path / "a file").write_bytes(b"")  # so that the first can't be made
    if content is not None:
        path.write_bytes(content)
    signer = ThoughtSigner(path)
    assert signer.verified("I think", signer.sign("I think")) == "I think"
    assert "not be known again after a restart" in caplog.text
    assert ThoughtSigner(path).verified("I think", signer.sign("I think")) is None


# ── sealed ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_construction_is_the_one_that_is_described(signer: ThoughtSigner) -> None:
    packed = zlib.compress(THOUGHT.encode())
    mac = hmac.digest(KEY, b"\x03" + packed, "sha256")
    second_key = hmac.digest(KEY, b"tokenmill: the key that seals thoughts", "sha256")
    stream = hashlib.shake_256(second_key + mac).digest(len(packed))
    expected = b"\x03" + mac + bytes(one ^ other for one, other in zip(packed, stream, strict=True))
    assert sealed_by(signer, THOUGHT) == expected


@pytest.mark.parametrize("text", ["", "x", "\0", "é🌞 – ", THOUGHT, THOUGHT * 4000])
def test_whatever_was_thought_is_read_again(signer: ThoughtSigner, text: str) -> None:
    assert opened(signer, sealed_by(signer, text)) == text


def test_a_thought_that_was_changed_anywhere_is_dropped(signer: ThoughtSigner) -> None:
    raw = sealed_by(signer, THOUGHT)
    for place in range(len(raw)):  # the tag, the MAC, the text
        for bit in (1, 128):
            changed = bytearray(raw)
            changed[place] ^= bit
            assert opened(signer, bytes(changed)) is None, place


def test_a_thought_that_was_cut_or_made_longer_is_dropped(signer: ThoughtSigner) -> None:
    raw = sealed_by(signer, THOUGHT)
    assert all(opened(signer, raw[:length]) is None for length in range(len(raw)))
    assert opened(signer, raw + b"\0") is None and opened(signer, raw[:33] + b"\0" + raw[33:]) is None


def test_parts_of_two_thoughts_are_none(signer: ThoughtSigner) -> None:
    raw, other = sealed_by(signer, THOUGHT), sealed_by(signer, THOUGHT[:-1] + "!")
    assert opened(signer, raw[:33] + other[33:]) is None and opened(signer, other[:33] + raw[33:]) is None
    shown = base64.b64decode(signer.sign(THOUGHT))
    assert opened(signer, b"\x01" + raw[1:]) is None, "sealed is not shown"
    assert signer.verified(THOUGHT, base64.b64encode(b"\x03" + shown[1:]).decode()) is None, "shown is not sealed"


def test_another_key_reads_nothing(tmp_path: Path, signer: ThoughtSigner) -> None:
    raw = sealed_by(signer, THOUGHT)
    for bit in range(256):
        key = bytearray(KEY)
        key[bit // 8] ^= 1 << bit % 8
        assert opened(signer_with(tmp_path, bytes(key)), raw) is None


def test_every_text_has_a_keystream_of_its_own(signer: ThoughtSigner) -> None:
    texts = [f"{THOUGHT}{number}" for number in range(500)]
    raw = [sealed_by(signer, text) for text in texts]
    nonces = {one[1:33] for one in raw}
    streams = set()
    for text, one in zip(texts, raw, strict=True):
        packed = zlib.compress(text.encode())
        streams.add(bytes(left ^ right for left, right in zip(packed[:16], one[33:49], strict=True)))
    assert len(nonces) == len(streams) == len(texts), "else the difference of two texts could be seen"
    assert sealed_by(signer, texts[0]) == raw[0], "the same text is sealed alike"


def test_nothing_of_the_text_shows(signer: ThoughtSigner) -> None:
    raw, packed = sealed_by(signer, THOUGHT), zlib.compress(THOUGHT.encode())
    assert len(raw) == 33 + len(packed)
    assert all(part not in raw for part in (THOUGHT[:8].encode(), packed[:8], packed[-8:]))
