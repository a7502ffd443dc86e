"""The server's page in a real Chromium, driven by playwright.

Console errors, requests to other origins and unexpected dialogs fail the test at its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, expect

from tests.support.timing import SOON_S, eventually

PATIENCE_MS = SOON_S * 1000
expect.set_options(timeout=PATIENCE_MS)


@contextmanager
def watched_page(
    browser: Browser,
    url: str,
    *,
    path: str = "/",
    width: int = 1400,
    height: int = 900,
    expects: str = "",
    **context: Any,
) -> Iterator[Page]:
    """Open a page in a profile of its own. `expects`: parts of console messages that the test provokes."""
    complaints: list[str] = []
    with browser.new_context(viewport={"width": width, "height": height}, **context) as profile:
        page = profile.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(f"uncaught: {error}"))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: _note_foreign(request.url, url, complaints))
        page.goto(url + path)
        page.wait_for_selector(".welcome, .message, .page, .operation, dialog[open]")
        yield page
    left = [one for one in complaints if not expects or expects not in one]
    assert left == [], left


def _note_foreign(requested: str, own: str, complaints: list[str]) -> None:
    parts = urlsplit(requested)
    if parts.scheme not in ("data", "blob") and f"{parts.scheme}://{parts.netloc}" != own:
        complaints.append(f"outside request: {requested}")


def ask(page: Page, text: str) -> None:
    page.fill(".ask", text)
    page.press(".ask", "Enter")


def wait_for_answer(page: Page, text: str) -> None:
    """Wait until the last answer is complete and has this text."""
    last = page.locator(".message.assistant").last
    expect(last).not_to_have_class(re.compile("live"), timeout=PATIENCE_MS)
    expect(last).to_contain_text(text)


def wait_until(page: Page, condition: str) -> None:
    """Wait for a condition on the page. (playwright's own function needs `eval`, which the page's policy forbids.)"""
    assert eventually(lambda: bool(page.evaluate(condition))), condition


def note_states(page: Page, selector: str) -> None:
    """Record every text that the last matching element shows from now on; `noted_states` returns them."""
    page.evaluate(
        """selector => { window.states = new Set(); new MutationObserver(() => {
        const all = document.querySelectorAll(selector);
        if (all.length) window.states.add(all[all.length - 1].textContent);
        }).observe(document.body, {subtree: true, childList: true, characterData: true}); }""",
        selector,
    )


def noted_states(page: Page) -> list[str]:
    found: list[str] = page.evaluate("[...window.states]")
    return found


def is_too_wide(page: Page) -> bool:
    """Return whether anything makes the page scroll sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))
