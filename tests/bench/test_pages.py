"""The reports in a real browser, on screens of three widths, light and dark: nothing overlaps, is cut off or missing,
nothing is asked of the network, and the console stays silent."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browser import ReportPage
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.bench.compare import Comparison, compared
from tokenmill.bench.pages import GrowthRow, averaged, html_comparison, html_growth, html_report, html_search
from tokenmill.bench.report import ReportRun
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.search import SearchSettings, Trial, search
from tokenmill.bench.totals import totals
from tokenmill.planner.device import plan_device
from tokenmill.planner.model import PlannedModel
from tokenmill.planner.plan import Question, make_plan
from tokenmill.planner.report import html_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PICTURES = os.environ.get("TOKENMILL_TEST_PICTURES")  # a folder for screenshots, for people to look at
WIDTHS = (1400, 900, 390)
COMMAND = ["bench", "serve", "--url", "http://127.0.0.1:8000", "--concurrency", "16", "--input-len", "128"]


def records(slowness: float = 1.0) -> list[BenchRecord]:
    def record(n: int) -> BenchRecord:
        sent, step = n * 0.05, slowness * (0.01 + 0.0001 * (n % 17))
        times = [sent + slowness * (0.1 + 0.002 * (n % 9)) + k * step for k in range(20)]
        return BenchRecord(sent_s=sent, scheduled_s=sent, times_s=times, end_s=times[-1], status=200, output_tokens=20)

    return [record(n) for n in range(200)]


def run(name: str, slowness: float = 1.0, **settings: Any) -> ReportRun:
    found = records(slowness)
    asked = {
        "model": "smollm2:135m",
        "url": "http://127.0.0.1:8000",
        "input_len": "128",
        "output_len": "64",
        **settings,
    }
    facts = {"settings": asked, "date": "2026-11-16T20:00:00Z", "command": COMMAND, "client": "a machine, Python 3.12"}
    return ReportRun(name, totals(found) | facts, found)


def run_page() -> str:
    return html_report([run("smollm2:135m at http://127.0.0.1:8000", concurrency=16)])


def runs_page() -> str:
    names = ("before <the> change", "after the change", "with a name that is a good deal longer than the others are")
    asked = zip(names, (1, 0.6, 1.7), (8, 8, 16), strict=True)
    return html_report([run(name, slowness, concurrency=clients) for name, slowness, clients in asked])


def search_page() -> str:
    verdict = search(
        lambda x: Trial(x, x <= 37, {"tpot_p95=100ms": x / 370}, "" if x <= 37 else "slow", output_tok_s=x * 9),
        SearchSettings(),
    )
    settings = {"model": "smollm2:135m", "url": "http://127.0.0.1:8000", "slo": "tpot_p95=100ms", "input_len": "128",
                "output_len": "64"}  # fmt: skip
    return html_search(verdict, "concurrency", settings, ["bench", "search", "--slo", "tpot_p95=100ms"])


def plan_page() -> str:
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
              "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192}  # fmt: skip
    model = PlannedModel("meta-llama/Llama-3.1-8B-Instruct", spec_from_hf(config), "bfloat16")
    plans = [make_plan(model, plan_device(name), Question()) for name in ("H100", "L40S", "RTX 4090")]
    return html_page(plans, ["plan", "llama3.1:8b", "--device", "H100,L40S,RTX 4090"])


def engines_page() -> str:
    found: list[Comparison] = compared(
        [
            (name, {"concurrency": c}, {"prefill_tok_s": speed * c * 900.0, "decode_tok_s": speed * c * 70.0})
            for name, speed in (("tokenmill", 1.4), ("llama.cpp", 1.0), ("llama-batched-bench", 1.1))
            for c in (1, 4, 16)
            for _ in range(3)
        ]
    )
    about = [("model", "smollm2-135m-instruct-q4_1.gguf"), ("threads", "2"), ("lengths", "128 tokens in, 32 out")]
    return html_comparison(found, {"llama.cpp": "llama-cpp-python 0.3.36"}, about, ["bench", "compare"])


def growth_page() -> str:
    rows = [GrowthRow(f"decode, {n} sequences", "tok/s", [("2026-11-14", 90.0 * n), ("2026-11-15", 102.5 * n)])
            for n in (1, 4, 16)]  # fmt: skip
    return html_growth([("The same model in three engines", rows)], "python benchmarks/publish_results.py")


PAGES = (run_page, runs_page, search_page, plan_page, engines_page, growth_page)


@pytest.mark.parametrize("make", PAGES)
def test_pages_look_right_on_every_screen(make: Callable[[], str], chromium: Browser, tmp_path: Path) -> None:
    file = tmp_path / f"{make.__name__}.html"
    file.write_text(make(), encoding="utf-8")
    report = ReportPage(chromium, file)
    for scheme in ("light", "dark"):
        for width in WIDTHS:
            assert report.look(width, scheme) == []
            if PICTURES is not None:
                report.page.screenshot(path=f"{PICTURES}/{make.__name__}-{width}-{scheme}.png", full_page=True)
    report.page.close()


def test_a_look_finds_what_is_wrong(chromium: Browser, tmp_path: Path) -> None:
    file = tmp_path / "broken.html"
    drawn = (
        '<svg data-place="wide" width="90" height="40"><text x="5" y="20">one</text><text x="9" y="22">two</text></svg>'
    )
    wide = "<div class='scroll' style='overflow: auto'><div style='width: 2000px'>figures</div></div>"
    file.write_text(f"<figure style='width: 500px'><figcaption>NaN</figcaption>{drawn}</figure>{wide}"
                    "<img src='http://127.0.0.1:9/x.png'>", encoding="utf-8")  # fmt: skip
    report = ReportPage(chromium, file)
    faults = "\n".join(report.look(390, "light"))
    overlap = '"one" and "two" overlap'
    for fault in ("the page is", "no number", overlap, "nothing is drawn", "asks for", "a table is cut"):
        assert fault in faults, fault
    report.page.close()


def test_runs_are_compared_with_the_first_one() -> None:
    page = runs_page()
    assert "▲ −40%" in page and "▼ +70%" in page
    differs = page[page.index("What differs") : page.index("Throughput</h2>")]
    assert "concurrency" in differs and "input_len" not in differs  # what all share is not listed there
    for told in ("smollm2:135m", "128 tokens in, 64 out", "2026-11-16", "tokenmill bench serve"):
        assert told in page, told
    assert "before <the>" not in page


def test_a_number_that_jumps_is_averaged() -> None:
    assert averaged([(1.0, 2), (2.0, 6), (3.0, 0)], num_bins=2) == [(1.5, 2.0), (2.5, 6.0)]
    assert averaged([(0.0, 4), (1.0, 0), (4.0, 0)], num_bins=2) == [(1.0, 2.0), (3.0, 0.0)]
    assert averaged([]) == [] and averaged([(3.0, 1)]) == [(3.0, 1.0)]


def test_a_page_without_the_package_is_refused_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenmill.cli.flags import require_page
    from tokenmill.errors import InvalidConfig

    assert importlib.util.find_spec("vl_convert") is not None
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(InvalidConfig, match=r"tokenmill\[pages\]"):
        require_page(Path("page.html"))
    require_page(None)
