"""What Python hands to the native code is looked at before a pointer is used: wrong arguments give an exception. (What
would happen otherwise is only seen under `make sanitize`; here it would be luck.)"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tokenmill.ops.cpu import is_available
from tokenmill.ops.cpu.availability import native

pytestmark = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])

HIDDEN, VOCAB, HEADS, HEAD_DIM, BLOCK, NUM_BLOCKS, CONTEXT = 32, 40, 2, 16, 16, 4, 64
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1


def matrix(rows: int, cols: int) -> Any:
    return native().pack("F32", rows, cols, np.zeros((rows, 4 * cols), np.uint8))


def linear(rows: int, cols: int) -> Any:
    return native().Linear(matrix(rows, cols), None)


def mlp(hidden: int = HIDDEN) -> Any:
    return native().Mlp(linear(48, hidden), linear(48, hidden), linear(hidden, 48), "silu")


def moe(router_cols: int = HIDDEN, shared: int | None = None, **routing: Any) -> Any:
    chosen = native().Routing(1, **routing)
    return native().Moe(linear(2, router_cols), [mlp(), mlp()], chosen, shared=None if shared is None else mlp(shared))


def layer_input() -> Any:
    norm = native().Norm(np.ones(HIDDEN, np.float32), None)
    return native().LayerInput(linear(8, HIDDEN), linear(HIDDEN, 8), norm, "silu")


def bare_decoder() -> Any:
    return native().Decoder(hidden=HIDDEN, vocab=VOCAB, eps=1e-5, embedding_scale=1.0, logit_softcap=0.0, threads=2)


def add_layer(decoder: Any, **changes: object) -> None:
    width, norm = HEADS * HEAD_DIM, native().Norm(np.ones(HIDDEN, np.float32), None)
    frame: dict[str, object] = {"attn_norm": norm, "mlp_norm": norm, "mlp": mlp(), "moe": None, "input": None}
    frame |= {name: changes.pop(name) for name in list(changes) if name in frame}
    parts: dict[str, object] = {part: linear(width, HIDDEN) for part in "qkv"} | {"o": linear(HIDDEN, width)}
    parts |= {"heads": HEADS, "kv_heads": HEADS, "head_dim": HEAD_DIM, "value_dim": HEAD_DIM, "scale": 1.0}
    decoder.add_layer(native().LayerFrame(HIDDEN, **frame), **(parts | changes))


def bind_cache(decoder: Any, layer: int = 0, num_blocks: int = NUM_BLOCKS, block_size: int = BLOCK) -> None:
    shape = (num_blocks, HEADS, block_size, HEAD_DIM)
    decoder.bind_cache(layer, 0, np.zeros(shape, np.float32), np.zeros(shape, np.float32))


def add_ends(decoder: Any) -> None:
    decoder.set_embedding(linear(VOCAB, HIDDEN))
    decoder.set_head(linear(VOCAB, HIDDEN))
    decoder.set_final_norm(native().Norm(np.ones(HIDDEN, np.float32), None))


def small_decoder() -> Any:
    decoder = bare_decoder()
    add_layer(decoder)
    bind_cache(decoder)
    add_ends(decoder)
    return decoder


def batch_of(counts: list[int], **changes: Any) -> dict[str, Any]:
    """Rows of so many tokens, each with a block of its own."""
    slots = [row * BLOCK + at for row, count in enumerate(counts) for at in range(count)]
    batch: dict[str, Any] = {
        "token_ids": np.zeros(sum(counts), np.int64),
        "positions": np.array([slot % BLOCK for slot in slots], np.int64),
        "query_starts": np.cumsum([0, *counts]).astype(np.int32),
        "context_lens": np.array(counts, np.int32),
        "block_tables": [np.arange(len(counts), dtype=np.int32)[:, None]],
        "slots": [np.array(slots, np.int64)],
        "logit_rows": np.arange(sum(counts)),
    }
    return batch | changes


def forward(decoder: Any, batch: dict[str, Any]) -> None:
    decoder.forward(**batch, hidden=np.empty((len(batch["logit_rows"]), HIDDEN), np.float32))


WRONG_BATCHES: dict[str, dict[str, Any]] = {
    "more is wanted than there is": batch_of([2], logit_rows=np.zeros(1000, np.int64)),
    "a row without tokens, as many tokens as rows": batch_of([0, 2]),
    "a full block and no tokens": batch_of([0, 2], context_lens=np.array([BLOCK, 2], np.int32)),
    "a context whose blocks can't be counted": batch_of([1], context_lens=np.array([INT32_MAX], np.int32)),
    "a negative context": batch_of([1], context_lens=np.array([-5], np.int32)),
    "starts that go back": batch_of([1, 1, 1], query_starts=np.array([0, 2, 1, 3], np.int32)),
    "a token outside": batch_of([1], token_ids=np.array([VOCAB])),
    "a negative token": batch_of([1], token_ids=np.array([-1])),
    "a slot outside": batch_of([1], slots=[np.array([NUM_BLOCKS * BLOCK])]),
    "a negative slot": batch_of([1], slots=[np.array([-1])]),
    "a block outside": batch_of([1], block_tables=[np.array([[NUM_BLOCKS]], np.int32)]),
    "a negative block": batch_of([1], block_tables=[np.array([[-1]], np.int32)]),
    "no tables": batch_of([1], block_tables=[np.zeros((1, 0), np.int32)]),
    "a negative line": batch_of([1], logit_rows=np.array([-1])),
    "positions missing": batch_of([2], positions=np.zeros(1, np.int64)),
    "too many dimensions": batch_of([2], token_ids=np.zeros((2, 1), np.int64)),
}


@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_a_wrong_batch_is_refused(name: str) -> None:
    decoder = small_decoder()
    with pytest.raises((ValueError, TypeError)):
        forward(decoder, WRONG_BATCHES[name])
    forward(decoder, batch_of([2, 1]))
    forward(decoder, batch_of([]))


def test_every_cache_of_a_group_is_looked_at() -> None:
    decoder = small_decoder()
    add_layer(decoder)
    bind_cache(decoder, layer=1, num_blocks=1)
    forward(decoder, batch_of([2]))
    with pytest.raises(ValueError, match="a slot"):
        forward(decoder, batch_of([2, 1]))


def test_what_can_only_be_written_to_a_copy_is_refused() -> None:
    decoder, hidden = small_decoder(), np.zeros((3, HIDDEN), np.float32)
    whole, apart = np.zeros((3, VOCAB)), np.zeros((3, 2 * VOCAB), np.float32)[:, ::2]
    cache = np.zeros((NUM_BLOCKS, HEADS, BLOCK, HEAD_DIM), np.float32)
    apart_cache = np.zeros((NUM_BLOCKS, HEADS, HEAD_DIM, BLOCK), np.float32).transpose(0, 1, 3, 2)
    room = np.zeros(2 * native().packed_bytes("F32", 16, 32), np.uint8)
    calls: list[Callable[[], object]] = [
        lambda: decoder.logits(hidden, whole),
        lambda: decoder.logits(hidden, apart),
        lambda: decoder.best_logits(hidden, np.zeros(3, np.int32), np.zeros(3, np.float32)),
        lambda: decoder.best_logits(hidden, np.zeros(3, np.int64), np.zeros(6, np.float32)[::2]),
        lambda: decoder.forward(**batch_of([3]), hidden=np.zeros((3, HIDDEN))),
        lambda: decoder.logits_next([0], [0], [[0]], [1], np.zeros((1, 1, 1), np.int32), BLOCK, [], [], whole[:1]),
        lambda: native().softmax_rows(np.zeros((3, VOCAB), np.float32), apart),
        lambda: native().embed_rows(matrix(4, 4), np.zeros(1, np.int64), 1.0, np.zeros((1, 4))),
        lambda: native().pack("F32", 16, 32, np.zeros((16, 128), np.uint8), 1, room[::2]),
        lambda: native().Bench(threads=1).linear(matrix(VOCAB, HIDDEN), None, hidden, apart),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="incompatible"):
            call()
    for keys, values in ((apart_cache, cache), (cache, apart_cache)):
        with pytest.raises(ValueError, match="must be contiguous"):
            decoder.bind_cache(0, 0, keys, values)
    cache.flags.writeable = False
    with pytest.raises(TypeError, match="incompatible"):
        decoder.bind_cache(0, 0, cache, cache)


@pytest.mark.parametrize("missing", ["layers", "cache", "ends"])
def test_half_a_decoder_computes_nothing(missing: str) -> None:
    decoder = bare_decoder()
    if missing != "layers":
        add_layer(decoder)
    if missing == "ends":
        bind_cache(decoder)
    else:
        add_ends(decoder)
    for batch in (batch_of([1]), batch_of([])):
        with pytest.raises(ValueError):
            forward(decoder, batch)


def test_logits_need_a_head() -> None:
    hidden, decoder = np.zeros((1, HIDDEN), np.float32), bare_decoder()
    with pytest.raises(ValueError, match="head"):
        decoder.logits(hidden, np.zeros((1, VOCAB), np.float32))
    with pytest.raises(ValueError, match="head"):
        decoder.best_logits(hidden, np.zeros(1, np.int64), np.zeros(1, np.float32))


WRONG_PARTS: dict[str, Callable[[Any], None]] = {
    "a short embedding": lambda d: d.set_embedding(linear(VOCAB - 1, HIDDEN)),
    "a narrow embedding": lambda d: d.set_embedding(linear(VOCAB, HIDDEN - 1)),
    "a long head": lambda d: d.set_head(linear(VOCAB + 1, HIDDEN)),
    "a wide head": lambda d: d.set_head(linear(VOCAB, HIDDEN + 1)),
    "a short norm": lambda d: d.set_final_norm(native().Norm(np.ones(HIDDEN - 1, np.float32), None)),
    "a short norm of a layer": lambda d: add_layer(d, mlp_norm=native().Norm(np.ones(HIDDEN - 1, np.float32), None)),
    "a bias of another size": lambda d: native().Norm(np.ones(HIDDEN, np.float32), np.ones(HIDDEN + 1, np.float32)),
    "a gate of another width": lambda d: add_layer(d, gate=linear(HEADS + 1, HIDDEN), is_gate_per_head=True),
    "keys without values": lambda d: add_layer(d, v=None),
    "norms of heads that are missing": lambda d: add_layer(d, head_norm="head"),
    "embeddings of layers that there are none of": lambda d: add_layer(d, input=layer_input()),
    "groups that experts don't fill": lambda d: add_layer(d, mlp=None, moe=moe(num_groups=3)),
    "a choice bias of other experts": lambda d: add_layer(d, mlp=None, moe=moe(choice_bias=np.ones(3, np.float32))),
    "a wide router": lambda d: add_layer(d, mlp=None, moe=moe(router_cols=2 * HIDDEN)),
    "a wide shared expert": lambda d: add_layer(d, mlp=None, moe=moe(shared=2 * HIDDEN)),
    "more heads than can be counted": lambda d: add_layer(d, heads=2**28 + HEADS, kv_heads=2**28 + HEADS),
    "no such rope": lambda d: add_layer(d, rope=0),
    "blocks of no tokens": lambda d: bind_cache(d, block_size=0),
    "blocks of 17 tokens": lambda d: bind_cache(d, block_size=17),
    "no such layer": lambda d: bind_cache(d, layer=1),
    "a layer before the first": lambda d: bind_cache(d, layer=-1),
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_parts_that_do_not_fit_are_refused(name: str) -> None:
    decoder = small_decoder()
    with pytest.raises((ValueError, IndexError)):
        WRONG_PARTS[name](decoder)
    forward(decoder, batch_of([2, 1]))


def test_a_decoder_keeps_its_cache_alive() -> None:
    decoder = small_decoder()
    keys, values = (np.zeros((NUM_BLOCKS, HEADS, BLOCK, HEAD_DIM), np.float32) for _ in range(2))
    kept = [weakref.ref(keys), weakref.ref(values)]
    decoder.bind_cache(0, 0, keys, values)
    del keys, values
    assert all(array() is not None for array in kept)
    bind_cache(decoder)
    assert all(array() is None for array in kept)


@pytest.mark.parametrize(
    ("starts", "block_size"),
    [([INT64_MAX], BLOCK), ([-1], BLOCK), ([CONTEXT], BLOCK), ([INT32_MAX], INT32_MAX), ([0], 0), ([0], -BLOCK)],
)
def test_rows_past_their_tables_are_refused(starts: list[int], block_size: int) -> None:
    tables = np.zeros((1, 1, CONTEXT // BLOCK), np.int32)
    with pytest.raises(ValueError):
        small_decoder().greedy_next([0], starts, [[0]], [1], tables, block_size)


PARAM_NAMES = {"temperatures": 1.0, "top_ks": 0, "top_ps": 1.0, "min_ps": 0.0, "uniforms": 0.5, "is_greedy": False}


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_ps": 2.0},
        {"min_ps": math.nan},
        {"top_ps": -math.inf},
        {"top_ps": math.nan},
        {"temperatures": -1.0},
        {"temperatures": math.inf},
        {"temperatures": math.nan, "top_ps": 0.9},
        {"uniforms": math.nan},
        {"uniforms": 1e300},
    ],
)
def test_knobs_outside_their_range_are_refused(wrong: dict[str, float]) -> None:
    params = [[value] for value in (PARAM_NAMES | wrong).values()]
    logits = np.arange(20, dtype=np.float32)[None]
    with pytest.raises(ValueError, match="parameter"):
        native().draw_rows(logits, [0], *params)
    with pytest.raises(ValueError, match="parameter"):
        small_decoder().draw_next([0], [0], [[0]], [1], np.zeros((1, 1, 1), np.int32), BLOCK, [], [], *params)


def test_no_logits_give_no_token() -> None:
    assert native().draw_rows(np.zeros((1, 0), np.float32), [0], *[[value] for value in PARAM_NAMES.values()]) == [-1]


@pytest.mark.parametrize("threads", [-1, 0, 1025])
def test_so_many_threads_are_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        native().Bench(threads=threads)
    with pytest.raises(ValueError, match="threads"):
        native().pack("F32", 4096, 64, np.zeros((4096, 256), np.uint8), threads)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as Linux does it")
def test_threads_that_the_system_does_not_give_are_an_error() -> None:
    lines = (
        "import resource, sys",
        "from tokenmill.ops.cpu.availability import native",
        "pages = int(open('/proc/self/statm').read().split()[0])",
        "resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (256 << 20),) * 2)",
        "try: native().Bench(threads=1024)",
        "except RuntimeError: native().Bench(threads=2), sys.exit(7)",
    )
    environment = os.environ | {"LD_PRELOAD": ""}  # a sanitizer would need the memory itself
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False, env=environment).returncode == 7


def test_matrices_of_impossible_sizes_are_refused() -> None:
    for rows, cols in ((INT32_MAX, 32), (0, 32), (-1, 32), (1, 0), (1, -32)):
        with pytest.raises(ValueError, match="matri"):
            native().packed_bytes("Q8_0", rows, cols)


def test_a_bench_is_for_matrices_of_one_shape() -> None:
    bench = native().Bench(threads=1)
    one, other = matrix(16, 32), matrix(16, 64)
    for matrices, rows in (([], 1), ([one], 0), ([one], -1), ([one, other], 1)):
        with pytest.raises(ValueError, match="shape"):
            bench.time_linear(matrices, rows, 2)


def test_more_pieces_than_can_be_counted_are_refused() -> None:
    """Rather than waited for without end."""
    rows = 17 << 20
    with pytest.raises(ValueError, match="pieces"):
        native().pack("F16", rows, 1, np.zeros((rows, 2), np.uint8), 2)


def test_a_second_thread_is_refused() -> None:
    """Each of two threads computes until one of them was told to wait; what the others computed is what it was."""
    decoder, hidden = small_decoder(), np.ones((512, HIDDEN), np.float32)
    refused, wrong = threading.Event(), threading.Event()

    def compute() -> None:
        while not refused.is_set():
            out = np.full((len(hidden), VOCAB), np.nan, np.float32)
            try:
                decoder.logits(hidden, out)
            except RuntimeError as problem:
                assert "one thread at a time" in str(problem)
                refused.set()
            else:
                if out.any():  # the head is zero
                    wrong.set()

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong.is_set()


# ── adapters ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("slot", "site", "a", "b", "gain"),
    [
        (0, 0, (2, 8), (16, 2), None),
        (3, 0, (2, 8), (16, 2), None),
        (1, 5, (2, 8), (16, 2), None),
        (1, -1, (2, 8), (16, 2), None),
        (1, 0, (2, 9), (16, 2), None),
        (1, 0, (2, 8), (15, 2), None),
        (1, 0, (3, 8), (16, 2), None),
        (1, 0, (2, 8), (16, 2), 15),
        (1, 1, (2, 20), (8, 2), None),  # of an embedding, where rows are looked up
        (1, 1, (20, 2), (8, 2), 8),
    ],
)
def test_adapters_that_fit_no_matrix_are_refused(
    slot: int, site: int, a: tuple[int, int], b: tuple[int, int], gain: int | None
) -> None:
    decoder = small_decoder()
    decoder.set_adapter_sites(2, [(16, 8, False), (8, 20, True)])
    gains = None if gain is None else np.zeros(gain, np.float32)
    with pytest.raises((ValueError, IndexError)):
        decoder.set_adapter(slot, [(site, matrix(*a), matrix(*b), gains)])
    decoder.set_adapter(2, [(0, matrix(2, 8), matrix(16, 2), None), (1, matrix(20, 2), matrix(8, 2), None)])


def test_rows_with_adapters_in_no_slot_are_refused() -> None:
    decoder = small_decoder()
    decoder.set_adapter_sites(2, [])
    for slots in ([3], [-1], [1, 1]):
        with pytest.raises(ValueError):
            forward(decoder, batch_of([1], adapters=np.array(slots, np.int32)))
    forward(decoder, batch_of([1], adapters=np.array([2], np.int32)))  # an empty slot adds nothing
