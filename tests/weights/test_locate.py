"""What a path holds, and clear errors where it holds nothing usable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tokenmill.errors import DamagedFile, ModelError
from tokenmill.weights.checkpoint import SafetensorsCheckpoint
from tokenmill.weights.locate import locate, stored_bytes


def touch(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).write_bytes(b"x")
    return directory


def test_formats(tmp_path: Path) -> None:
    touch(tmp_path, "config.json", "model.safetensors", "consolidated.safetensors", "pytorch_model.bin")
    assert locate(tmp_path).files == (tmp_path / "model.safetensors",)
    touch(tmp_path, "a.gguf")
    assert locate(tmp_path / "a.gguf").format == "gguf"
    unnamed = tmp_path / "blob"
    unnamed.write_bytes(b"GGUF....")
    assert locate(unnamed).format == "gguf"


def test_bytes_of_all_files_that_hold_weights(tmp_path: Path) -> None:
    parts = [f"m[1]-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    touch(tmp_path, *parts, "m[1]-00001-of-00009.txt", "other-00002-of-00003.gguf")
    assert stored_bytes(tmp_path / parts[0]) == 3
    folder = tmp_path / "folder"
    folder.mkdir()
    touch(folder, "config.json", "model.safetensors", "tokenizer.json")
    assert stored_bytes(folder) == 1


def test_directory_with_one_gguf(tmp_path: Path) -> None:
    touch(tmp_path, "a.gguf")
    assert locate(tmp_path).files == (tmp_path / "a.gguf",)
    touch(tmp_path, "b.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files: a\.gguf, b\.gguf"):
        locate(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    touch(tmp_path, "config.json", name)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ModelError, match=f"{name}: pickle files are refused.*safetensors"):
            locate(path)


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ((), "is empty"),
        (("model.safetensors",), r"no config\.json"),
        (("config.json",), r"no \*\.safetensors"),
    ],
)
def test_unusable_directories(tmp_path: Path, names: tuple[str, ...], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        locate(touch(tmp_path, *names))


def test_unusable_paths(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        locate(tmp_path / "nothing")
    with pytest.raises(ModelError, match="neither"):
        locate(touch(tmp_path, "notes.txt") / "notes.txt")


@pytest.mark.parametrize(
    "index",
    ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../other.safetensors"}}'],
)
def test_damaged_index_is_one_error(tmp_path: Path, index: str) -> None:
    touch(tmp_path, "config.json")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(DamagedFile, match=r"index\.json"):
        locate(tmp_path)


def test_index_names_the_shards(tmp_path: Path) -> None:
    touch(tmp_path, "config.json", "s1.safetensors", "s2.safetensors", "other.safetensors")
    index = {"weight_map": {"a": "s2.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in locate(tmp_path).files] == ["s1.safetensors", "s2.safetensors"]


# ── damaged safetensors files ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def tensors_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.ones(10, 10), "b.weight": torch.zeros(20, 10)}, path)
    return path


def test_truncated_file_names_the_tensor(tensors_file: Path) -> None:
    tensors_file.write_bytes(tensors_file.read_bytes()[:-50])
    with pytest.raises(DamagedFile, match=r"model\.safetensors: tensor 'b\.weight' ends at data byte 1200"):
        SafetensorsCheckpoint((tensors_file,))


@pytest.mark.parametrize("length", [0, 4, 8, 20])
def test_file_cut_in_its_header(tensors_file: Path, length: int) -> None:
    tensors_file.write_bytes(tensors_file.read_bytes()[:length])
    with pytest.raises(DamagedFile, match=r"model\.safetensors: its \d+ bytes end inside the header"):
        SafetensorsCheckpoint((tensors_file,))


def test_any_flipped_byte_ends_in_one_of_our_errors(tensors_file: Path) -> None:
    original = tensors_file.read_bytes()
    refused = 0
    for at in range(200):
        data = bytearray(original)
        data[at] ^= 0x5A
        tensors_file.write_bytes(data)
        try:
            checkpoint = SafetensorsCheckpoint((tensors_file,))
            for name in checkpoint.shapes:
                checkpoint.load(name)
        except ModelError:
            refused += 1
    assert refused > 50


def test_tensor_in_two_files(tensors_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"a.weight": torch.ones(1)}, other)
    with pytest.raises(DamagedFile, match=r"'a\.weight' is also in model\.safetensors"):
        SafetensorsCheckpoint((tensors_file, other))


def test_reading_does_not_copy(tensors_file: Path) -> None:
    checkpoint = SafetensorsCheckpoint((tensors_file,))
    raw = checkpoint.load("a.weight")
    assert torch.equal(raw.data, torch.ones(10, 10))
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list memory maps")
    ranges = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in maps.read_text().splitlines()
        if line.endswith(tensors_file.name)
    ]
    assert any(start <= raw.data.data_ptr() < end for start, end in ranges)
