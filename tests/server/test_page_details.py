"""The rest of the page in a real Chromium: parameters, tokens, files, code samples, models, and what looking costs."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.loopback_hub import FakeHub
from tests.support.page_script import SCRIPT, TEMPLATE, TOOLS
from tests.support.scripted_server import ScriptedServer
from tests.support.server_process import ServerProcess, free_port, running
from tests.support.watched_page import ask, is_too_wide, wait_for_answer, wait_until, watched_page
from tokenmill.server.openai.schemas import MODEL

pytestmark = pytest.mark.slow
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture
def page(chromium: Browser, page_server: ScriptedServer) -> Iterator[Page]:
    with watched_page(chromium, page_server.url) as page:
        yield page


def set_parameter(page: Page, name: str, value: str) -> None:
    if page.locator("aside.settings").is_hidden():
        page.keyboard.press("Alt+KeyS")
    page.fill(f"[name={name}]", value)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 900, 390])
def test_every_view_fits_its_window(
    chromium: Browser, page_server: ScriptedServer, tmp_path: Path, scheme: Any, width: int
) -> None:
    """Pictures are left in pytest's folder, to be looked at."""
    with watched_page(chromium, page_server.url, width=width, color_scheme=scheme) as page:

        def look(name: str) -> None:
            assert not is_too_wide(page), name
            page.screenshot(path=tmp_path / f"{name}.png")

        page.wait_for_selector(".welcome")
        look("welcome")
        ask(page, "markdown")
        wait_for_answer(page, "Mills")
        look("answer")
        set_parameter(page, "tools", json.dumps(TOOLS))
        look("parameters")
        page.keyboard.press("Alt+KeyS")
        ask(page, "the weather")
        page.wait_for_selector(".result-input")
        look("tool")
        for view in ("models", "load"):
            page.goto(f"{page_server.url}/#/{view}")
            page.wait_for_selector(f".{view}")
            page.wait_for_timeout(1200)
            look(view)
        assert page.locator(".requests tbody").bounding_box()["height"] > 20  # type: ignore[index]
        page.goto(f"{page_server.url}/docs")
        page.locator(".operation", has_text="/v1/chat/completions").locator("summary").click()
        page.wait_for_selector(".operation-body")
        look("docs")
        described = page.locator(".operation-body td", has_text=MODEL["description"]).first.bounding_box()
        assert described is not None and described["x"] + described["width"] <= width
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness = sum(map(int, re.findall(r"\d+", background)[:3]))
        assert (lightness > 600) == (scheme == "light"), background


def test_parameters_reach_the_model_and_wrong_ones_are_told(page: Page, page_server: ScriptedServer) -> None:
    sent: list[dict[str, Any]] = []
    page.on("request", lambda one: one.url.endswith("/completions") and sent.append(json.loads(one.post_data or "{}")))
    set_parameter(page, "system", "Be brief.")
    set_parameter(page, "temperature", "0")
    set_parameter(page, "seed", "7")
    set_parameter(page, "maxTokens", "5")
    set_parameter(page, "schema", '{"type": "object"')
    ask(page, "second")
    expect(page.locator(".toast.error")).to_contain_text("JSON schema")
    set_parameter(page, "schema", "")
    ask(page, "second")
    expect(page.locator(".figures")).to_contain_text("cut at the token limit")
    assert sent[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (sent[0]["temperature"], sent[0]["seed"], sent[0]["max_tokens"]) == (0, 7, 5)
    set_parameter(page, "maxTokens", "0")
    expect(page.locator(".field-problem", has_text="at least 1")).to_be_visible()
    set_parameter(page, "maxTokens", "")
    set_parameter(page, "schema", '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}')
    ask(page, "now as JSON")
    wait_for_answer(page, "{")
    assert type(json.loads(page.locator(".message.assistant .body").last.inner_text())["n"]) is int


def test_tokens_show_their_alternatives(page: Page) -> None:
    set_parameter(page, "system", "")
    page.check("[name=tokens]")
    ask(page, "second")
    wait_for_answer(page, "The second answer.")
    page.click("[title='Token probabilities']")
    assert page.locator(".token").count() == len("The second answer.")
    page.focus(".token >> nth=0")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-card .chosen")).to_contain_text("h")
    assert page.locator(".token-card > div").count() == 5
    page.click("[title='Token probabilities']")
    assert page.locator(".token").count() == 0


def test_a_failed_answer_says_why(page: Page) -> None:
    ask(page, "break")
    expect(page.locator(".problem")).to_be_visible()
    expect(page.locator(".message.assistant .body")).to_contain_text("half an ans")
    page.keyboard.press("Alt+KeyR")
    expect(page.locator(".message.assistant .branches")).to_contain_text("2 / 2")


def test_pictures_are_refused_where_the_model_reads_text_only(page: Page) -> None:
    page.click("[aria-label='Attach a picture']")
    expect(page.locator(".toast")).to_contain_text("reads text only")


def test_pictures_go_to_models_that_take_them(chromium: Browser, page_server: ScriptedServer, tmp_path: Path) -> None:
    """No scripted model sees, so the page is told that this one does; the server's own refusal is shown."""
    picture = tmp_path / "dot.png"
    picture.write_bytes(base64.b64decode(DOT))
    sent: list[dict[str, Any]] = []
    with watched_page(chromium, page_server.url, expects="400") as page:
        page.route("**/api/show", lambda route: route.fulfill(json={"capabilities": ["completion", "vision"]}))
        page.reload()
        page.wait_for_selector(".welcome")
        page.on("request", lambda one: one.url.endswith("completions") and sent.append(json.loads(one.post_data or "")))
        with page.expect_file_chooser() as chooser:
            page.click("[aria-label='Attach a picture']")
        chooser.value.set_files(picture)
        expect(page.locator(".thumb img")).to_be_visible()
        ask(page, "What is this?")
        expect(page.locator(".problem")).to_contain_text("not supported by this model")
        expect(page.locator(".message.user img")).to_be_visible()
    text, image = sent[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is this?"}
    assert image == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DOT}"}}


MARKDOWN = {
    "*a **b** c*": "<p><em>a <strong>b</strong> c</em></p>",
    "**a *b***": "<p><strong>a <em>b</em></strong></p>",
    "a * b * c, snake_case_name": "<p>a * b * c, snake_case_name</p>",
    "`a*b*` \\*c\\*": "<p><code>a*b*</code> *c*</p>",
    "- a\n  - b\n\n1. c": '<ul><li>a<ul><li>b</li></ul></li></ul><ol start="1"><li>c</li></ol>',
    "> q\n> > r": "<blockquote><p>q</p><blockquote><p>r</p></blockquote></blockquote>",
    "a\n\n---\n\n## b": "<p>a</p><hr><h4>b</h4>",
    "<b>x</b> &amp;": "<p>&lt;b&gt;x&lt;/b&gt; &amp;amp;</p>",
}
HOSTILE = [
    "**a " * 15_000, "[a](" * 15_000, "`a ``b ```c " * 6_000, "*_*_" * 15_000, ">" * 5_000, "```\n" * 20_000,
    "\n".join("  " * depth + "- x" for depth in range(300)), "|a" * 20_000 + "\n" + "|-" * 20_000, "http://" * 8_000,
    "```js\n" + '"\\' * 25_000, "<" * 50_000, "- " * 20_000 + "x",
]  # fmt: skip


def test_markdown_is_read_as_meant_and_in_little_time(page: Page) -> None:
    render = """async text => { const {renderMarkdown} = await import("/ui/markdown.js");
        const box = document.createElement("div"), began = performance.now(); renderMarkdown(box, text);
        return [box.innerHTML, performance.now() - began]; }"""
    assert {text: page.evaluate(render, text)[0] for text in MARKDOWN} == MARKDOWN
    link = page.evaluate(render, "[x](https://a.example/b_(c)) and https://a.example/d.")[0]
    assert 'href="https://a.example/b_(c)"' in link and 'href="https://a.example/d"' in link
    for text in HOSTILE:
        assert page.evaluate(render, text)[1] < 5_000, text[:20]


def test_conversations_travel_as_files(
    page: Page, chromium: Browser, page_server: ScriptedServer, tmp_path: Path
) -> None:
    ask(page, "second")
    wait_for_answer(page, "The second answer.")
    page.keyboard.press("Alt+KeyR")
    expect(page.locator(".branches")).to_contain_text("2 / 2")
    wait_for_answer(page, "The second answer.")
    with page.expect_download() as saved:
        page.click("[aria-label='Export this conversation']")
    file = tmp_path / "kept.json"
    saved.value.save_as(file)
    kept = json.loads(file.read_text())
    (conversation,) = kept["conversations"]
    next(node for node in conversation["nodes"].values() if node["role"] == "user")["images"] = ["javascript:alert(1)"]
    conversation["nodes"]["x"] = {"id": "x", "role": "evil", "content": {}}
    file.write_text(json.dumps(kept))
    with watched_page(chromium, page_server.url) as other:
        other.set_input_files(".library-tools input[type=file]", file)
        wait_for_answer(other, "The second answer.")
        expect(other.locator(".branches")).to_contain_text("2 / 2")
        assert other.locator(".message img").count() == 0
        file.write_text('{"conversations": 3}')
        other.set_input_files(".library-tools input[type=file]", file)
        expect(other.locator(".toast.error")).to_contain_text("not an export")
        other.hover(".conversation")
        other.click(".conversation [aria-label=Delete]")
        other.click("dialog >> text=Delete >> nth=-1")
        expect(other.locator(".conversation")).to_have_count(0)


def test_theme_and_shortcuts(page: Page) -> None:
    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    seen = [background()]
    for _ in range(3):
        page.keyboard.press("Alt+KeyT")
        seen.append(background())
    assert seen[0] == seen[1] == seen[3] and seen[2] != seen[0]
    page.keyboard.press("Alt+KeyT")
    page.keyboard.press("Alt+KeyT")
    page.reload()
    page.wait_for_selector(".welcome")
    assert background() == seen[2], "the choice is kept"
    page.keyboard.press("Alt+Digit3")
    page.wait_for_selector(".load")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_contain_text("search conversations")
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+Digit1")
    page.keyboard.press("Control+KeyK")
    assert page.evaluate("document.activeElement.type") == "search"


def test_the_menu_of_a_phone(chromium: Browser, page_server: ScriptedServer) -> None:
    with watched_page(chromium, page_server.url, width=390, height=800, has_touch=True) as page:
        assert not page.locator(".new-chat").is_visible()
        page.tap("[aria-label=Menu]")
        page.tap("text=Models")
        page.wait_for_selector(".models")
        expect(page.locator(".new-chat")).not_to_be_visible()


SAMPLES = ["curl", "Python (OpenAI)", "Python (Anthropic)", "Python (Ollama)"]


@pytest.mark.parametrize("name", SAMPLES)
def test_the_conversation_as_code_runs(page: Page, name: str) -> None:
    set_parameter(page, "system", "It's 'quoted' \"twice\".")
    set_parameter(page, "tools", json.dumps(TOOLS))
    page.keyboard.press("Alt+KeyS")
    ask(page, "What is the weather?")
    page.fill(".result-input", "18 degrees")
    page.click("text=Send result")
    wait_for_answer(page, "Take a coat.")
    page.click("[aria-label='Copy as code']")
    page.click(f"dialog [role=tab]:text-is('{name}')")
    code = page.inner_text(".sample")
    command = ["bash", "-c", code] if name == "curl" else [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Take a coat." in done.stdout, (code, done.stderr)


# ── models ─────────────────────────────────────────────────────────────────────────────────────────────


def test_pulls_show_progress_can_be_cancelled_and_undone(
    page: Page, page_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub("someone/tiny", {"model.gguf": os.urandom(4 << 20)})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    try:
        hub.delay_s = 0.5  # so that it takes half a minute, if it were not cancelled
        page.keyboard.press("Alt+Digit2")
        page.fill(".pull-form input", "someone/tiny")
        page.press(".pull-form input", "Enter")
        row = page.locator("[data-model='someone/tiny']")
        expect(row.locator("progress")).to_be_visible()
        wait_until(page, "document.querySelector('progress')?.value > 0")
        row.locator("text=Cancel").click()
        expect(page.locator(".toast", has_text="cancelled")).to_be_visible()
        hub.delay_s = 0.0
        page.fill(".pull-form input", "someone/tiny")
        page.press(".pull-form input", "Enter")
        expect(page.locator(".toast", has_text="was downloaded")).to_be_visible(timeout=60_000)
        assert hub.requests[-1][1] is not None, "what had arrived was kept"
        row.locator("text=Delete").click()
        page.click("dialog >> text=Delete >> nth=-1")
        expect(page.locator("[data-model='someone/tiny']")).to_have_count(0)
    finally:
        hub.close()


@pytest.fixture
def two_models(tmp_path: Path) -> Iterator[ServerProcess]:
    for name in ("first", "second"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**SCRIPT, "answers": [{"say": f"I am the {name}."}]}))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    port, scripts = free_port(), [f"scripted:{tmp_path / name}.json" for name in ("first", "second")]
    command = ["-m", "tokenmill", "serve", *scripts, "--port", str(port), "--no-state"]
    with running(command, port, TOKENMILL_HOME=str(tmp_path / "home")) as server:
        server.wait_for("ready")
        yield server


def test_models_are_loaded_and_unloaded(chromium: Browser, two_models: ServerProcess) -> None:
    with watched_page(chromium, two_models.url, path="/#/models") as page:
        second = page.locator("[data-model=second]")
        expect(second.locator(".badge")).to_have_text("unloaded")
        second.locator("[data-action=Load]").click()
        expect(second.locator(".badge")).to_have_text("loaded", timeout=60_000)
        second.locator("[data-action=Unload]").click()
        expect(second.locator(".badge")).to_have_text("unloaded", timeout=60_000)
        page.keyboard.press("Alt+Digit1")
        page.select_option(".model-choice", "second")
        ask(page, "Who are you?")
        wait_for_answer(page, "I am the second.")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has clocks of other processes")
def test_looking_costs_less_than_a_thousandth_of_a_core(two_models: ServerProcess) -> None:
    clock = (~two_models.child.pid << 3) | 2  # the processor time of another process, in nanoseconds

    def used(seconds: float) -> float:
        before = time.clock_gettime(clock)
        time.sleep(seconds)
        return time.clock_gettime(clock) - before

    looking, resting = [], []
    for _ in range(4):  # in turns; the least of each: what others do to the machine only adds
        with httpx.stream("GET", f"{two_models.url}/ui/events", timeout=60) as reply:
            assert reply.status_code == 200
            time.sleep(0.5)
            looking.append(used(5) / 5)
        time.sleep(1.5)
        resting.append(used(5) / 5)
    print(f"share of a core: {min(looking):.5f} while someone looks, {min(resting):.5f} otherwise")
    assert min(looking) - min(resting) < 0.001
