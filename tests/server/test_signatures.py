"""Thoughts that clients carry: the server's own come back, all others are dropped; sealed ones show nothing."""

from __future__ import annotations

import base64
import hashlib
import hmac
from pathlib import Path

import pytest

from tokenmill.server.signatures import ThoughtKeys, ThoughtSigner

KEY = bytes(range(32))
OTHER_KEY = bytes(reversed(KEY))
THOUGHT = "The password is swordfish. " * 20
HEAD = 1 + 16 + 32  # of a sealed thought: its kind, the nonce, the MAC


@pytest.fixture
def signer(tmp_path: Path) -> ThoughtSigner:
    return signer_with(tmp_path, KEY)


def signer_with(folder: Path, *keys: bytes, owner: str = "key-1") -> ThoughtSigner:
    path = folder / "signing.key"
    path.write_bytes(b"".join(keys))
    path.chmod(0o600)
    return ThoughtKeys(path).signer(owner)


def sealed_by(signer: ThoughtSigner, text: str) -> bytes:
    return base64.b64decode(signer.sign(text, is_shown=False))


def opened(signer: ThoughtSigner, raw: bytes) -> str | None:
    return signer.verified("", base64.b64encode(raw).decode())


def test_only_own_thoughts_come_back(tmp_path: Path) -> None:
    path = tmp_path / "home" / "signing.key"
    signer = ThoughtKeys(path).signer("")
    shown, sealed = signer.sign("I think"), signer.sign("I think", is_shown=False)
    again = ThoughtKeys(path).signer("")  # as after a restart
    assert again.verified("I think", shown) == again.verified("", sealed) == "I think"
    assert path.stat().st_mode & 0o777 == 0o600
    forged = [("I thinK", shown), ("", shown), ("I think", sealed), ("I think", ""), ("I think", "äö"), ("x", "AAAA")]
    for text, signature in forged:
        assert again.verified(text, signature) is None
    assert ThoughtKeys(tmp_path / "other.key").signer("").verified("I think", shown) is None


def test_thoughts_of_one_api_key_are_unknown_under_another(tmp_path: Path, signer: ThoughtSigner) -> None:
    shown, sealed = signer.sign("I think"), signer.sign("I think", is_shown=False)
    for owner in ("", "key-2", "key-1\0", "key-"):
        other = signer_with(tmp_path, KEY, owner=owner)
        assert other.verified("I think", shown) is None and other.verified("", sealed) is None


def test_a_new_key_signs_and_old_ones_are_still_known(tmp_path: Path, signer: ThoughtSigner) -> None:
    old_shown, old_sealed = signer.sign("I think"), signer.sign("I think", is_shown=False)
    changed = signer_with(tmp_path, OTHER_KEY, KEY)
    assert changed.verified("I think", old_shown) == changed.verified("", old_sealed) == "I think"
    shown, sealed = changed.sign("I think"), changed.sign("I think", is_shown=False)
    without_old = signer_with(tmp_path, OTHER_KEY)
    assert without_old.verified("I think", shown) == without_old.verified("", sealed) == "I think"
    assert without_old.verified("I think", old_shown) is None and without_old.verified("", old_sealed) is None


def test_a_key_file_that_others_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    signer = signer_with(tmp_path, KEY)
    signer.sign("I think")
    assert not caplog.text
    (tmp_path / "signing.key").chmod(0o644)
    ThoughtKeys(tmp_path / "signing.key").signer("").sign("I think")
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize("content", [None, b"", b"short", KEY * 17])
def test_without_a_key_file_thoughts_are_known_until_the_server_ends(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a file" / "signing.key" if content is None else tmp_path / "signing.key"
    (tmp_path / "a file").write_bytes(b"")  # so that the first can't be made
    if content is not None:
        path.write_bytes(content)
    signer = ThoughtKeys(path).signer("")
    assert signer.verified("I think", signer.sign("I think")) == "I think"
    assert "not be recognised after a restart" in caplog.text
    assert ThoughtKeys(path).signer("").verified("I think", signer.sign("I think")) is None


# ── sealed ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_construction_is_the_one_that_is_described(signer: ThoughtSigner) -> None:
    def own_key(use: str) -> bytes:
        return hmac.digest(KEY, f"tokenmill thoughts: {use}".encode() + b"\0key-1", "sha256")

    text, raw = THOUGHT.encode(), sealed_by(signer, THOUGHT)
    mac = hmac.digest(own_key("sealed"), raw[1:17] + text, "sha256")
    stream = hashlib.shake_256(own_key("keystream") + mac).digest(len(text))
    assert raw == b"\x05" + raw[1:17] + mac + bytes(one ^ other for one, other in zip(text, stream, strict=True))
    shown = b"\x04" + hmac.digest(own_key("shown"), text, "sha256")
    assert signer.sign(THOUGHT) == base64.b64encode(shown).decode()


@pytest.mark.parametrize("text", ["", "x", "\0", "é🌞 – ", THOUGHT, THOUGHT * 4000])
def test_whatever_was_thought_is_read_again(signer: ThoughtSigner, text: str) -> None:
    assert opened(signer, sealed_by(signer, text)) == text


def test_a_thought_that_was_changed_anywhere_is_dropped(signer: ThoughtSigner) -> None:
    raw = sealed_by(signer, THOUGHT)
    for place in range(len(raw)):  # the kind, the nonce, the MAC, the text
        for bit in (1, 128):
            changed = bytearray(raw)
            changed[place] ^= bit
            assert opened(signer, bytes(changed)) is None, place


def test_a_thought_that_was_cut_or_made_longer_is_dropped(signer: ThoughtSigner) -> None:
    raw = sealed_by(signer, THOUGHT)
    assert all(opened(signer, raw[:length]) is None for length in range(len(raw)))
    assert opened(signer, raw + b"\0") is None and opened(signer, raw[:HEAD] + b"\0" + raw[HEAD:]) is None


def test_parts_of_two_thoughts_are_none(signer: ThoughtSigner) -> None:
    raw, other = sealed_by(signer, THOUGHT), sealed_by(signer, THOUGHT[:-1] + "!")
    for cut in (17, HEAD):
        assert opened(signer, raw[:cut] + other[cut:]) is None and opened(signer, other[:cut] + raw[cut:]) is None
    shown = base64.b64decode(signer.sign(THOUGHT))
    assert opened(signer, b"\x04" + raw[1:]) is None, "sealed is not shown"
    assert signer.verified(THOUGHT, base64.b64encode(b"\x05" + shown[1:]).decode()) is None, "shown is not sealed"


def test_another_key_reads_nothing(tmp_path: Path, signer: ThoughtSigner) -> None:
    raw = sealed_by(signer, THOUGHT)
    for bit in range(256):
        key = bytearray(KEY)
        key[bit // 8] ^= 1 << bit % 8
        assert opened(signer_with(tmp_path, bytes(key)), raw) is None


def test_every_text_has_a_keystream_of_its_own(signer: ThoughtSigner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the machine's random bytes are no good: else the difference of two texts could be seen."""
    monkeypatch.setattr("secrets.token_bytes", bytes)  # zeros
    raw = [sealed_by(signer, f"{number} {THOUGHT}") for number in range(500)]
    streams = set()
    for number, one in enumerate(raw):
        text = f"{number} {THOUGHT}".encode()
        streams.add(bytes(left ^ right for left, right in zip(text[:16], one[HEAD : HEAD + 16], strict=True)))
    assert len({one[17:HEAD] for one in raw}) == len(streams) == len(raw)


def test_two_thoughts_do_not_show_whether_they_are_equal(signer: ThoughtSigner) -> None:
    raw, again = sealed_by(signer, THOUGHT), sealed_by(signer, THOUGHT)
    assert all(raw[part] != again[part] for part in (slice(1, 17), slice(17, HEAD), slice(HEAD, None)))


def test_nothing_but_the_length_of_the_text_shows(signer: ThoughtSigner) -> None:
    raw = sealed_by(signer, THOUGHT)
    assert THOUGHT[:8].encode() not in raw
    assert len(raw) == HEAD + len(THOUGHT) == len(sealed_by(signer, "x" * len(THOUGHT))), "packing would tell more"
