"""A headless Chromium, driven over its DevTools protocol: open a page, hear its console, ask it questions."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

FLAGS = ("--headless", "--no-sandbox", "--no-zygote", "--disable-gpu", "--disable-dev-shm-usage",
         "--remote-debugging-port=0", "--window-size=1400,3000")  # fmt: skip
TALK = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")


PLAYWRIGHT_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str:
    """The path of a Chromium; the test is skipped where there is none."""
    found = os.environ.get("TOKENMILL_TEST_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium-headless-shell, or TOKENMILL_TEST_CHROMIUM=/path/to/one")
    return found


def require_chromium() -> str:
    """The path of a Chromium that works here; the test is skipped where there is none."""
    found = find_chromium()
    if not shows_a_page(found):
        pytest.skip(f"{found} does not start here")
    return found


def shows_a_page(browser: str) -> bool:
    command = [browser, "--headless", "--no-sandbox", "--no-zygote", "--disable-gpu", "--dump-dom", "about:blank"]
    try:
        return "<html>" in subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False


class Tab:
    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number, self._session = socket, 0, ""
        self.heard: list[dict[str, Any]] = []  # whatever the console, the log or the network complained of
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, page: Path) -> None:
        self.call("Page.navigate", url=page.as_uri())
        while self.ask("document.readyState") != "complete":
            pass

    def ask(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps({**message, "sessionId": self._session} if self._session else message))
        while True:
            reply = json.loads(self._socket.recv(timeout=60))
            if reply.get("method") in TALK:
                self.heard.append(reply)
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result


@contextmanager
def open_tab(browser: str, profile: Path) -> Iterator[Tab]:
    process = subprocess.Popen(  # in a group of its own: some are started by a script that would leave them behind
        [browser, *FLAGS, f"--user-data-dir={profile}"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stderr is not None
        found = (re.search(r"ws://\S+", line) for line in process.stderr)
        address = next(match for match in found if match).group()
        with connect(address, max_size=64 << 20) as socket:
            yield Tab(socket)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


# Every plot has lines or bars that take up room on the page; and how many plots there are.
DRAWN = """[...document.querySelectorAll("svg")].filter(
    plot => [...plot.querySelectorAll("polyline, rect")].some(mark => mark.getBBox().width + mark.getBBox().height > 20)
).length"""


def look_at(page: Path, plots: int, browser: str, profile: Path) -> bytes:
    """Opens the page and takes its picture: all plots are drawn, nothing is wider than the window, nobody complains."""
    with open_tab(browser, profile) as tab:
        tab.open(page)
        assert tab.ask('document.querySelectorAll("svg").length') == plots
        assert tab.ask(DRAWN) == plots
        assert "NaN" not in tab.ask("document.body.outerHTML")
        assert tab.ask("document.documentElement.scrollWidth") <= 1400
        assert tab.heard == []
        return base64.b64decode(tab.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])
