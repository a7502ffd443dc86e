"""Keys as records: made and revoked by a command, found by digest, with an expiry and models of their own."""

from __future__ import annotations

import hashlib
import json
import stat
import time
from pathlib import Path

import pytest

from tests.support.loopback import CHAT, Serving
from tokenmill.cli import main
from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidConfig
from tokenmill.server.auth import require_safe_exposure
from tokenmill.server.errors import MissingKey
from tokenmill.server.keys import KeyRecord, KeyRing, key_ring, new_key, read_keys, write_keys


def made(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["keys", "add", *arguments, "--keys-file", str(path)]) == 0
    return capsys.readouterr().out.strip()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys_are_made_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "keys.toml"
    key = made(path, capsys, "alice", "--expires", "90d", "--model", "smollm2:*")
    assert key.startswith("tm-") and len(key) > 40
    text = path.read_text()
    assert key not in text and hashlib.sha256(key.encode()).hexdigest() in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made(path, capsys, "bob")
    assert main(["keys", "list", "--keys-file", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "alice" in shown and "smollm2:*" in shown and "bob" in shown and "never" in shown
    assert hashlib.sha256(key.encode()).hexdigest() not in shown
    assert main(["keys", "list", "--json", "--keys-file", str(path)]) == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)] == ["alice", "bob"]
    assert main(["keys", "add", "alice", "--keys-file", str(path)]) == 2, "an id is unique"
    assert "alice" in capsys.readouterr().err
    assert main(["keys", "revoke", "alice", "--keys-file", str(path)]) == 0
    assert [record.id for record in read_keys(path)] == ["bob"]
    assert main(["keys", "revoke", "alice", "--keys-file", str(path)]) == 2


def test_a_record_admits_until_it_expires_or_is_revoked(serving: Serving, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    alice, records = new_key([], KeyRecord(id="alice", sha256=""))
    late, records = new_key(records, KeyRecord(id="late", sha256="", expires="2020-01-01"))
    bound, records = new_key(records, KeyRecord(id="bound", sha256="", models=["other*"]))
    write_keys(path, records)
    ring = KeyRing([b"plain"], path)
    server = serving(ServerConfig(), keys=ring)
    statuses = {}
    for name, key in {"alice": alice, "late": late, "bound": bound, "plain": "plain", "none": "wrong"}.items():
        statuses[name] = server.post("/v1/chat/completions", CHAT, headers=bearer(key)).status_code
    assert statuses == {"alice": 200, "late": 401, "bound": 403, "plain": 200, "none": 401}
    write_keys(path, [record for record in records if record.id != "alice"])
    assert server.post("/v1/chat/completions", CHAT, headers=bearer(alice)).status_code == 200, "until it is read again"
    ring.reload()
    assert server.post("/v1/chat/completions", CHAT, headers=bearer(alice)).status_code == 401
    path.write_text("[[key]]\nid = 5\n")
    with pytest.raises(InvalidConfig):
        ring.reload()
    assert server.post("/v1/chat/completions", CHAT, headers=bearer("plain")).status_code == 200, "nothing changed"


def test_a_file_without_keys_leaves_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    write_keys(path, [])
    ring = key_ring(ServerConfig(keys_file=path), {})
    assert ring and len(ring) == 0 and ring.find([b""]) is None
    require_safe_exposure(ServerConfig(host="0.0.0.0"), ring)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[[key]]\nid = 'a'\n", "sha256"),
        ("[[key]]\nid = 'a b'\nsha256 = '00'\n", "invalid id"),
        ("[[key]]\nid = 'a'\nsha256 = '00'\n", "64 hexadecimal"),
        (f"[[key]]\nid = 'a'\nsha256 = '{'0' * 64}'\nexpires = 'soon'\n", "not a date"),
        (f"[[key]]\nid = 'a'\nsha256 = '{'0' * 64}'\nwieght = 1\n", "wieght"),
        (f"[[key]]\nid = 'a'\nsha256 = '{'0' * 64}'\n" * 2, "of another key"),
        ("".join(f"[[key]]\nid = '{name}'\nsha256 = '{'0' * 64}'\n" for name in "ab"), "'b'.* same sha256 as 'a'"),
        ("[[key", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=word):
        KeyRing(path=path)


def test_a_key_with_limits_has_them_however_it_is_given(tmp_path: Path) -> None:
    key, records = new_key([], KeyRecord(id="alice", sha256="", requests_per_minute=5))
    write_keys(tmp_path / "keys.toml", records)
    found = KeyRing([key.encode(), b"other"], tmp_path / "keys.toml").find([key.encode()])
    assert found is not None and found.id == "alice" and found.requests_per_minute == 5


def test_the_last_tenant_left_becomes_no_operator(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    operator, first = new_key([], KeyRecord(id="operator", sha256="", sees_all=True))
    alice, both = new_key(first, KeyRecord(id="alice", sha256=""))
    write_keys(path, both)
    ring = KeyRing(path=path)
    write_keys(path, both[1:])  # the operator's key is about to be replaced
    ring.reload()
    left = ring.find([alice.encode()])
    assert left is not None and not left.sees_all and ring.find([operator.encode()]) is None
    alone = KeyRing(path=path).find([alice.encode()])
    assert alone is not None and alone.sees_all, "who runs a server for themselves needs one key"


def test_work_of_keys_that_are_gone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    _, records = new_key([], KeyRecord(id="alice", sha256="", models=["a"]))
    _, records = new_key(records, KeyRecord(id="late", sha256="", expires="2020-01-01"))
    write_keys(path, records)
    ring = KeyRing(path=path)
    assert ring.require("alice").models == ["a"]
    for name in ("late", "nobody"):
        with pytest.raises(MissingKey, match="no longer valid"):
            ring.require(name)


def test_ten_thousand_keys_are_found_as_fast_as_one() -> None:
    ring = KeyRing([f"key {number}".encode() for number in range(10_000)])
    began = time.process_time()
    for number in range(1000):
        assert ring.find([f"key {number * 7}".encode()]) is not None
        assert ring.find([b"none"]) is None
    assert (time.process_time() - began) / 2000 < 200e-6, "about 2 us on a quiet machine"
