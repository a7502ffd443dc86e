"""Bytes that a rank has read from the disk: those of its own rows, however far the system reads ahead for others."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.gguf_families import VOCABULARY
from tests.support.tiny_models import make_reference
from tokenmill.arch.read import read_spec
from tokenmill.config.by_name import engine_config
from tokenmill.engine.rank_part import load_part
from tokenmill.engine.resolve import resolve_model_config
from tokenmill.ops.cpu import is_available
from tokenmill.parallel.shared import SharedGroup
from tokenmill.weights.dummy import dummy_weights
from tokenmill.weights.gguf_write import write_gguf

pytestmark = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
SIZE = 4
MAX_EXCESS = 1.15
SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 64, "num_experts": 4, "moe_intermediate_size": 512,
    "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    make_reference("qwen3_moe", **SIZES).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gguf(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, spec = tmp_path_factory.mktemp("quantised") / "model.gguf", read_spec(checkpoint)
    write_gguf(path, spec, dummy_weights(spec, quant="Q8_0"), VOCABULARY, "Q8_0")
    return path


def read_so_far() -> int:
    """Bytes that this process has had read from disks, by reads and by what it touched of mapped files."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["read_bytes"])


def forget(path: Path) -> None:
    """Let the system keep nothing of a file in memory; skip the test where its disk is memory."""
    gc.collect()  # what is mapped stays
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
            if any(pages_in_memory(data)):
                pytest.skip("this system keeps files in memory")


def pages_in_memory(data: mmap.mmap) -> list[bool]:
    pages = (ctypes.c_ubyte * -(-len(data) // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    assert libc.mincore(ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data), pages) == 0
    return [bool(page & 1) for page in pages]


def read_by_ranks(model: Path, file: Path, **settings: Any) -> list[int]:
    """Bytes that each rank has read of a model's file when it has loaded its part."""
    spec = read_spec(model)
    asked = engine_config(model, {"threads": 1, "num_blocks": 20, "max_context": 64, "tp": SIZE, **settings})
    config = resolve_model_config(asked, spec, model).config
    found = []
    for group in SharedGroup.in_threads(SIZE):
        forget(file)
        before = read_so_far()
        load_part(config, spec, model, group.rank, group, None)
        found.append(read_so_far() - before)
    return found


@pytest.mark.parametrize("ep", [False, True])
def test_ranks_read_their_share_of_a_quantised_file(gguf: Path, ep: bool) -> None:
    read = read_by_ranks(gguf, gguf, ep=ep)
    assert max(read) <= MAX_EXCESS * gguf.stat().st_size / SIZE
    assert sum(read) >= gguf.stat().st_size * 0.99  # it was read from the disk


def test_ranks_read_their_share_of_a_plain_file(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    read = read_by_ranks(checkpoint, file)
    assert max(read) <= MAX_EXCESS * file.stat().st_size / SIZE
    assert sum(read) >= file.stat().st_size * 0.99
