"""Recurrent mixers with Triton kernels in the interpreter, against the reference: outputs, cells and states, however
steps cut a sequence; trained models; and the same bits token by token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.paged_run import CPU, PagedRun
from tests.support.recurrent_rows import Sequences, projections, require_same_memory
from tokenmill.arch.read import read_spec
from tokenmill.arch.recurrent import OutputNorm, Recurrent
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.interface import Ops
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


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


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
