"""A headless Chromium for tests: opens pages, and reports layout faults and console messages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

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
    """Return the path of a Chromium, or skip the test if there is none."""
    found = os.environ.get("TOKENMILL_TEST_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium-headless-shell, or TOKENMILL_TEST_CHROMIUM=/path/to/one")
    return found


@contextmanager
def open_chromium() -> Iterator[Browser]:
    """Open a browser. While it is open, no other event loop may run in this process."""
    from playwright.sync_api import Error, sync_playwright  # slow to import

    path = find_chromium()
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=list(PLAYWRIGHT_ARGUMENTS))
        except Error as error:
            pytest.skip(f"{path} does not start here: {error}")
        yield browser
        browser.close()


class ReportPage:
    """A report opened in a browser; records its requests and its console messages."""

    def __init__(self, browser: Browser, file: Path) -> None:
        self.complaints: list[str] = []
        self.page: Page = browser.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._note)
        self.page.goto(file.as_uri())

    def _note(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.complaints.append(f"asks for {request.url}")

    def look(self, width: int, scheme: Any) -> list[str]:
        """Return what overlaps, is cut off or is missing at this width."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        found: list[str] = self.page.evaluate(FAULTS)
        return found + self.complaints


FAULTS = """() => {
  const faults = [], wide = document.documentElement
  if (wide.scrollWidth > wide.clientWidth) faults.push(`the page is ${wide.scrollWidth} wide`)
  if (/NaN|Infinity|undefined/.test(document.body.innerText)) faults.push("a value is no number")
  const seen = e => { const s = getComputedStyle(e), b = e.getBoundingClientRect()
    for (let up = e; up && up.getAttribute; up = up.parentNode) if (up.getAttribute("opacity") === "0") return false
    return s.visibility !== "hidden" && s.display !== "none" && s.opacity !== "0" && b.width > 0 && b.height > 0 }
  const meet = (a, b) => a.left < b.right - 1.5 && b.left < a.right - 1.5 &&
    a.top < b.bottom - 2.5 && b.top < a.bottom - 2.5
  const apart = (name, elements) => {
    const boxes = elements.filter(seen).map(e => [e.textContent, e.getBoundingClientRect()])
    for (let i = 0; i < boxes.length; i++) for (let k = i + 1; k < boxes.length; k++)
      if (meet(boxes[i][1], boxes[k][1])) faults.push(`${name}: "${boxes[i][0]}" and "${boxes[k][0]}" overlap`) }
  for (const figure of document.querySelectorAll("figure")) {
    const name = figure.querySelector("figcaption").textContent
    const drawings = [...figure.querySelectorAll("svg[data-place]")].filter(seen)
    if (drawings.length !== 1) faults.push(`${name}: ${drawings.length} drawings are shown`)
    for (const drawing of drawings) {
      const frame = drawing.getBoundingClientRect(), texts = [...drawing.querySelectorAll("text")].filter(seen)
      apart(name, texts)
      for (const text of texts) { const box = text.getBoundingClientRect()
        if (box.left < frame.left - 1 || box.right > frame.right + 1 ||
            box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
          faults.push(`${name}: "${text.textContent}" is cut off`)
        if (box.height < 8) faults.push(`${name}: "${text.textContent}" is too small to read`) }
      const marks = [...drawing.querySelectorAll(".mark-line path, .mark-rect path, .role-mark path")]
      if (!marks.some(m => { const b = m.getBoundingClientRect(); return b.width + b.height > 8 }))
        faults.push(`${name}: nothing is drawn`)
      apart(name, [figure.querySelector("figcaption"), ...figure.querySelectorAll(".legend li"), drawing])
      const ground = getComputedStyle(document.body).backgroundColor
      for (const text of texts) if (getComputedStyle(text).fill === ground) faults.push(`${name}: unreadable text`)
    }
  }
  for (const frame of document.querySelectorAll(".scroll")) if (frame.scrollWidth > frame.clientWidth + 1)
    faults.push(`a table is cut off: ${frame.textContent.slice(0, 60)}`)
  apart("the page", [...document.body.children])
  return faults
}"""
