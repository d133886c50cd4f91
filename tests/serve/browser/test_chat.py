"""In a browser: the page chats with the model, shows figures, keeps the key to itself, and text is never markup."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from drawn import in_one_of
from http_server import HttpServer
from thread_server import ThreadServer, thread_server

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("serve"), pytest.mark.one_in_file(3)]
Visit = Callable[..., Any]
READY = "#state:text-matches('^ready')"
NUMBER = re.compile("[0-9]")
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script></div>&lt;b&gt;'
log = logging.getLogger(__name__)


def chunks(*texts: str) -> str:
    """The stream of a chat's answer."""
    events = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in texts]
    usage = {"prompt_tokens": 3, "completion_tokens": len(texts), "total_tokens": 3 + len(texts)}
    end = [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": usage}]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in (*events, *end)) + "data: [DONE]\n\n"


@in_one_of(3)
def test_a_chat_with_a_real_model(visit: Visit, server: HttpServer) -> None:
    from playwright.sync_api import expect

    bodies: list[dict[str, Any]] = []

    def listen(page: Page) -> None:
        page.on("request", lambda one: one.method == "POST" and bodies.append(one.post_data_json))

    opened = visit(server.url, before=listen)
    page = opened.page
    page.wait_for_selector(READY)
    paints = page.evaluate("performance.getEntriesByType('paint').map((one) => [one.name, one.startTime])")
    log.info("milliseconds to the first paint: %s", dict(paints))  # a figure, and no bound: other tests run
    assert page.inner_text("h1") == "tiny" and page.title() == "tiny" and "4096 tokens" in page.inner_text("#state")
    finished = page.locator("#figures div", has_text="Finished requests").locator("dd")
    expect(finished).to_have_text(NUMBER)
    ended = int(finished.inner_text())
    page.locator("#settings summary").click()
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "12")
    opened.say("hi")
    first = opened.answer()
    assert page.locator(".turn.user .text").inner_text() == "hi"
    assert "tokens/s" in page.locator(".turn.assistant .facts").inner_text()
    opened.say("more")
    page.wait_for_selector(".turn.assistant:nth-child(4) .facts:not(:empty)")
    assert bodies[0]["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert [one["role"] for one in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    expected = server.http.post("/v1/chat/completions", json={**bodies[0], "stream": False, "stream_options": None})
    assert bodies[1]["messages"][2]["content"] == expected.json()["choices"][0]["message"]["content"]
    assert bodies[0]["temperature"] == 0 and bodies[0]["max_tokens"] == 12 and "top_p" not in bodies[0]
    assert first.strip() == bodies[1]["messages"][2]["content"].strip()
    expect(finished).to_have_text(str(ended + 3))  # with the request above
    assert page.locator("#figures div", has_text="First token after").locator("dd").inner_text() != "–"
    page.get_by_role("button", name="New").click()
    assert page.locator(".turn").count() == 0


def test_text_comes_while_the_model_writes_and_stop_ends_the_request(visit: Visit, server: HttpServer) -> None:
    from playwright.sync_api import expect

    opened = visit(server.url)
    page = opened.page
    page.wait_for_selector(READY)
    page.locator("#settings summary").click()
    page.fill("#max_tokens", "3000")
    opened.say("write")
    expect(page.locator(".turn.assistant .text")).to_have_text(re.compile(".{20}", re.DOTALL))
    assert page.get_by_role("button", name="Send").count() == 0
    page.get_by_role("button", name="Stop").click()
    opened.answer()
    assert "stopped" in page.locator(".turn.assistant .facts").inner_text()
    server.until_gauge("num_requests_running", 0, 10)


def test_text_is_never_markup_and_the_policy_refuses_it(visit: Visit, server: HttpServer) -> None:
    def answer(route: Route) -> None:
        messages = route.request.post_data_json["messages"]
        if messages[-1]["content"] == "fail":
            body = json.dumps({"error": {"message": EVIL}})
            route.fulfill(status=400, content_type="application/json", body=body)
        else:
            route.fulfill(status=200, content_type="text/event-stream", body=chunks(EVIL[:9], EVIL[9:]))

    def before(page: Page) -> None:
        card = {"id": EVIL, "max_model_len": 8, "has_chat_template": True}
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
        page.route("**/v1/chat/completions", answer)
        page.route("**/metrics", lambda route: route.fulfill(status=500, body=EVIL))

    opened = visit(server.url, before=before)
    page = opened.page
    page.wait_for_selector(READY)
    opened.say(EVIL)
    assert opened.answer() == EVIL and page.inner_text("h1") == EVIL
    assert page.locator(".turn.user .text").inner_text() == EVIL
    opened.say("fail")
    page.wait_for_selector(".turn.error")
    assert page.get_by_role("alert").locator(".text").inner_text() == EVIL
    assert page.input_value("#text") == "fail", "a text without an answer comes back"
    assert page.locator(".turn.assistant").count() == 1
    assert page.locator("img").count() == 0 and page.locator("body script").count() == 0
    assert page.evaluate("window.hacked") is None
    assert all("Failed to load resource" in one for one in opened.complaints)
    refused = page.evaluate(
        """() => { try { document.body.innerHTML = "<b>x</b>"; return ""; } catch (error) { return error.name; } }"""
    )
    assert refused == "TypeError"
    blocked = page.evaluate(
        """() => new Promise((done) => {
             document.addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
             fetch("https://ingot.invalid/").catch(() => {});
           })"""
    )
    assert blocked == "connect-src"
    opened.complaints.clear()


@pytest.mark.slow
def test_a_stream_that_breaks_keeps_its_text_and_says_so(visit: Visit, server: HttpServer) -> None:
    error = "data: " + json.dumps({"error": {"message": "the engine ended"}}) + "\n\ndata: [DONE]\n\n"
    whole = chunks("partial")
    bodies = iter((whole.partition("\n\n")[0] + "\n\n", whole.partition("\n\n")[0] + "\n\n" + error))

    def before(page: Page) -> None:
        answer = {"status": 200, "content_type": "text/event-stream"}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer, body=next(bodies)))

    opened = visit(server.url, before=before)
    page = opened.page
    page.wait_for_selector(READY)
    for number, message in enumerate(("the connection ended before the answer did", "the engine ended"), 1):
        opened.say("hi")
        assert page.locator(".turn.error .text").nth(number - 1).inner_text() == message
        assert page.locator(".turn.assistant .text").nth(number - 1).inner_text() == "partial"
        page.wait_for_selector("#send:visible")


def test_a_model_without_a_chat_template_completes_texts(visit: Visit, server: HttpServer) -> None:
    def before(page: Page) -> None:
        card = {"id": "base", "max_model_len": 64, "has_chat_template": False}
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))

    opened = visit(server.url, before=before)
    page = opened.page
    page.wait_for_selector(READY)
    assert page.get_by_label("Text to continue").count() == 1 and page.locator("#system").is_hidden()
    opened.say("def f")
    text = opened.answer()
    assert text.startswith("def f") and page.locator(".prompt").inner_text() == "def f"
    assert page.locator(".turn").count() == 1 and any(one.endswith("/v1/completions") for one in opened.requests)


@pytest.fixture(scope="module")
def guarded(
    chat_artifact: Path, tmp_path_factory: pytest.TempPathFactory, engine_thread: object
) -> Iterator[ThreadServer]:
    with thread_server(chat_artifact, tmp_path_factory.mktemp("guarded"), tcp=True, api_keys=("sesame",)) as running:
        yield running


def test_the_key_stays_in_memory(visit: Visit, guarded: ThreadServer) -> None:
    opened = visit(guarded.url)
    page = opened.page
    page.get_by_text("needs an API key").wait_for()
    assert page.locator("#send").is_disabled()
    key = page.get_by_label("API key")
    for text in ("wrong", "sesame"):
        key.fill(text)
        key.press("Enter")
    page.wait_for_selector(READY)
    page.get_by_text("Finished requests").wait_for()
    page.fill("#max_tokens", "4")
    opened.say("hi")
    opened.answer()
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
    assert "sesame" not in kept
    page.reload()
    page.get_by_text("needs an API key").wait_for()
    assert key.input_value() == ""
    assert all("401" in one for one in opened.complaints)
    opened.complaints.clear()
