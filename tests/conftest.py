"""Command-line options, fixtures of real models, tests that need their own process, and skips that CI treats as
failures.

A fixture of a real model skips the test, with a reason, if the model is absent.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import socket
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
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by processes that tests start
    use_one_torch_thread()


def use_one_torch_thread() -> None:
    """Let torch compute with one thread. With more, several test processes whose threads spin while they wait for
    each other take ten times as long, and sums may depend on the number of threads. Engines set their own number."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def _choose_examples() -> None:
    """Make property tests try the same examples in every run; `HYPOTHESIS_PROFILE=random` tries new ones.

    Hypothesis also draws constants from the modules that a process has loaded, which depends on how tests are
    distributed over processes. They are therefore disabled in repeatable runs.
    """
    patient: dict[str, Any] = {
        "deadline": None,
        "suppress_health_check": [HealthCheck.too_slow],
    }  # because the machine may be busy
    hypothesis_settings.register_profile("repeatable", derandomize=True, database=None, **patient)
    hypothesis_settings.register_profile("random", derandomize=False, **patient)
    profile = os.environ.get("HYPOTHESIS_PROFILE", "repeatable")
    hypothesis_settings.load_profile(profile)
    if profile == "repeatable" and hasattr(hypothesis_providers, "is_local_module_file"):
        hypothesis_providers.is_local_module_file = lambda path: False


def _choose_interpreter(config: pytest.Config) -> None:
    """Enable Triton's interpreter if only its tests run: a process decides once, when kernels are defined."""
    folder = config.invocation_params.dir
    chosen = [(folder / arg.split("::")[0]).resolve().is_relative_to(INTERPRETED) for arg in config.args]
    if all(chosen):
        os.environ["TRITON_INTERPRET"] = os.environ["OMP_NUM_THREADS"] = "1"
    elif any(chosen):
        raise pytest.UsageError(f"{INTERPRETED.name} needs a run of its own: pytest tests/{INTERPRETED.name}")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let workers send each small message to the database of reruns (`--reruns`) at once: the system would hold it back
    for 40 ms until the one before is confirmed, which is once or twice a test."""
    link = getattr(getattr(session.config, "failures_db", None), "sock", None)
    if link is not None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_left_out = not _is_interpreting() or find_spec("triton") is None
    return True if collection_path == INTERPRETED and is_left_out else None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Report success on systems without Triton (it requires Linux), where no interpreted test is collected."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and _is_interpreting() and find_spec("triton") is None:
        session.exitstatus = pytest.ExitCode.OK


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the slowest files first, then those with the most tests. Workers take one file after another, so a slow
    file at the end would keep one worker busy alone."""
    lines = LONG_FILES.read_text(encoding="utf-8").splitlines()
    places = {config.rootpath / line.split()[-1]: place for place, line in enumerate(lines)}
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (places.get(item.path, len(places)), -sizes[item.path]))


def pytest_collection_finish() -> None:
    """Keep what collection has created out of garbage collections, which would take a tenth of the tests' time."""
    gc.collect()
    gc.freeze()


def _is_interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.args == config.getini("testpaths") and find_spec("triton") is not None:
        terminalreporter.write_line(f"left out, for a run of its own: pytest tests/{INTERPRETED.name}")


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip that must not happen in CI into a failure. Expected failures (xfail) are left alone."""
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
    """Reset torch to one thread, since engines of earlier tests may have changed the number."""
    use_one_torch_thread()


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Restore the log configuration after each test. Commands that run in this process log to the captured stderr,
    which is closed after the test."""
    logs = [logging.getLogger(name) for name in ("tokenmill", *LIBRARIES)]
    before = [(log, log.level, log.propagate, list(log.handlers)) for log in logs]
    yield
    for log, level, propagate, handlers in before:
        log.setLevel(level)
        log.propagate = propagate
        log.handlers[:] = handlers


class FailedSteps(logging.Handler):
    """Collects the log records of engine steps that raised in this process."""

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
    """Fail the test if an engine step raised. The engine retries the rows of a failed step in parts, so answers may
    be right and hide the fault."""
    failed_steps.seen.clear()
    yield
    if request.node.get_closest_marker("failing_steps") is None:
        assert not failed_steps.seen, failed_steps.seen


@pytest.fixture(scope="session", autouse=True)
def nothing_packed_is_kept() -> Iterator[None]:
    """Disable the cache of packed weights, so that large real models write nothing to the user's store."""
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
    """A trained model with short convolutions, attention and 200,000 parameters, and its golden answers."""
    return shared_dir / "goldens" / "tiny" / "lfm2"


@pytest.fixture(scope="session")
def stories_dir(shared_dir: Path) -> Path:
    """The trained 260K-parameter Llama in Hugging Face layout."""
    return shared_dir / "goldens" / "stories260K" / "hf"
