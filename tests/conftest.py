"""Options, real data, the tests that need processes of their own, and skips that CI does not accept.

Fixtures of real data skip with a reason where it is absent.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.internal.conjecture import providers as hypothesis_providers

from tests.support.real_models import fetched_model
from tests.support.server_process import is_failed_step
from tokenmill.observe.log import LIBRARIES
from tokenmill.weights import packed_cache

SHARED = Path(__file__).resolve().parents[2] / "shared"
INTERPRETED = Path(__file__).resolve().parent / "triton_interpreted"
LONG_FILES = Path(__file__).resolve().with_name("long_files.txt")
MAY_BE_MISSING_IN_CI = re.compile(
    r"folder \.\./shared is not here|Chromium|does not start here|Linux|root|mount is not permitted|two cores"
    r"|source of models|package index"
)
"""Reasons to skip that lie in the machine. Any other one in CI means that the set-up is broken: it fails there."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native", type=Path, help="compiled kernels to be tested instead of those that are installed")


def pytest_configure(config: pytest.Config) -> None:
    _choose_examples()
    path: Path | None = config.getoption("native")
    if path is not None:
        spec = spec_from_file_location("tokenmill.ops.cpu._native", path)
        assert spec is not None and spec.loader is not None
        sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    _choose_interpreter(config)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start
    use_one_torch_thread()


def use_one_torch_thread() -> None:
    """Let torch compute with one thread: several test processes whose threads wait for each other by spinning take ten
    times as long, and sums may depend on the number of threads. Engines set their own number."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def _choose_examples() -> None:
    """Let property tests try the same examples in every run; `HYPOTHESIS_PROFILE=random` looks for new ones.

    Hypothesis also takes constants from the modules that a process happens to have loaded, which depends on how tests
    are spread over processes: in a run that repeats, there are none.
    """
    patient: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # of a busy machine
    hypothesis_settings.register_profile("repeatable", derandomize=True, database=None, **patient)
    hypothesis_settings.register_profile("random", derandomize=False, **patient)
    profile = os.environ.get("HYPOTHESIS_PROFILE", "repeatable")
    hypothesis_settings.load_profile(profile)
    if profile == "repeatable" and hasattr(hypothesis_providers, "is_local_module_file"):
        hypothesis_providers.is_local_module_file = lambda path: False


def _choose_interpreter(config: pytest.Config) -> None:
    """Turn Triton's interpreter on if only its tests run: a process chooses once, when kernels are defined."""
    folder = config.invocation_params.dir
    chosen = [(folder / arg.split("::")[0]).resolve().is_relative_to(INTERPRETED) for arg in config.args]
    if all(chosen):
        os.environ["TRITON_INTERPRET"] = os.environ["OMP_NUM_THREADS"] = "1"
    elif any(chosen):
        raise pytest.UsageError(f"{INTERPRETED.name} needs a run of its own: pytest tests/{INTERPRETED.name}")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_left_out = not _is_interpreting() or find_spec("triton") is None
    return True if collection_path == INTERPRETED and is_left_out else None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Without Triton (it is made for Linux) there is nothing to interpret, which is no failure."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and _is_interpreting() and find_spec("triton") is None:
        session.exitstatus = pytest.ExitCode.OK


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the files that take longest first, then those with most tests. Workers get one file after another: a long one
    at the end would keep one of them busy alone."""
    lines = LONG_FILES.read_text(encoding="utf-8").splitlines()
    places = {config.rootpath / line.split()[-1]: place for place, line in enumerate(lines)}
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (places.get(item.path, len(places)), -sizes[item.path]))


def _is_interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.args == config.getini("testpaths") and find_spec("triton") is not None:
        terminalreporter.write_line(f"left out, for a run of its own: pytest tests/{INTERPRETED.name}")


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a failure of a skip that must not happen in CI; an expected failure (xfail) is none."""
    if os.environ.get("CI") != "true" or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if "empty parameter set" in reason and not SHARED.is_dir():
        return
    if not MAY_BE_MISSING_IN_CI.search(reason):
        report.outcome, report.longrepr = "failed", f"must not be skipped in CI: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Whatever number of threads the engines of other tests have left."""
    use_one_torch_thread()


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Commands that a test runs in this process write their log to its captured stderr, which is closed afterwards."""
    logs = [logging.getLogger(name) for name in ("tokenmill", *LIBRARIES)]
    before = [(log, log.level, log.propagate, list(log.handlers)) for log in logs]
    yield
    for log, level, propagate, handlers in before:
        log.setLevel(level)
        log.propagate = propagate
        log.handlers[:] = handlers


class FailedSteps(logging.Handler):
    """Keeps what the cores of this process log of steps that raised."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR and is_failed_step(record.getMessage()):
            self.seen.append(f"{record.getMessage()}: {record.exc_info[1] if record.exc_info else None}")


@pytest.fixture(scope="session")
def failed_steps() -> Iterator[FailedSteps]:
    handler, log = FailedSteps(), logging.getLogger("tokenmill.engine.core")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


@pytest.fixture(autouse=True)
def no_step_fails(request: pytest.FixtureRequest, failed_steps: FailedSteps) -> Iterator[None]:
    """A step that raises is tried again in parts, and answers may be right all the same: that would hide its fault."""
    failed_steps.seen.clear()
    yield
    if request.node.get_closest_marker("failing_steps") is None:
        assert not failed_steps.seen, failed_steps.seen


@pytest.fixture(scope="session", autouse=True)
def nothing_packed_is_kept() -> Iterator[None]:
    """Large real models leave nothing in the user's store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_cache, "MIN_SOURCE_BYTES", sys.maxsize)
        yield


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    if not SHARED.is_dir():
        pytest.skip("the data folder ../shared is not here")
    return SHARED


@pytest.fixture(scope="session")
def smollm2_path(shared_dir: Path) -> Path:
    return fetched_model(shared_dir, "smollm2")


@pytest.fixture(scope="session")
def gemma3_path(shared_dir: Path) -> Path:
    return fetched_model(shared_dir, "gemma3")


@pytest.fixture(scope="session")
def qwen_coder_path(shared_dir: Path) -> Path:
    return fetched_model(shared_dir, "qwen-coder")


@pytest.fixture(scope="session")
def lfm2_dir(shared_dir: Path) -> Path:
    """A trained model of short convolutions and attention with 200,000 parameters, and its golden answers."""
    return shared_dir / "goldens" / "tiny" / "lfm2"


@pytest.fixture(scope="session")
def stories_dir(shared_dir: Path) -> Path:
    """The trained 260K-parameter Llama in Hugging Face layout."""
    return shared_dir / "goldens" / "stories260K" / "hf"
