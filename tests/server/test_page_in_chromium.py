"""The page in a real Chromium, in front of a scripted model: conversations, tools, stops, branches, models, load, keys.

Every page here is watched: a complaint of its console or a request to another origin fails the test.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from playwright.sync_api import Error as PlaywrightError

from tests.support.browser import find_chromium
from tests.support.metric_values import metric_values
from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.timing import eventually
from tests.support.watched_page import (
    ARGUMENTS,
    ask,
    is_too_wide,
    note_states,
    noted_states,
    wait_for_answer,
    wait_until,
    watched_page,
)
from tokenmill.config.server import ServerConfig

TEMPLATE = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "tool" %}<tool_response>
{{ message.content }}
</tool_response>{% else %}{{ message.content or "" }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS = [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]
ARGUMENTS_SENT = {"city": "Paris", "day": "the day after tomorrow"}
CALL = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': ARGUMENTS_SENT})}\n</tool_call>"
MARKDOWN = (
    "# Mills\n\n- one **bold** word\n- `code`\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n```python\nprint(1)  # hi\n```\n"
)
ATTACKS = [
    "<script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 2'>",
    "<svg onload='window.broken = 3'></svg>",
    "[click](javascript:window.broken=4)",
    "[click](JaVaScRiPt:window.broken=5)",
    "![x](javascript:window.broken=6)",
    "<iframe src='javascript:window.broken=7'></iframe>",
    "<a href='javascript:window.broken=8'>x</a>",
    "```html\n<script>window.broken = 9</script>\n```",
    "`<img src=x onerror=window.broken=10>`",
    "| <img src=x onerror=window.broken=11> | b |\n|---|---|\n| <script>window.broken=11</script> | 2 |",
    "# <img src=x onerror=window.broken=12>",
    "> <svg/onload=window.broken=13>",
    "- <details open ontoggle=window.broken=14>",
    '<https://x.example/"onmouseover="window.broken=15>',
    '[a](https://x.example/"onclick="window.broken=16)',
    "![picture](https://outside.example/track.png)",
    "<link rel=stylesheet href=https://outside.example/x.css><style>@import 'https://outside.example/y.css'</style>",
    "[x](data:text/html,<script>window.broken=19</script>) [y](vbscript:window.broken) [z](file:///etc/passwd)",
    "<form action=//outside.example><input onfocus=window.broken=20></form><base href=//outside.example>",
]
SCRIPT: dict[str, Any] = {
    "control_tokens": ["<|im_start|>", "<|im_end|>"],
    "added_tokens": ["<tool_call>", "</tool_call>"],
    "eos": "<|im_end|>",
    "answers": [
        {"match": "18 degrees", "say": "Take a coat."},
        {"match": "20 degrees", "say": "Take a hat."},
        {"match": "weather", "say": CALL, "token_delay_s": 0.01},
        {"match": "forever", "say": "word after word ", "repeat": True, "token_delay_s": 0.02},
        {"match": "markdown", "say": MARKDOWN},
        {"match": "break", "say": ["half an ans", {"fail": True}]},
        *(
            {"match": rf"attack {number}<\|im_end\|>\s*\S+assistant\s*$", "say": text}
            for number, text in enumerate(ATTACKS)
        ),
        {"match": "second", "say": "The second answer."},
        {"say": "A slow and steady answer, word by word.", "token_delay_s": 0.02},
    ],
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        except PlaywrightError as error:
            pytest.skip(f"{path} does not start here: {error}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty model store: what the machine has is not the tests' concern."""
    home = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMILL_HOME", str(home))
        yield home


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[ScriptedServer]:
    with scripted_server(SCRIPT, template=TEMPLATE) as server:
        yield server


def answers(page: Page) -> list[str]:
    return [text.strip() for text in page.locator(".message.assistant .body").all_inner_texts()]


# ── conversations ──────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_streams_stops_and_is_there_after_a_reload(browser: Browser, server: ScriptedServer) -> None:
    with watched_page(browser, server.url) as page:
        note_states(page, ".message.assistant .body")
        ask(page, "Hello")
        wait_for_answer(page, "word by word.")
        states = [text for text in noted_states(page) if text]
        assert len(states) >= 3 and all(states[-1].startswith(text) for text in states), "text appears as it comes"
        expect(page.locator(".figures")).to_contain_text("tokens/s")

        ask(page, "forever")
        wait_until(page, "document.querySelectorAll('.body')[3]?.innerText.length > 40")
        page.press(".ask", "Escape")
        expect(page.locator(".figures").last).to_contain_text("stopped")
        body = page.locator(".message.assistant .body")
        stopped = body.last.inner_text()
        assert eventually(lambda: server.get("/metrics").text.count('tokenmill_requests_running{model="scripted"} 0.0'))

        page.reload()
        page.wait_for_selector(".message.assistant")
        assert body.last.inner_text() == stopped and len(answers(page)) == 2
        expect(page.locator(".conversation")).to_have_count(1)


def test_a_tool_is_called_and_its_result_sent(browser: Browser, server: ScriptedServer) -> None:
    with watched_page(browser, server.url) as page:
        page.keyboard.press("Alt+KeyS")
        page.fill("[name=tools]", json.dumps(TOOLS))
        note_states(page, ".arguments")
        ask(page, "What is the weather in Paris?")
        page.wait_for_selector(".result-input")
        assert len(noted_states(page)) >= 3, "arguments are shown as they come"
        assert json.loads(page.locator(".arguments").inner_text()) == ARGUMENTS_SENT
        page.fill(".result-input", "18 degrees")
        page.click("text=Send result")
        wait_for_answer(page, "Take a coat.")
        expect(page.locator(".call-card .result")).to_have_text("18 degrees")
        page.click("text=Give another result")
        page.fill(".result-input", "20 degrees")
        page.click("text=Send and go on")
        wait_for_answer(page, "Take a hat.")
        page.click(".calls-foot [aria-label='Earlier branch']")
        wait_for_answer(page, "Take a coat.")


def test_what_a_model_says_stays_text(browser: Browser, server: ScriptedServer) -> None:
    assert len(ATTACKS) == 20
    with watched_page(browser, server.url) as page:
        for number in range(len(ATTACKS)):
            ask(page, f"attack {number}")
            expect(page.locator(".message.assistant:not(.live) .figures")).to_have_count(number + 1)
        found = page.evaluate("""() => ({
            broken: window.broken,
            made: [...document.querySelectorAll(".message.assistant .body *")].map(one => one.tagName.toLowerCase()),
            links: [...document.querySelectorAll(".message.assistant .body a")].map(one => one.protocol),
            handlers: [...document.querySelectorAll(".message.assistant .body *")]
                .flatMap(one => one.getAttributeNames()).filter(name => name.startsWith("on")),
        })""")
        assert found["broken"] is None and found["handlers"] == []
        assert not {"script", "img", "iframe", "form", "style", "link", "base", "details", "object"} & set(
            found["made"]
        )
        assert found["links"] and set(found["links"]) <= {"http:", "https:"}
        shown = [re.sub(r"\W", "", text) for text in answers(page)]
        for attack, text in zip(ATTACKS, shown, strict=True):
            words = re.sub(r"\W", "", re.sub(r"\[(.*?)\]\(http.*?\)", r"\1", attack))
            assert words in text, f"{attack} is shown as it was written"


def test_load_is_what_metrics_say_and_requests_can_be_aborted(browser: Browser, server: ScriptedServer) -> None:
    replies: list[int] = []
    body = {"model": "scripted", "messages": [{"role": "user", "content": "forever"}], "max_tokens": 100_000}
    client = threading.Thread(target=lambda: replies.append(server.post("/v1/chat/completions", body).status_code))
    client.start()
    with watched_page(browser, server.url, path="/#/load") as page:
        expect(page.locator("[data-card=running] .figure")).to_have_text("1")
        page.wait_for_selector("tr[data-id]")
        page.click("tr[data-id] button")
        page.click("dialog >> text=Abort >> nth=-1")
        expect(page.locator("[data-card=running] .figure")).to_have_text("0")
        client.join(10)
        assert replies == [499]
        page.wait_for_timeout(1200)
        values = metric_values(server.get("/metrics").text)
        shown = {card: page.inner_text(f"[data-card={card}]") for card in ("finished", "hits", "kv", "ttft")}
    outcomes = {name: int(values[f"tokenmill_requests_total{{{name}}}"]) for name in ("stop", "abort", "error")}
    finished = sum(value for name, value in values.items() if name.startswith("tokenmill_requests_total"))
    assert f"\n{int(finished)}\n" in shown["finished"]
    assert all(f"{count} {name}" in shown["finished"] for name, count in outcomes.items() if count)
    hits = values["tokenmill_prefix_hits_total"] / values["tokenmill_prefix_queries_total"]
    assert re.search(rf"\n{hits * 100:.{1 if 0 < hits < 0.1 else 0}f} %", shown["hits"])
    assert f"{values['tokenmill_kv_usage_ratio'] * 100:.0f} %" in shown["kv"] and "median ≤" in shown["ttft"]


def test_branches_edits_and_search(browser: Browser, server: ScriptedServer) -> None:
    with watched_page(browser, server.url) as page:
        ask(page, "markdown, please")
        wait_for_answer(page, "Mills")
        body = page.locator(".message.assistant .body")
        assert body.locator("h3, li, table, pre, strong").count() == 6
        page.press(".ask", "ArrowUp")
        page.fill(".edit", "second version")
        page.press(".edit", "Enter")
        wait_for_answer(page, "The second answer.")
        expect(page.locator(".message.user .branches")).to_contain_text("2 / 2")
        page.keyboard.press("Alt+KeyR")
        expect(page.locator(".message.assistant .branches")).to_contain_text("2 / 2")
        page.click(".message.user [aria-label='Earlier branch']")
        wait_for_answer(page, "Mills")
        page.reload()
        wait_for_answer(page, "Mills")
        page.keyboard.press("Alt+KeyN")
        page.wait_for_selector(".welcome")
        page.fill("[type=search]", "second answer")
        expect(page.locator(".conversation")).to_have_count(1)
        page.fill("[type=search]", "no such words")
        expect(page.locator(".conversation")).to_have_count(0)


def test_a_key_is_asked_for_once(browser: Browser, home: Path) -> None:
    config = ServerConfig(api_key=("open-sesame",))
    with (
        scripted_server(SCRIPT, template=TEMPLATE, config=config) as server,
        watched_page(browser, server.url, expects="401") as page,
    ):
        page.fill("dialog [name=key]", "open-sesame")
        page.press("dialog [name=key]", "Enter")
        ask(page, "second")
        wait_for_answer(page, "The second answer.")
        page.reload()
        wait_for_answer(page, "The second answer.")
        assert page.locator("dialog").count() == 0
        assert page.evaluate("sessionStorage.length === 1 && !JSON.stringify(localStorage).includes('sesame')")


def test_docs_describe_every_route_and_try_one(browser: Browser, server: ScriptedServer) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    with watched_page(browser, server.url, path="/docs") as page:
        expect(page.locator(".operation")).to_have_count(sum(map(len, paths.values())))
        page.evaluate("document.querySelectorAll('.operation').forEach(one => { one.open = true; })")
        expect(page.locator(".operation-body")).to_have_count(page.locator(".operation").count())
        page.fill("[type=search]", "/v1/models")
        first = page.locator(".operation:not([hidden])").first
        first.locator("text=Send").click()
        expect(first.locator(".sample")).to_contain_text('"scripted"')


# ── all of it ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 900, 390])
def test_every_view_fits_its_window(
    browser: Browser, server: ScriptedServer, tmp_path: Path, scheme: Any, width: int
) -> None:
    """Pictures are left in pytest's folder, to be looked at."""
    with watched_page(browser, server.url, width=width, color_scheme=scheme) as page:

        def look(name: str) -> None:
            assert not is_too_wide(page), name
            page.screenshot(path=tmp_path / f"{name}.png")

        page.wait_for_selector(".welcome")
        look("welcome")
        ask(page, "markdown")
        wait_for_answer(page, "Mills")
        look("answer")
        page.keyboard.press("Alt+KeyS")
        page.fill("[name=tools]", json.dumps(TOOLS))
        look("parameters")
        page.keyboard.press("Alt+KeyS")
        ask(page, "the weather")
        page.wait_for_selector(".result-input")
        look("tool")
        for view in ("models", "load"):
            page.goto(f"{server.url}/#/{view}")
            page.wait_for_selector(f".{view}")
            page.wait_for_timeout(1200)
            look(view)
        page.goto(f"{server.url}/docs")
        page.wait_for_selector(".operation")
        page.locator(".operation", has_text="/v1/chat/completions").locator("summary").click()
        page.wait_for_selector(".operation-body")
        look("docs")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness = sum(map(int, re.findall(r"\d+", background)[:3]))
        assert (lightness > 600) == (scheme == "light"), background
