from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.browser import open_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser

STUB = Path(__file__).resolve().parents[1] / "support" / "stub_server.py"
Start = Callable[..., str]


@contextmanager
def stub_process(arguments: list[str]) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, str(STUB), *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def stub() -> Iterator[Start]:
    """Starts stub servers; `stub(mode="share", itl=0.01)` is the address of one."""
    with ExitStack() as stack:

        def start(**settings: object) -> str:
            arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
            return stack.enter_context(stub_process(arguments))

        yield start


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser for the tests of one file: while it is open, nothing else in this process may run an event loop."""
    with open_chromium() as browser:
        yield browser
