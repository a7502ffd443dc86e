"""Times the attention kernels of one layer of Llama-3.1-8B, variant by variant, against cuDNN and the memory's speed.
Products are timed as parts of a step: see `gpu_steps.py`.

python benchmarks/gpu_kernels.py [decode] [chunk] [short_chunk]
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.triton.attention.decode import decode_attention
from tokenmill.ops.triton.attention.prefill import PrefillConfig, prefill_attention
from tokenmill.ops.triton.attention.split_prefill import room_for_parts, split_prefill_attention
from tokenmill.runner.mixed_sizes import MAX_PROMPTS

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
GROUP = HEADS // KV_HEADS


def graph_ms(work: Callable[[], object], repeats: int = 5) -> float:
    """Median time of one replay of `work` captured as a graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def paged(num_rows: int, context: int, layers: int) -> tuple[list[LayerCache], torch.Tensor, torch.Tensor]:
    per_row = -(-context // BLOCK)
    num_blocks = num_rows * per_row + 1
    storage = torch.randn(2, layers, num_blocks, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
    tables = (torch.randperm(num_blocks - 1, device="cuda")[: num_rows * per_row] + 1).int().view(num_rows, per_row)
    contexts = torch.full((num_rows,), context, device="cuda", dtype=torch.int32)
    return [LayerCache(storage[0, i], storage[1, i]) for i in range(layers)], tables, contexts


def dense_of(cache: torch.Tensor, table: torch.Tensor, context: int) -> torch.Tensor:
    """[kv_heads, context, D]"""
    return cache[table.long()].permute(1, 0, 2, 3).reshape(KV_HEADS, -1, DIM)[:, :context]


def decode_variants() -> Iterator[tuple[int, int, int, int]]:
    yield from itertools.product((64, 128), (1024, 2048), (4,), (2, 3))
    yield from ((32, 1024, 4, 3), (64, 1024, 2, 3), (64, 1024, 8, 3), (64, 512, 4, 3), (64, 1024, 4, 4))


def bench_decode() -> None:
    args = AttentionArgs(DIM**-0.5)
    for num_rows, context in ((1, 512), (8, 512), (32, 512), (128, 512), (512, 640)):
        layers = 32 if num_rows < 256 else 8
        caches, tables, contexts = paged(num_rows, context, layers)
        q = torch.randn(num_rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        out = torch.full_like(q, float("nan"))
        keys, values = (dense_of(part, tables[0], context) for part in (caches[0].keys, caches[0].values))
        expected = functional.scaled_dot_product_attention(
            q[0].float().unsqueeze(1), keys.float().repeat_interleave(4, 0), values.float().repeat_interleave(4, 0)
        )
        floor = layers * num_rows * context * KV_HEADS * DIM * 4 / 4.38e9
        found = []
        for tile, programs, warps, stages in decode_variants():
            splits = max(1, min(programs // (num_rows * KV_HEADS), 64, triton.cdiv(context, tile)))

            def work(t=tile, s=splits, w=warps, g=stages, o=out, q=q, c=caches, tb=tables, cx=contexts) -> None:  # type: ignore[no-untyped-def]
                for cache in c:
                    decode_attention(q, cache, tb, cx, args, o, s, tile=t, warps=w, stages=g)

            try:
                decode_attention(
                    q, caches[0], tables, contexts, args, out, splits, tile=tile, warps=warps, stages=stages
                )
                error = float((out[0].float() - expected.squeeze(1)).norm() / expected.norm())
                assert error < 1e-2, f"error {error}"
                found.append((graph_ms(work), f"tile {tile} splits {splits} warps {warps} stages {stages}"))
            except Exception as problem:
                print("failed", tile, programs, warps, stages, str(problem)[:80])
        print(f"decode rows {num_rows} context {context}: floor {floor:.3f} ms for {layers} layers", flush=True)
        for ms, what in sorted(found)[:5]:
            print(f"     {ms:.3f} ms   {what}", flush=True)
        del caches


def bench_chunk() -> None:
    args = AttentionArgs(DIM**-0.5)
    for num_rows, length in ((2, 4096), (16, 512)):
        caches, tables, contexts = paged(num_rows, length, 4)
        q = torch.randn(num_rows * length, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        starts = torch.arange(num_rows + 1, device="cuda", dtype=torch.int32) * length
        out = torch.full_like(q, float("nan"))
        k, v = (
            torch.stack([dense_of(part, table, length) for table in tables])
            for part in (caches[0].keys, caches[0].values)
        )
        batched = q.view(num_rows, length, HEADS, DIM).transpose(1, 2)
        expected = functional.scaled_dot_product_attention(batched, k, v, is_causal=True, enable_gqa=True)
        expected = expected.transpose(1, 2).reshape_as(q)
        flops = 2 * num_rows * length * length * HEADS * DIM
        found = []
        for queries, tile, warps, stages in (
            *itertools.product((128,), (64, 128), (8,), (2, 3)),
            (128, 32, 8, 3),
            (128, 64, 4, 3),
            (64, 64, 4, 2),
            (64, 64, 4, 3),
            (128, 32, 4, 3),
        ):

            def work(
                m=queries, t=tile, w=warps, g=stages, c=caches, q=q, o=out, tb=tables, s=starts, cx=contexts
            ) -> None:  # type: ignore[no-untyped-def]
                for cache in c:
                    prefill_attention(
                        q, cache, tb, s, cx, range(len(cx)), len(q), args, o, config=PrefillConfig(m, t, w, g)
                    )

            try:
                work()
                prefill_attention(
                    q,
                    caches[0],
                    tables,
                    starts,
                    contexts,
                    range(num_rows),
                    len(q),
                    args,
                    out,
                    config=PrefillConfig(queries, tile, warps, stages),
                )
                error = float((out.float() - expected.float()).norm() / expected.float().norm())
                assert error < 1e-2, f"error {error}"
                found.append(
                    (graph_ms(work) / len(caches), f"queries {queries} tile {tile} warps {warps} stages {stages}")
                )
            except Exception as problem:
                print("failed", queries, tile, warps, stages, str(problem)[:80])
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    ms = graph_ms(
                        lambda b=batched, k=k, v=v: functional.scaled_dot_product_attention(
                            b, k, v, is_causal=True, enable_gqa=True
                        )
                    )
                found.append((ms, str(backend)))
            except Exception as problem:
                print("failed", backend, str(problem)[:80])
        try:
            from torch.nn.attention.varlen import varlen_attn

            kk, vv = (part.transpose(1, 2).reshape(-1, KV_HEADS, DIM).repeat_interleave(4, 1) for part in (k, v))
            ms = graph_ms(
                lambda q=q, kk=kk, vv=vv, s=starts, n=length: varlen_attn(q, kk, vv, s, s, n, n, is_causal=True)
            )
            found.append((ms, "varlen_attn"))
        except Exception as problem:
            print("failed varlen", str(problem)[:200])
        print(f"chunk rows {num_rows} length {length}", flush=True)
        for ms, what in sorted(found)[:8]:
            print(f"     {ms:.3f} ms  {flops / ms / 1e9:.0f} TFLOP/s  {what}", flush=True)


# Tiles of queries of all heads of a KV head × keys, warps, stages.
CHUNK_CONFIGS = (
    *(PrefillConfig(64, 64, 4, stages) for stages in (2, 3, 4)),
    *(PrefillConfig(64, 32, 4, stages) for stages in (3, 4, 6)),
    PrefillConfig(64, 128, 4, 2),
    *(PrefillConfig(128, 64, 8, stages) for stages in (2, 3, 4)),
    *(PrefillConfig(128, 32, 8, stages) for stages in (4, 6)),
    PrefillConfig(128, 128, 8, 2),
)
CHUNK_CASES = (
    *itertools.product((16384, 65536), (16, 32, 64)),
    *itertools.product((65536,), (128, 384)),
)  # tokens before the chunk, and of it
CHUNK_SPLITS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
BESIDE_ROWS, BESIDE_CONTEXT = 32, 2304  # decoding rows that a chunk is computed beside
CHUNK_LAYERS = 4


class ChunkCase:
    """A chunk of a prompt over what is computed of it: alone, and as in a step with decoding rows."""

    def __init__(self, context: int, length: int) -> None:
        self.length, self.flops = length, 4 * length * context * HEADS * DIM
        each = BESIDE_CONTEXT // BLOCK
        num_blocks = BESIDE_ROWS * each + context // BLOCK + 1
        storage = torch.randn(2, CHUNK_LAYERS, num_blocks, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
        self.caches = [LayerCache(storage[0, i], storage[1, i]) for i in range(CHUNK_LAYERS)]
        blocks = (torch.randperm(num_blocks - 1, device="cuda") + 1).int()
        self.tables = torch.zeros(BESIDE_ROWS + MAX_PROMPTS, context // BLOCK, device="cuda", dtype=torch.int32)
        self.tables[:BESIDE_ROWS, :each] = blocks[: BESIDE_ROWS * each].view(BESIDE_ROWS, each)
        self.tables[BESIDE_ROWS] = blocks[BESIDE_ROWS * each :]
        contexts = [BESIDE_CONTEXT] * BESIDE_ROWS + [context] + [0] * (MAX_PROMPTS - 1)
        self.contexts = torch.tensor(contexts, device="cuda", dtype=torch.int32)
        starts = [*range(BESIDE_ROWS + 1), *[BESIDE_ROWS + length] * MAX_PROMPTS]
        self.starts = torch.tensor(starts, device="cuda", dtype=torch.int32)
        self.queries = torch.randn(BESIDE_ROWS + length, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.out = torch.full_like(self.queries, float("nan"))

    def whole(self) -> None:
        """Attend with one program per tile of queries."""
        for cache in self.caches:
            prefill_attention(self.queries, cache, *self._chunk, are_short=True)

    def split(self, config: PrefillConfig, splits: int) -> None:
        for cache in self.caches:
            split_prefill_attention(self.queries, cache, *self._chunk, splits, config=config)

    def decode(self, *, lets_begin: bool = False) -> None:
        for cache in self.caches:
            self._decode(cache, lets_begin=lets_begin)

    def beside(self, config: PrefillConfig, splits: int) -> None:
        for cache in self.caches:
            room = room_for_parts(self.queries, self.length, splits)
            self._decode(cache, lets_begin=True)
            split_prefill_attention(self.queries, cache, *self._chunk, splits, room=room, is_beside=True, config=config)

    def chunk_result(self) -> torch.Tensor:
        return self.out[BESIDE_ROWS:].float()

    @property
    def _chunk(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, range, int, AttentionArgs, torch.Tensor]:
        rows = range(BESIDE_ROWS, BESIDE_ROWS + MAX_PROMPTS)  # as in a captured step, most without tokens
        return self.tables, self.starts, self.contexts, rows, self.length, AttentionArgs(DIM**-0.5), self.out

    def _decode(self, cache: LayerCache, *, lets_begin: bool) -> None:
        single, out, args = self.queries[:BESIDE_ROWS], self.out[:BESIDE_ROWS], AttentionArgs(DIM**-0.5)
        decode_attention(single, cache, self.tables, self.contexts, args, out, 1, lets_begin=lets_begin)


def bench_short_chunk() -> None:
    """A chunk of a prompt over what is computed of it: whole contexts and split ones, by tiles and number of splits;
    and what the chunk adds to the attention of decoding rows."""
    for context, length in CHUNK_CASES:
        case = ChunkCase(context, length)
        whole_ms, decode_ms = (graph_ms(work) / CHUNK_LAYERS for work in (case.whole, case.decode))
        case.whole()
        expected = case.chunk_result()
        found: list[tuple[float, float, str]] = []
        for config in CHUNK_CONFIGS:
            tiles = -(-length * GROUP // config.queries) * KV_HEADS
            timed: list[tuple[float, int]] = []
            for splits in CHUNK_SPLITS:
                if context // splits < 512 or not 100 <= splits * tiles <= 1100:
                    continue
                case.out.fill_(float("nan"))
                case.split(config, splits)
                error = float((case.chunk_result() - expected).norm() / expected.norm())
                assert error < 1e-2, f"error {error} of {config} in {splits}"
                timed.append((graph_ms(partial(case.split, config, splits)) / CHUNK_LAYERS, splits))
            for ms, splits in sorted(timed)[:2]:
                beside_ms = graph_ms(partial(case.beside, config, splits)) / CHUNK_LAYERS
                found.append((beside_ms - decode_ms, ms, f"{tuple(config)} in {splits}"))
        floor_ms = context * KV_HEADS * DIM * 4 / 4.38e9
        print(
            f"chunk {length} behind {context}: reading {floor_ms * 1e3:.0f} us, one program per tile"
            f" {whole_ms * 1e3:.0f} us; {BESIDE_ROWS} rows of {BESIDE_CONTEXT} decode in {decode_ms * 1e3:.0f} us",
            flush=True,
        )
        for beside_ms, ms, what in sorted(found):
            print(
                f"     beside them +{beside_ms * 1e3:.0f} us, alone {ms * 1e3:.0f} us"
                f" ({case.flops / ms / 1e9:.0f} TFLOP/s)  {what}",
                flush=True,
            )


def main() -> None:
    wanted = sys.argv[1:] or ["decode", "chunk", "short_chunk"]
    print(torch.__version__, triton.__version__, torch.cuda.get_device_name())
    for name in wanted:
        began = time.perf_counter()
        {"decode": bench_decode, "chunk": bench_chunk, "short_chunk": bench_short_chunk}[name]()
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
