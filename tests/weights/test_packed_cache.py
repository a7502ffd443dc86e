"""Packed weights on disk: the same answers from them, private and bounded files, nothing damaged believed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import tokenmill.weights.packed_file as packed_file
from tokenmill.engine.llm import LLM
from tokenmill.ops.cpu import is_available
from tokenmill.ops.cpu.availability import native
from tokenmill.ops.cpu.packing import aligned_bytes, layout_digest
from tokenmill.params import SamplingParams
from tokenmill.weights import packed_cache, packed_sums
from tokenmill.weights.packed_cache import PackedCache, Source, open_cache, prune, source_of
from tokenmill.weights.packed_file import HEADER_BYTES, PackedFile, PackedWriter, Unusable

needs_kernels = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])

VALUES = np.arange(5000, dtype=np.uint32).view(np.uint8)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights" * 100)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "packed"


def source(checkpoint: Path, layout: str = "a", recipe: str = "b") -> Source:
    return source_of([checkpoint], layout, recipe)


def fill(cache: PackedCache, names: tuple[str, ...] = ("one", "two")) -> None:
    for name in names:
        room = cache.reserve(name, "F32", 50, 100, 1, VALUES.size)
        assert room is not None
        room[:] = VALUES
    thread = cache.finish()
    assert thread is not None
    thread.join()


def written(checkpoint: Path, folder: Path) -> Path:
    fill(open_cache(source(checkpoint), folder))
    (path,) = packed_in(folder)
    return path


def packed_in(folder: Path) -> set[Path]:
    """The packed files, without the digests beside them."""
    return {path for path in folder.iterdir() if path.suffix != ".sums"} if folder.exists() else set()


# ── the file ───────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_written_is_found_again(checkpoint: Path, folder: Path) -> None:
    path = written(checkpoint, folder)
    cache = open_cache(source(checkpoint), folder)
    assert cache.is_hit
    section, found = cache.find("two") or pytest.fail("not found")
    assert (section.kind, section.rows, section.cols, section.count) == ("F32", 50, 100, 1)
    assert np.array_equal(found, VALUES)
    assert not found.flags.writeable and found.ctypes.data % 64 == 0
    assert cache.find("three") is None
    assert cache.reserve("three", "F32", 1, 1, 1, 64) is None  # complete files are never added to
    assert path.stat().st_mode & 0o777 == 0o400 and folder.stat().st_mode & 0o777 == 0o700


def rewrite(path: Path) -> None:
    """Other bytes in the same place, of the same size and age."""
    found = path.stat()
    path.write_bytes(b"WEIGHTS" * 100)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [lambda c: os.utime(c, ns=(1, 1)), lambda c: c.write_bytes(b"other bytes"), rewrite],
    ids=["touched", "rewritten", "rewritten and put back in time"],
)
def test_another_file_is_another_source(checkpoint: Path, folder: Path, change: Callable[[Path], None]) -> None:
    written(checkpoint, folder)
    change(checkpoint)
    assert not open_cache(source(checkpoint), folder).is_hit


def test_the_same_file_elsewhere_is_the_same_source(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    written(checkpoint, folder)
    copied = Path(shutil.copy2(checkpoint, tmp_path / "copied.gguf"))
    moved = checkpoint.rename(tmp_path / "moved.gguf")
    assert open_cache(source(copied), folder).is_hit and open_cache(source(moved), folder).is_hit


@pytest.mark.parametrize("num_bytes", [0, 10, 20_000, 5 << 20, (7 << 30) + 13])
def test_samples_reach_from_the_start_to_the_end(num_bytes: int) -> None:
    taken = packed_cache.samples(num_bytes)
    assert taken[0][0] == 0 and all(0 <= start <= num_bytes for start, _ in taken)
    assert max(start + length for start, length in taken) >= num_bytes
    gaps = [after - before for (before, _), (after, _) in pairwise(taken)]
    assert max(gaps) <= num_bytes / 64 + 1 and sum(length for _, length in taken) <= 2 << 20


def test_packed_weights_are_found_before_they_are_on_the_disk(
    checkpoint: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may end before: the next one finds them and sees to it. A later boot does not believe it."""
    with monkeypatch.context() as killed:
        killed.setattr(packed_cache, "settle", lambda _: None)
        path = written(checkpoint, folder)
    assert path.stat().st_mode & 0o777 == 0o600
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    for other in (boot, tmp_path / "unknown"):
        with monkeypatch.context() as rebooted:
            rebooted.setattr(packed_file, "BOOT_ID", other)
            with pytest.raises(Unusable, match="restarted"):
                PackedFile(path)
    cache = open_cache(source(checkpoint), folder)
    assert cache.is_hit
    (cache.finish() or pytest.fail("nobody sees to it")).join()
    monkeypatch.setattr(packed_file, "BOOT_ID", boot)
    cache = open_cache(source(checkpoint), folder)
    assert cache.is_hit and cache.finish() is None


def test_another_layout_or_recipe_is_another_source(checkpoint: Path, folder: Path) -> None:
    written(checkpoint, folder)
    assert not open_cache(source(checkpoint, layout="other"), folder).is_hit
    assert not open_cache(source(checkpoint, recipe="other"), folder).is_hit
    assert open_cache(source(checkpoint), folder).is_hit


def test_every_damaged_byte_of_header_and_index_is_noticed(checkpoint: Path, folder: Path) -> None:
    path = written(checkpoint, folder)
    path.chmod(0o600)
    whole = path.read_bytes()
    header = len(whole[:HEADER_BYTES].rstrip(b"\0"))
    index = range(HEADER_BYTES + 2 * 20480, len(whole))
    assert len(index) > 20
    for place in (*range(0, header, 7), *index):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with pytest.raises(Unusable):
            PackedFile(path)


@pytest.mark.parametrize("place", [0, 1, 4999, 12_345, 19_999])
@pytest.mark.parametrize("is_rebooted", [False, True])
def test_a_flipped_byte_of_the_weights_is_noticed(
    checkpoint: Path, folder: Path, place: int, is_rebooted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a changed time at once; where the disk itself changed it, by the first start after a boot."""
    path = written(checkpoint, folder)
    before = path.stat()
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + place)
        (byte,) = file.read(1)
        file.seek(HEADER_BYTES + place)
        file.write(bytes([byte ^ 0x10]))
    path.chmod(0o400)
    if is_rebooted:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        (tmp_path / "boot_id").write_text("another\n")
        monkeypatch.setattr(packed_file, "BOOT_ID", tmp_path / "boot_id")
    with pytest.raises(Unusable, match="changed on the disk"):
        PackedFile(path)
    cache = open_cache(source(checkpoint), folder)
    assert not cache.is_hit
    fill(cache)
    assert open_cache(source(checkpoint), folder).is_hit


def test_a_file_is_read_through_once_after_each_boot(
    checkpoint: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(checkpoint, folder)
    num_read = 0

    def counted(path: Path) -> list[str]:
        nonlocal num_read
        num_read += 1
        return packed_sums.digests(path)

    monkeypatch.setattr(packed_file, "digests", counted)
    assert open_cache(source(checkpoint), folder).is_hit and num_read == 0
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr(packed_file, "BOOT_ID", tmp_path / "boot_id")
    for _ in range(3):
        assert open_cache(source(checkpoint), folder).is_hit
    assert num_read == 1


def test_a_file_without_digests_is_not_believed(checkpoint: Path, folder: Path) -> None:
    path = written(checkpoint, folder)
    packed_sums.remove_sums(path)
    assert not open_cache(source(checkpoint), folder).is_hit


@pytest.mark.parametrize("length", [0, 10, 60, 5000, HEADER_BYTES, HEADER_BYTES + 30000, -1])
def test_a_cut_file_is_made_anew(checkpoint: Path, folder: Path, length: int) -> None:
    path = written(checkpoint, folder)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:length])
    cache = open_cache(source(checkpoint), folder)
    assert not cache.is_hit
    fill(cache)
    assert open_cache(source(checkpoint), folder).is_hit


def test_a_file_that_others_may_write_is_not_believed(checkpoint: Path, folder: Path) -> None:
    path = written(checkpoint, folder)
    path.chmod(0o622)
    with pytest.raises(Unusable, match="other users"):
        PackedFile(path)
    path.unlink()
    path.mkdir()
    assert not open_cache(source(checkpoint), folder).is_hit


def test_nothing_is_seen_before_it_is_finished(checkpoint: Path, folder: Path) -> None:
    first = open_cache(source(checkpoint), folder)
    assert first.reserve("one", "F32", 50, 100, 1, VALUES.size) is not None
    second = open_cache(source(checkpoint), folder)  # the same process again: the name aside is taken
    assert not second.is_hit
    assert second.reserve("one", "F32", 50, 100, 1, VALUES.size) is None
    assert [path.suffix for path in folder.iterdir()] == [".tmp"]


def test_a_full_disk_leaves_nothing_behind(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache(source(checkpoint), folder)
    room = cache.reserve("one", "F32", 50, 100, 1, VALUES.size)
    assert room is not None

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert cache.reserve("two", "F32", 50, 100, 1, VALUES.size) is None
    room[:] = VALUES  # what was handed out stays good
    assert np.array_equal(room, VALUES)
    assert cache.finish() is None
    assert list(folder.iterdir()) == []


def test_a_store_that_cannot_be_written_is_no_failure(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where the folder should be")
    cache = open_cache(source(checkpoint), tmp_path / "blocked")
    assert cache.reserve("one", "F32", 50, 100, 1, VALUES.size) is None


# ── what goes ──────────────────────────────────────────────────────────────────────────────────────────


def test_files_of_checkpoints_that_are_gone_go(checkpoint: Path, folder: Path) -> None:
    path = written(checkpoint, folder)
    assert prune(folder) == 0 and path.exists()
    size = path.stat().st_size
    checkpoint.unlink()
    assert prune(folder) == size
    assert list(folder.iterdir()) == []
    assert prune(folder / "none") == 0


def test_the_longest_unused_go_first(tmp_path: Path, folder: Path) -> None:
    paths = []
    for number in range(3):
        checkpoint = tmp_path / f"{number}.gguf"
        checkpoint.write_bytes(b"%d" % number)
        before = packed_in(folder)
        fill(open_cache(source(checkpoint), folder))
        paths += packed_in(folder) - before
    for age, path in zip((30, 10, 20), paths, strict=True):
        os.utime(path, (time.time() - age, time.time() - age))
    assert open_cache(source(tmp_path / "0.gguf"), folder).is_hit  # used just now
    prune(folder, keep_bytes=2 * paths[0].stat().st_size)
    assert [path.exists() for path in paths] == [True, True, False]


def test_unfinished_files_go_when_nobody_can_be_writing_them(checkpoint: Path, folder: Path) -> None:
    folder.mkdir()
    writer = PackedWriter(folder / "name", "source")
    prune(folder)
    (left,) = folder.iterdir()
    os.utime(left, (1, 1))
    prune(folder)
    assert list(folder.iterdir()) == []
    writer.abandon()


# ── with a model ───────────────────────────────────────────────────────────────────────────────────────


@needs_kernels
def test_matrices_keep_their_memory() -> None:
    rows, cols = 33, 64
    packed = aligned_bytes(native().packed_bytes("Q8_0", rows, cols))
    source = np.random.default_rng(0).integers(0, 60, (rows, cols // 32 * 34), np.uint8)
    x = np.ones((1, cols), np.float32)
    results = []
    for matrix in (
        native().pack("Q8_0", rows, cols, source),
        native().pack("Q8_0", rows, cols, source, 1, packed),
        native().matrix_over("Q8_0", rows, cols, packed.copy() if packed.ctypes.data % 64 else packed),
    ):
        results.append(np.empty((1, rows), np.float32))
        native().Bench(1).linear(matrix, None, x, results[-1])
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])
    with pytest.raises(ValueError, match="bytes"):
        native().matrix_over("Q8_0", rows, cols, packed[64:])
    with pytest.raises(ValueError, match="64"):
        native().matrix_over("Q8_0", rows, cols, aligned_bytes(packed.size + 8)[8:])


@needs_kernels
def test_the_layout_digest_is_the_same_in_every_process() -> None:
    code = "from tokenmill.ops.cpu.packing import layout_digest; print(layout_digest())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == layout_digest()


@needs_kernels
def test_a_second_start_answers_the_same_without_packing(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path))
    monkeypatch.setattr(packed_cache, "MIN_SOURCE_BYTES", 0)
    params = SamplingParams(temperature=0.0, max_tokens=8)

    def answer(**settings: object) -> str:
        llm = LLM(smollm2_path, threads=1, max_context=256, **settings)
        return str(llm.generate("The capital of France is", params, progress=False)[0].outputs[0].text)

    expected = answer(packed_cache=False)
    assert not (tmp_path / "packed").exists()
    assert answer() == expected
    monkeypatch.setattr(packed_cache, "_new_file", lambda *_: pytest.fail("packed again"))
    assert answer() == expected
