"""`tokenmill tune` without a GPU: which value is kept, what a row says of itself, and that it is read again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tokenmill.cli import main
from tokenmill.ops.triton import tune
from tokenmill.ops.triton.launch.capabilities import (
    Capabilities,
    Tuning,
    capabilities_of,
    measured_tunings,
    named_gpu,
)

CPU = torch.device("cpu")


def timed(monkeypatch: pytest.MonkeyPatch, cost: dict[str, dict[int, float]]) -> None:
    """A GPU whose times depend on some numbers of the row alone"""

    def milliseconds(run: tune.Run) -> float:
        tuning = capabilities_of(CPU).tuning
        total = 1.0
        for field, times in cost.items():
            total *= times.get(getattr(tuning, field), 1.0)
        return total

    monkeypatch.setattr(tune, "milliseconds", milliseconds)
    properties = SimpleNamespace(name="NVIDIA Something", multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def measured(monkeypatch: pytest.MonkeyPatch, cost: dict[str, dict[int, float]]) -> tuple[Tuning, list[str]]:
    timed(monkeypatch, cost)
    notes: list[str] = []
    some = [
        tune.Tunable("gemm_splitk_max_rows", (8, 16, 64), (lambda: print,)),
        tune.Tunable("gemm_gated_min_rows", (256, 512), (lambda: print,), is_hopper_only=True),
        tune.Tunable("gemm_splitk_programs", (75, 100), (lambda: print,)),
    ]
    monkeypatch.setattr(tune, "tunables", lambda bench, multiprocessors: iter(some))
    return tune.measure(CPU, notes.append), notes


def test_the_fastest_value_is_kept_unless_it_wins_little(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = {"gemm_splitk_max_rows": {16: 0.8, 64: 0.9}, "gemm_splitk_programs": {75: 0.99}}
    row, notes = measured(monkeypatch, cost)
    assert row.gemm_splitk_max_rows == 16 and row.gemm_splitk_programs == 192
    assert row.gemm_gated_min_rows == 768 and "gemm_gated_min_rows" in row.note, "there is no Hopper here"
    assert row.source.startswith("measured on ") and "gemm_splitk_max_rows" not in row.note
    assert len(notes) == 2 and notes[0].startswith("gemm_splitk_max_rows = 16")
    assert capabilities_of(CPU).tuning == named_gpu("H200").tuning, "what was assumed is forgotten"


def test_a_measured_row_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row, _ = measured(monkeypatch, {})
    path = tmp_path / "tuning.toml"
    path.write_text(tune.format_row(row) + "\n" + tune.format_row(named_gpu("A100").tuning))
    assert measured_tunings(path) == (row, named_gpu("A100").tuning)


def test_every_number_is_measured_or_named_as_kept() -> None:
    found = list(tune.tunables(tune.MeasurementInputs(CPU), 132))
    fields = [tunable.field for tunable in found]
    assert len(set(fields)) == len(fields) and set(fields) <= set(Tuning.__struct_fields__)
    left = {"fp8_split_max_rows", "moe_gemv_programs", "attention_fused_min_splits", "table_hopper_max_rows"}
    assert set(Tuning.__struct_fields__[5:]) - set(fields) == left
    h200: Capabilities = named_gpu("H200")
    for tunable in found:
        assert tunable.runs and getattr(h200.tuning, tunable.field) > 0


def test_there_is_nothing_to_measure_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    assert main(["tune"]) == 2
    assert "NVIDIA GPU" in capsys.readouterr().err
