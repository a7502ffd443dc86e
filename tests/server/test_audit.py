"""The audit log: who may write to it, what is in it, and that no change of it goes unnoticed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.scripted_server import scripted_server
from tests.support.timing import eventually
from tokenmill.cli import main
from tokenmill.config.server import ServerConfig
from tokenmill.server import audit
from tokenmill.server.audit import BrokenChain, append, hash_of, read_entries, rotated_files, verify

KEY = {"authorization": "Bearer sesame"}


def written(path: Path, count: int = 5) -> list[str]:
    for number in range(count):
        append(path, [(1.0 * number, "key_added", {"id": f"user-{number}"})])
    return path.read_text().splitlines()


def test_every_change_is_found(tmp_path: Path) -> None:
    path = tmp_path / "state" / "audit.jsonl"
    lines = written(path)
    whole = verify(path)
    assert (whole.first, whole.last) == (1, 5)
    assert (path.stat().st_mode | path.parent.stat().st_mode) & 0o077 == 0, "for its owner alone"
    swapped = [lines[0], lines[2], lines[1], *lines[3:]]
    edited = [*lines[:2], lines[2].replace("user-2", "user-9"), *lines[3:]]
    line = json.loads(edited[2])
    rehashed = [*lines[:2], json.dumps({**line, "hash": hash_of(line)}), *lines[3:]]
    added = [*lines[:3], lines[2], *lines[3:]]
    unreadable = [*lines[:2], lines[2][:-1], *lines[3:]]
    for altered in (swapped, edited, rehashed, added, unreadable, lines[:2] + lines[3:]):
        path.write_text("\n".join(altered) + "\n")
        with pytest.raises(BrokenChain, match="entry"):
            verify(path)


def test_the_command_finds_a_log_that_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "audit.jsonl"
    lines = written(path)
    newest = verify(path).hash
    assert main(["audit", "verify", str(path), "--contains", newest]) == 0
    assert "5 entries, none altered" in capsys.readouterr().out
    path.write_text("\n".join(lines[:3]) + "\n")
    assert main(["audit", "verify", str(path)]) == 0, "the rest is a chain of its own"
    assert main(["audit", "verify", str(path), "--contains", newest]) == 1
    assert "it was truncated" in capsys.readouterr().err
    assert main(["audit", "list", str(path), "--last", "2", "--json"]) == 0
    assert [line["id"] for line in json.loads(capsys.readouterr().out)] == ["user-1", "user-2"]
    path.write_text(lines[0].replace("user-0", "someone") + "\n")
    assert main(["audit", "verify", str(path)]) == 1
    assert main(["audit", "verify", str(tmp_path / "none.jsonl")]) == 2


def test_a_line_that_a_crash_cut_short_does_not_stop_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    written(path, 3)
    with path.open("a") as file:
        file.write('{"entry": 4, "time": "20')
    append(path, [(4.0, "key_revoked", {"id": "user-1"})])
    chain = verify(path)
    assert (chain.last, chain.num_unreadable) == (4, 1)


def test_several_writers_make_one_chain_over_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    monkeypatch.setattr(audit, "ROTATE_BYTES", 2000)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: append(path, [(1.0, "key_added", {"id": f"{number}"})]), range(40)))
    assert verify(path).last == 40 and len(rotated_files(path)) >= 3
    assert {str(line["id"]) for _, line in read_entries(path)} == {str(number) for number in range(40)}
    rotated_files(path)[0].unlink()
    assert verify(path).first > 1, "an operator may put old files away"


def test_a_server_records_who_was_refused_and_what_became_of_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, keys = tmp_path / "state" / "audit.jsonl", tmp_path / "keys.toml"
    config = ServerConfig(api_key=("sesame",), state_dir=tmp_path / "state")
    with scripted_server([{"say": "Fine."}], config=config) as server:
        for _ in range(30):
            assert server.get("/v1/models", headers={"authorization": "Bearer wrong-secret"}).status_code == 401
        assert server.get("/v1/models").status_code == 401
        assert server.get("/v1/models", headers=KEY).status_code == 200
        assert eventually(lambda: "no key" in path.read_text())
    assert main(["keys", "add", "alice", "--keys-file", str(keys)]) == 0
    assert main(["keys", "revoke", "alice", "--keys-file", str(keys)]) == 0
    assert [line["event"] for _, line in read_entries(keys.with_name("audit.jsonl"))] == ["key_added", "key_revoked"]
    entries = [line for _, line in read_entries(path)]
    refused = [line for line in entries if line["event"] == "auth_failed"]
    counts = {
        reason: sum(int(str(one["count"])) for one in refused if one["reason"] == reason)
        for reason in ("unknown key", "no key")
    }
    assert counts == {"unknown key": 30, "no key": 1} and {one["client"] for one in refused} == {"127.0.0.1"}
    assert [entries[0]["event"], entries[-1]["event"]] == ["server_started", "server_stopped"]
    assert "wrong-secret" not in path.read_text() and "sesame" not in path.read_text()
    assert verify(path).last == len(entries)
    capsys.readouterr()
