from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

STUB = Path(__file__).resolve().parents[1] / "support" / "stub_server.py"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
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


@pytest.fixture(scope="session")
def browser() -> str:
    found = os.environ.get("TOKENMILL_TEST_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium-headless-shell, or TOKENMILL_TEST_CHROMIUM=/path/to/one")
    if not shows_a_page(found):
        pytest.skip(f"{found} does not start here")
    return found


def shows_a_page(browser: str) -> bool:
    command = [browser, "--headless", "--no-sandbox", "--no-zygote", "--disable-gpu", "--dump-dom", "about:blank"]
    try:
        return "<html>" in subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
