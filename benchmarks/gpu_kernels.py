"""Times the attention kernels of one layer of Llama-3.1-8B, variant by variant, against cuDNN and the memory's speed.
Products are timed as parts of a step: see `gpu_steps.py`.

python benchmarks/gpu_kernels.py [decode] [chunk] [short_chunk]
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
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
from tokenmill.ops.triton.attention.split_prefill import split_prefill_attention

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


CHUNK_CONFIGS = (
    *itertools.starmap(PrefillConfig, itertools.product((64,), (64,), (4,), (2, 3, 4))),
    *itertools.starmap(PrefillConfig, itertools.product((64,), (128,), (4,), (2, 3))),
    *itertools.starmap(PrefillConfig, itertools.product((128,), (64, 128), (8,), (2, 3))),
    PrefillConfig(128, 64, 8, 4),
    PrefillConfig(128, 64, 4, 3),
)


def bench_short_chunk() -> None:
    """A chunk of a prompt over what is computed of it, as beside running answers: whole contexts and split ones."""
    args = AttentionArgs(DIM**-0.5)
    for context, length in itertools.product((8192, 65536), (8, 16, 32, 64, 128, 256, 384, 512, 768)):
        caches, tables, contexts = paged(1, context, 4)
        q = torch.randn(length, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        starts = torch.tensor([0, length], device="cuda", dtype=torch.int32)
        outs = [torch.full_like(q, float("nan")) for _ in range(2)]
        flops = 4 * length * context * HEADS * DIM
        common = (tables, starts, contexts, range(1), length, args)

        def whole(q=q, caches=caches, common=common, out=outs[0]) -> None:  # type: ignore[no-untyped-def]
            for cache in caches:
                prefill_attention(q, cache, *common, out, are_short=True)

        found = [(graph_ms(whole) / len(caches), "prefill")]
        for config, splits in itertools.product(CHUNK_CONFIGS, (2, 3, 4, 6, 8, 16, 32, 64)):
            if context // splits < 512 or not 128 <= splits * length * GROUP // 64 * KV_HEADS <= 4096:
                continue

            def work(c=config, s=splits, q=q, caches=caches, common=common, out=outs[1]) -> None:  # type: ignore[no-untyped-def]
                for cache in caches:
                    split_prefill_attention(q, cache, *common, out, s, config=c)

            work()
            error = float((outs[0].float() - outs[1].float()).norm() / outs[0].float().norm())
            assert error < 1e-2, f"error {error}"
            found.append((graph_ms(work) / len(caches), f"{tuple(config)} in {splits}"))
        usual = [one for one in found if one[1].startswith(str(tuple(CHUNK_CONFIGS[0])))]
        print(f"context {context} chunk {length}:", flush=True)
        for ms, what in (*sorted(found)[:7], *sorted(usual)[:2], found[0]):
            print(f"     {ms * 1e3:.0f} us  {flops / ms / 1e9:.0f} TFLOP/s  {what}", flush=True)


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
