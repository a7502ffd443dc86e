"""What the page keeps of conversations, whatever its user does meanwhile: other views, reloads, deletions."""

from __future__ import annotations

from playwright.sync_api import Browser, Page, expect

from tests.support.metric_values import metric_values
from tests.support.scripted_server import ScriptedServer
from tests.support.timing import eventually
from tests.support.watched_page import ask, wait_for_answer, wait_until, watched_page

KEPT = """() => new Promise((resolve, reject) => {
    const opening = indexedDB.open("tokenmill", 1);
    opening.onerror = () => reject(opening.error);
    opening.onsuccess = () => {
        const all = opening.result.transaction("conversations").objectStore("conversations").getAll();
        all.onsuccess = () => resolve(all.result.length);
    };
})"""


def wait_for_text(page: Page) -> None:
    wait_until(page, "document.querySelector('.message.assistant:last-child .body')?.innerText.length > 20")


def test_another_view_stays_when_an_answer_ends(chromium: Browser, page_server: ScriptedServer) -> None:
    with watched_page(chromium, page_server.url) as page:
        ask(page, "Hello")
        page.keyboard.press("Alt+Digit2")
        page.wait_for_selector(".models")
        page.locator(".conversation a", has_text="Hello").wait_for()
        assert eventually(lambda: metric_values(page_server.get("/metrics").text)["tokenmill_requests_running"] == 0)
        page.wait_for_timeout(300)  # it is kept once more
        assert page.url.endswith("#/models")
        page.reload()
        page.wait_for_selector(".models")
        page.keyboard.press("Alt+Digit1")


def test_a_choice_of_branches_is_kept_however_soon_the_page_is_left(
    chromium: Browser, page_server: ScriptedServer
) -> None:
    with watched_page(chromium, page_server.url) as page:
        ask(page, "markdown, please")
        wait_for_answer(page, "Mills")
        page.press(".ask", "ArrowUp")
        page.fill(".edit", "second version")
        page.press(".edit", "Enter")
        wait_for_answer(page, "The second answer.")
        for branch, text in (("Earlier", "Mills"), ("Later", "The second answer.")) * 10:
            page.evaluate(
                "name => { document.querySelector(`.message.user [aria-label='${name} branch']`).click();"
                " location.reload(); }",
                branch,
            )
            page.wait_for_load_state()
            wait_for_answer(page, text)


def test_an_answer_that_a_reload_cut_off_says_so(chromium: Browser, page_server: ScriptedServer) -> None:
    with watched_page(chromium, page_server.url) as page:
        ask(page, "forever")
        wait_for_text(page)
        page.wait_for_timeout(1500)  # it is kept once a second
        page.reload()
        expect(page.locator(".message.assistant .body")).to_contain_text("word after word")
        expect(page.locator(".figures")).to_contain_text("interrupted")


def test_a_conversation_deleted_while_it_is_answered_stays_deleted(
    chromium: Browser, page_server: ScriptedServer
) -> None:
    with watched_page(chromium, page_server.url) as page:
        ask(page, "forever")
        wait_for_text(page)
        page.hover(".conversation")
        page.click(".conversation [aria-label=Delete]")
        page.click("dialog >> text=Delete >> nth=-1")
        page.wait_for_selector(".welcome")
        expect(page.locator(".conversation")).to_have_count(0)
        page.wait_for_timeout(1500)
        assert page.evaluate(KEPT) == 0
        page.reload()
        page.wait_for_selector(".welcome")
        expect(page.locator(".conversation")).to_have_count(0)


def test_two_tabs_go_on_with_one_conversation(chromium: Browser, page_server: ScriptedServer) -> None:
    with watched_page(chromium, page_server.url) as page:
        ask(page, "second")
        wait_for_answer(page, "The second answer.")
        other = page.context.new_page()
        other.goto(page.url)
        wait_for_answer(other, "The second answer.")
        ask(other, "markdown")
        wait_for_answer(other, "Mills")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # as when its user comes back to it
        wait_for_answer(page, "Mills")
        ask(page, "and once more")
        expect(page.locator(".message.user")).to_have_count(3)
        wait_for_answer(page, "Mills")
        page.reload()
        expect(page.locator(".message.user")).to_have_count(3)


def test_a_lost_connection_is_told_in_words(chromium: Browser, page_server: ScriptedServer) -> None:
    with watched_page(chromium, page_server.url, expects="ERR_FAILED") as page:
        page.route("**/v1/chat/completions", lambda route: route.abort())
        ask(page, "second")
        expect(page.locator(".problem")).to_have_text("The connection to the server was lost.")
        page.unroute("**/v1/chat/completions")
        page.keyboard.press("Alt+KeyR")
        wait_for_answer(page, "The second answer.")
