"""The GGUF header reader against the gguf package, and against damage."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tokenmill.arch import gguf_file
from tokenmill.arch.gguf_file import GGML_TYPES, _read, read_gguf
from tokenmill.errors import DamagedFile, UnsupportedModel


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.eps", 0.5)
    writer.add_bool("flag", True)
    writer.add_array("tokens", ["a", "ä", "", "long token"])
    writer.add_array("scores", [0.0, -1.5, 3.25])
    writer.add_array("ids", [1, -2, 3])
    writer.add_array("flags", [True, False])
    rng = np.random.default_rng(0)
    writer.add_tensor("x.weight", rng.standard_normal((3, 64), dtype=np.float32))
    blocks = gguf.quants.quantize(rng.standard_normal((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("y.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_types_are_the_format_s_own() -> None:
    theirs = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    ours = {number: (kind.name, kind.block_size, kind.block_bytes) for number, kind in GGML_TYPES.items()}
    assert {number: theirs[number] for number in ours} == ours


def test_reads_what_was_written(small_file: Path) -> None:
    file = read_gguf(small_file)
    expected: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.eps": 0.5,
        "flag": True,
        "tokens": ["a", "ä", "", "long token"],
        "scores": [0.0, -1.5, 3.25],
        "ids": [1, -2, 3],
        "flags": [True, False],
    }
    assert {key: file.metadata[key] for key in expected} == expected
    assert file.tensors["x.weight"].shape == (3, 64)
    assert (file.tensors["y.weight"].type, file.tensors["y.weight"].num_bytes) == ("Q8_0", 4 * 2 * 34)


def test_agrees_with_the_gguf_package(smollm2_path: Path) -> None:
    ours, theirs = read_gguf(smollm2_path), gguf.GGUFReader(smollm2_path)
    found = {
        t.name: (t.tensor_type.name, tuple(int(n) for n in t.shape[::-1]), t.data_offset, t.n_bytes)
        for t in theirs.tensors
    }
    assert {t.name: (t.type, t.shape, t.offset, t.num_bytes) for t in ours.tensors.values()} == found
    for key in ("llama.block_count", "tokenizer.ggml.model", "tokenizer.chat_template", "llama.rope.freq_base"):
        assert ours.metadata[key] == theirs.fields[key].contents()
    assert ours.metadata["tokenizer.ggml.tokens"] == theirs.fields["tokenizer.ggml.tokens"].contents()


def test_large_vocabulary_reads_fast(smollm2_path: Path) -> None:
    _read.cache_clear()  # whoever read it before has left it there
    begin = time.process_time()
    read_gguf(smollm2_path)
    assert time.process_time() - begin < 1.0


@pytest.mark.parametrize("length", [0, 3, 4, 7, 8, 16, 24, 40, 100, 300])
def test_truncation_is_named(small_file: Path, tmp_path: Path, length: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small_file.read_bytes()[:length])
    with pytest.raises(DamagedFile, match=r"cut\.gguf"):
        read_gguf(cut)


def test_missing_data_names_the_tensor(small_file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small_file.read_bytes()[:-100])
    with pytest.raises(DamagedFile, match=r"y\.weight.*beyond"):
        read_gguf(cut)


def test_absent_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match="cannot be read"):
        read_gguf(tmp_path / "nothing.gguf")


@pytest.mark.parametrize(
    ("at", "replacement", "match"),
    [
        (0, b"GGML", "magic"),
        (4, b"\x01\0\0\0", "version 1"),
        (4, b"\0\0\0\x03", "big-endian"),
        (8, b"\xff" * 8, "tensors"),
    ],
)
def test_wrong_header_is_refused(small_file: Path, tmp_path: Path, at: int, replacement: bytes, match: str) -> None:
    data = bytearray(small_file.read_bytes())
    data[at : at + len(replacement)] = replacement
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises((DamagedFile, UnsupportedModel), match=match):
        read_gguf(bad)


def test_any_damage_ends_in_one_of_our_errors(small_file: Path, tmp_path: Path) -> None:
    original, rng, bad = small_file.read_bytes(), random.Random(7), tmp_path / "bad.gguf"
    outcomes: dict[str, int] = {"read": 0, "refused": 0}
    for _ in range(1500):
        data = bytearray(original)
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(len(data))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data))]
        bad.write_bytes(data)
        try:
            read_gguf(bad)
            outcomes["read"] += 1
        except (DamagedFile, UnsupportedModel):
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 100, outcomes


def test_an_array_beyond_all_vocabularies_is_refused(small_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_ARRAY_VALUES", 3)
    with pytest.raises(UnsupportedModel, match="'tokens' has 4 values"):
        read_gguf(small_file)
