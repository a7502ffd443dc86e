"""The reports in a real browser: plots are drawn and the console stays silent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.browser import look_at
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.bench.report import ReportRun, html_report, html_search
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.search import SearchSettings, Trial, search
from tokenmill.bench.totals import totals
from tokenmill.planner.device import plan_device
from tokenmill.planner.model import PlannedModel
from tokenmill.planner.plan import Question, make_plan
from tokenmill.planner.report import html_page

MIN_PICTURE_BYTES = 20_000  # an empty page of this size compresses to 6 kB


def run_page() -> str:
    def record(n: int) -> BenchRecord:
        sent, step = n * 0.05, 0.01 + 0.0001 * (n % 17)
        times = [sent + 0.1 + 0.002 * (n % 9) + k * step for k in range(20)]
        return BenchRecord(sent_s=sent, scheduled_s=sent, times_s=times, end_s=times[-1], status=200, output_tokens=20)

    records = [record(n) for n in range(200)]
    return html_report([ReportRun(name, totals(records), records) for name in ("first <run>", "second")])


def search_page() -> str:
    verdict = search(
        lambda x: Trial(x, x <= 37, {"tpot_p95=100ms": x / 370}, "" if x <= 37 else "slow"), SearchSettings()
    )
    return html_search(verdict, "concurrency")


def plan_page() -> str:
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
              "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192}  # fmt: skip
    model = PlannedModel("llama", spec_from_hf(config), "bfloat16")
    return html_page([make_plan(model, plan_device(name), Question()) for name in ("H100", "L40S")])


@pytest.mark.parametrize(("make", "plots"), [(run_page, 11), (search_page, 2), (plan_page, 3)])
def test_pages_are_drawn_without_a_word_on_the_console(
    make: Callable[[], str], plots: int, browser: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text(make(), encoding="utf-8")
    picture = look_at(page, plots, browser, tmp_path / "profile")
    (tmp_path / "page.png").write_bytes(picture)
    assert len(picture) > MIN_PICTURE_BYTES
