"""The page in a real Chromium, in front of a scripted model: conversations, tools, stops, branches, models, load, keys.

Every page here is watched: a complaint of its console or a request to another origin fails the test.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.support.metric_values import metric_values
from tests.support.page_script import ARGUMENTS_SENT, ATTACKS, SCRIPT, TEMPLATE, TOOLS
from tests.support.scripted_server import ScriptedServer, scripted_server, virtual_server
from tests.support.timing import eventually
from tests.support.watched_page import (
    ask,
    note_states,
    noted_states,
    wait_for_answer,
    wait_until,
    watched_page,
)
from tokenmill.config.server import ServerConfig


def answers(page: Page) -> list[str]:
    return [text.strip() for text in page.locator(".message.assistant .body").all_inner_texts()]


# ── conversations ──────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_streams_stops_and_is_there_after_a_reload(chromium: Browser, page_server: ScriptedServer) -> None:
    with watched_page(chromium, page_server.url) as page:
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
        assert eventually(lambda: metric_values(page_server.get("/metrics").text)["tokenmill_requests_running"] == 0)

        page.reload()
        page.wait_for_selector(".message.assistant")
        assert body.last.inner_text() == stopped and len(answers(page)) == 2
        expect(page.locator(".conversation")).to_have_count(1)


def test_a_tool_is_called_and_its_result_sent(chromium: Browser, page_server: ScriptedServer) -> None:
    with watched_page(chromium, page_server.url) as page:
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


def test_what_a_model_says_stays_text(chromium: Browser, page_server: ScriptedServer) -> None:
    assert len(ATTACKS) == 20
    with watched_page(chromium, page_server.url) as page:
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


def test_load_is_what_metrics_say_and_requests_can_be_aborted(chromium: Browser, page_server: ScriptedServer) -> None:
    replies: list[int] = []
    body = {"model": "scripted", "messages": [{"role": "user", "content": "forever"}], "max_tokens": 100_000}
    client = threading.Thread(target=lambda: replies.append(page_server.post("/v1/chat/completions", body).status_code))
    client.start()
    with watched_page(chromium, page_server.url, path="/#/load") as page:
        expect(page.locator("[data-card=running] .figure")).to_have_text("1")
        page.wait_for_selector("tr[data-id]")
        page.click("tr[data-id] button")
        page.click("dialog >> text=Abort >> nth=-1")
        expect(page.locator("[data-card=running] .figure")).to_have_text("0")
        client.join(60)
        assert replies == [499]
        values = metric_values(page_server.get("/metrics").text)
        finished = sum(value for name, value in values.items() if name.startswith("tokenmill_requests_total"))
        expect(page.locator("[data-card=finished] .figure")).to_have_text(str(int(finished)))
        expect(page.locator("[data-card=kv]")).to_contain_text(f"{values['tokenmill_kv_usage_ratio'] * 100:.0f} %")
        shown = {card: page.inner_text(f"[data-card={card}]") for card in ("finished", "hits", "ttft")}
    outcomes = {name: int(values[f"tokenmill_requests_total{{{name}}}"]) for name in ("stop", "abort", "error")}
    assert all(f"{count} {name}" in shown["finished"] for name, count in outcomes.items() if count)
    hits = values["tokenmill_prefix_hits_total"] / values["tokenmill_prefix_queries_total"]
    assert re.search(rf"\n{hits * 100:.{1 if 0 < hits < 0.1 else 0}f} %", shown["hits"])
    assert "median ≤" in shown["ttft"]


def test_the_replicas_of_a_fleet_are_shown_as_they_change(chromium: Browser, page_server: ScriptedServer) -> None:
    with watched_page(chromium, page_server.url, path="/#/load") as page:
        expect(page.locator(".state-dot").first).to_have_text("ready")
        expect(page.locator(".fleet")).to_be_hidden()  # a model in one process
    with virtual_server(3) as server, watched_page(chromium, server.url, path="/#/load") as page:
        rows = page.locator("tr[data-replica]")
        expect(rows).to_have_count(3)
        expect(page.locator(".fleet h2")).to_have_text("Replicas (3 of 3 ready)")
        body = {"model": "virtual", "prompt": "Once", "max_tokens": 5}
        assert server.post("/v1/completions", body).status_code == 200
        expect(page.locator(".fleet")).to_contain_text("level 1")
        page.set_viewport_size({"width": 390, "height": 844})
        box = page.locator(".fleet .table-box")
        box.evaluate("box => { box.scrollLeft = 60 }")
        assert server.post("/replicas/drain", {"replica": 1}).status_code == 200
        expect(rows.nth(1)).to_contain_text("drained")
        assert box.evaluate("box => box.scrollLeft") == 60, "a table that is read is not moved away"


def test_branches_edits_and_search(chromium: Browser, page_server: ScriptedServer) -> None:
    with watched_page(chromium, page_server.url) as page:
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
        page.keyboard.press("Alt+Digit3")
        page.keyboard.press("Alt+KeyN")
        page.wait_for_selector(".welcome")
        expect(page.locator(".ask")).to_be_focused()
        page.fill("[type=search]", "second answer")
        expect(page.locator(".conversation")).to_have_count(1)
        page.fill("[type=search]", "no such words")
        expect(page.locator(".conversation")).to_have_count(0)


def test_a_key_is_asked_for_once(chromium: Browser, empty_store: Path) -> None:
    config = ServerConfig(api_key=("open-sesame",))
    with (
        scripted_server(SCRIPT, template=TEMPLATE, config=config) as server,
        watched_page(chromium, server.url, expects="401") as page,
    ):
        page.fill("dialog [name=key]", "open-sesame")
        page.press("dialog [name=key]", "Enter")
        ask(page, "second")
        wait_for_answer(page, "The second answer.")
        page.reload()
        wait_for_answer(page, "The second answer.")
        assert page.locator("dialog").count() == 0
        assert page.evaluate("sessionStorage.length === 1 && !JSON.stringify(localStorage).includes('sesame')")


def test_docs_describe_every_route_and_try_one(chromium: Browser, page_server: ScriptedServer) -> None:
    paths = page_server.get("/openapi.json").json()["paths"]
    with watched_page(chromium, page_server.url, path="/docs") as page:
        expect(page.locator(".operation")).to_have_count(sum(map(len, paths.values())))
        page.evaluate("document.querySelectorAll('.operation').forEach(one => { one.open = true; })")
        expect(page.locator(".operation-body")).to_have_count(page.locator(".operation").count())
        page.fill("[type=search]", "/v1/models")
        first = page.locator(".operation:not([hidden])").first
        first.locator("text=Send").click()
        expect(first.locator(".sample")).to_contain_text('"scripted"')
