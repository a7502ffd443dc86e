"""`tokenmill verify`: a byte that changed in a stored model, or in packed weights, is found."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tokenmill.cli import main
from tokenmill.store.layout import Manifest, Store, StoredFile
from tokenmill.weights.packed_file import settle


@pytest.fixture
def blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the one model in a store."""
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    store, content = Store(), bytes(range(256)) * 100
    store.prepare()
    digest = hashlib.sha256(content).hexdigest()
    (tmp_path / "fetched").write_bytes(content)
    file = StoredFile("tiny.gguf", digest, len(content))
    store.install(Manifest(name="tiny", source="a test", files=[file]), {"tiny.gguf": tmp_path / "fetched"})
    return store.blob_path(digest)


def flip(path: Path) -> None:
    mode = path.stat().st_mode & 0o777
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    path.chmod(mode)


def test_models_are_compared_with_their_digests(blob: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify"]) == 0 and "ok" in capsys.readouterr().out
    flip(blob)
    assert main(["verify", "tiny"]) == 1
    assert "its SHA-256 differs" in capsys.readouterr().err
    assert main(["verify", "unknown"]) != 0


def test_damaged_packed_weights_are_removed(blob: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "home" / "packed" / ("a" * 64)
    packed.parent.mkdir()
    packed.write_bytes(bytes(10_000))
    settle(packed)
    assert main(["verify"]) == 0 and "packed weights" in capsys.readouterr().out
    flip(packed)
    assert main(["verify"]) == 1 and "changed on the disk" in capsys.readouterr().err
    assert not packed.exists()
    assert main(["verify"]) == 0
