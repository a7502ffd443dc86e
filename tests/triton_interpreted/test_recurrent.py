"""Recurrent mixers with Triton kernels in the interpreter, against the reference: outputs, cells and states, however
steps cut a sequence; trained models; and the same bits token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.support.paged_run import CPU, PagedRun, shuffled
from tokenmill.arch.read import read_spec
from tokenmill.arch.recurrent import OutputNorm, Recurrent
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.batch import ForwardBatch, GroupTables
from tokenmill.ops.interface import Ops
from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache, RecurrentWeights
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.ops.triton.build import build_ops
from tokenmill.weights.source import open_weights

DELTA = Recurrent("delta", 1, 2, 16, 32, 4, OutputNorm(2, is_shared=True, gates_first=False))
SSD = Recurrent(
    "ssd", 1, 2, 32, 16, 3, OutputNorm(1, is_shared=False, gates_first=True), conv_bias=True, step_limits=(0.01, 0.5),
    gate_scale=0.7, step_scale=1.3, out_scale=0.6,
)  # fmt: skip
MIXERS = {
    "delta": DELTA,
    "ssd": SSD,
    "delta, groups": replace(DELTA, key_heads=2, value_heads=4, norm=OutputNorm(2, is_shared=False, gates_first=True)),
    "delta, tiled": replace(
        DELTA, key_heads=2, value_heads=4, is_tiled=True, norm=OutputNorm(4, is_shared=True, gates_first=False)
    ),
    "ssd without norm": replace(SSD, norm=None, kernel=4),
    "channels": replace(
        DELTA, key_heads=2, has_channel_decays=True, norm=OutputNorm(2, True, gates_first=False, gate="sigmoid")
    ),
}
FAST, DETERMINISTIC = build_ops(), build_ops(deterministic=True)
BLOCK_SIZE, NUM_BLOCKS = 16, 9


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@dataclass
class Sequences:
    """Rows whose projections are given, computed by one table of ops in any cuts."""

    ops: Ops
    args: RecurrentArgs
    cache: RecurrentCache
    cells: torch.Tensor
    states: torch.Tensor
    lengths: list[int]

    @classmethod
    def of(cls, ops: Ops, spec: Recurrent, dtype: torch.dtype, num_rows: int = 2) -> Sequences:
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        weights = RecurrentWeights(
            conv=random(spec.conv_size, spec.kernel),
            conv_bias=random(spec.conv_size) if spec.conv_bias else None,
            rates=-random(spec.value_heads).abs(),
            step_bias=random(spec.num_decays) - 2,
            skip=random(spec.value_heads) if spec.rule == "ssd" else None,
            norm=None if spec.norm is None else random(spec.value_dim if spec.norm.is_shared else spec.values_size),
            eps=1e-6,
        )
        decays = (BLOCK_SIZE, spec.value_heads)
        if spec.has_channel_decays:
            decays = (spec.value_heads, BLOCK_SIZE, spec.key_dim)
        num_cells, num_states = 1 + num_rows * NUM_BLOCKS, 1 + num_rows * NUM_BLOCKS

        def kept(count: int, *shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.full((count, *shape), 7.0, dtype=dtype)

        cache = RecurrentCache(
            kept(num_cells, BLOCK_SIZE, spec.conv_size),
            kept(num_cells, spec.key_heads, BLOCK_SIZE, spec.key_dim),
            kept(num_cells, spec.value_heads, BLOCK_SIZE, spec.value_dim),
            kept(num_cells, *decays, dtype=torch.float32),
            kept(num_states, spec.value_heads, spec.key_dim, spec.value_dim, dtype=torch.float32),
            kept(num_states, spec.kernel - 1, spec.conv_size),
        )
        tables = (shuffled(num_rows, NUM_BLOCKS), shuffled(num_rows, NUM_BLOCKS))
        return cls(ops, RecurrentArgs(spec, weights), cache, *tables, [0] * num_rows)

    def feed(self, projected: dict[int, torch.Tensor]) -> torch.Tensor:
        rows, counts = list(projected), [len(part) for part in projected.values()]
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
        batch = ForwardBatch(
            token_ids=torch.zeros(sum(counts), dtype=torch.int64),
            positions=torch.zeros(sum(counts), dtype=torch.int64),
            query_starts=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            context_lens=torch.tensor([self.lengths[row] for row in rows], dtype=torch.int32),
            groups=tuple(GroupTables(table[rows], table.new_empty(0)) for table in (self.cells, self.states)),
            logit_rows=torch.zeros(0, dtype=torch.int64),
            block_size=BLOCK_SIZE,
            max_query_len=max(counts),
            max_context_len=max(self.lengths),
            num_single=sum(1 for number, count in enumerate(counts) if counts[: number + 1] == [1] * (number + 1)),
        )
        plan = self.ops.plan_recurrent(batch, 0, 1)
        return self.ops.recurrent(torch.cat(list(projected.values())), self.cache, plan, self.args)

    def all_of(self, row: int, projected: torch.Tensor, cuts: list[int]) -> torch.Tensor:
        return torch.cat([self.feed({row: part}) for part in torch.split(projected, cuts)])


def projections(spec: Recurrent, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, spec.projected_size).to(dtype)


def require_same_memory(found: Sequences, expected: Sequences, tolerance: float) -> None:
    """What was never written, null blocks among it, has kept its 7."""
    for name in ("conv_inputs", "keys", "updates", "decays", "states", "tails"):
        ours, theirs = getattr(found.cache, name).float(), getattr(expected.cache, name).float()
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("mixer", "ops"),
    [
        ("delta", FAST),
        ("ssd", FAST),
        ("delta", DETERMINISTIC),
        ("channels", FAST),
        ("delta, tiled", FAST),
        slow("channels", DETERMINISTIC),
        slow("delta, tiled", DETERMINISTIC),
        slow("delta, groups", FAST),
        slow("ssd without norm", FAST),
        slow("delta, groups", DETERMINISTIC),
        slow("ssd", DETERMINISTIC),
        slow("ssd without norm", DETERMINISTIC),
    ],
)
def test_two_rows_in_odd_cuts(mixer: str, ops: Ops) -> None:
    """A row decodes while the other one's prompt is read; states are written at 64, within a step and at its end."""
    spec = MIXERS[mixer]
    prompt, other = projections(spec, 68, torch.float32), projections(spec, 5, torch.float32)
    runs = [Sequences.of(REFERENCE_OPS, spec, torch.float32) for _ in range(2)]
    found = []
    for run, each in zip(runs, (ops, REFERENCE_OPS), strict=True):
        run.cells[0, 0] = 0  # nobody reads the first block of cells later: it is not kept
        run.feed({0: prompt[:56]})
        run.ops = each
        parts = [run.feed({1: other[:2], 0: prompt[56:60]}), run.feed({1: other[2:3], 0: prompt[60:63]})]
        parts += [run.feed({1: other[3:4], 0: prompt[63:64]}), run.feed({0: prompt[64:67], 1: other[4:]})]
        found.append(torch.cat([*parts, run.feed({0: prompt[67:]})]))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    require_same_memory(*runs, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["delta", "ssd", "channels"])
def test_states_within_a_step(mixer: str) -> None:
    """A prompt over two chunks in one step, and one that ends with its chunk; in float16, since the interpreter does
    not multiply matrices of bfloat16"""
    spec = MIXERS[mixer]
    prompts = [projections(spec, count, torch.float16) for count in (130, 64)]
    runs = [Sequences.of(each, spec, torch.float16) for each in (FAST, REFERENCE_OPS)]
    found = [run.feed(dict(enumerate(prompts))).float() for run in runs]
    torch.testing.assert_close(*found, atol=0.03, rtol=0.03)
    require_same_memory(*runs, 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_same_bits_in_any_cuts(mixer: str, dtype: torch.dtype) -> None:
    spec = MIXERS[mixer]
    prompt = projections(spec, 80, dtype)
    runs = [Sequences.of(DETERMINISTIC, spec, dtype, num_rows=1) for _ in range(3)]
    whole, *others = (
        run.all_of(0, prompt, cuts) for run, cuts in zip(runs, ([80], [1] * 80, [50, 13, 1, 1, 15]), strict=True)
    )
    for other, run in zip(others, runs[1:], strict=True):
        assert torch.equal(other, whole)
        assert torch.equal(run.cache.states, runs[0].cache.states)


# ── models ─────────────────────────────────────────────────────────────────────────────────────────────

TOKENS = [1, *torch.randint(3, 512, (69,), generator=torch.Generator().manual_seed(3)).tolist()]
TRAINED = ("qwen3_5", "qwen3_next", "qwen3_5_moe", "granitemoehybrid", "kimi_linear")


def logits(folder: Path, ops: Ops, num_tokens: int) -> torch.Tensor:
    spec, tokens = read_spec(folder), TOKENS[:num_tokens]
    model = Decoder(spec, Loader(open_weights(folder, spec), ops, torch.float32, CPU))
    run = PagedRun(model, num_rows=1, max_len=80, block_size=16)
    return torch.cat([run.feed({0: part}) for part in (tokens[:-5], tokens[-5:-1], tokens[-1:])])


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("num_tokens", [67, 70])
def test_logits_of_a_trained_model_are_the_references(name: str, num_tokens: int, shared_dir: Path) -> None:
    folder = shared_dir / "goldens" / "tiny" / name
    found, expected = (logits(folder, ops, num_tokens) for ops in (FAST, REFERENCE_OPS))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
