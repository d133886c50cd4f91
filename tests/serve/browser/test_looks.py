"""In a browser: colours, widths, and names for readers of the screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from contrast import contrasts
from http_server import HttpServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.xdist_group("serve")]
Visit = Callable[..., Any]


def brightness(page: Page) -> float:
    colours = page.evaluate("getComputedStyle(document.body).backgroundColor").removeprefix("rgb(").rstrip(")")
    return sum(map(float, colours.split(","))) / 3


def talk(opened: Any) -> None:
    """Brings all kinds of text onto the page."""
    page = opened.page
    page.wait_for_selector("#state:text-matches('^ready')")
    page.locator("#settings summary").click()
    page.fill("#max_tokens", "5")
    opened.say("x" * 300)
    opened.answer()
    page.fill("#temperature", "-1")
    opened.say("bad")
    page.wait_for_selector(".turn.error")
    opened.complaints.clear()  # the console shows the status 400


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_its_ground(visit: Visit, server: HttpServer, dark: bool) -> None:
    opened = visit(server.url, dark=dark)
    talk(opened)
    page = opened.page
    for selector in (
        *("h1", ".brand", "#state", ".turn.user .text", ".turn .says", ".turn .facts", ".turn.error .text"),
        *("#send", "#new", ".fields label", ".figures dt", ".figures dd", ".panel .quiet", "#text"),
    ):
        found = contrasts(page, selector)
        # WCAG 2.2, 1.4.3: at least 4.5 for text of this size.
        assert found and min(found) >= 4.5, f"{selector}: {found}"
    assert (brightness(page) < 60) == dark
    page.get_by_label("Dark colours").click()
    assert (brightness(page) < 60) != dark


def test_a_phone_shows_all_of_it(visit: Visit, server: HttpServer) -> None:
    opened = visit(server.url, size=(390, 844))
    talk(opened)
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for selector in ("#text", "#send", "#figures", "#settings"):
        page.locator(selector).scroll_into_view_if_needed()
        box = page.locator(selector).bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= 390, selector
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea")]
             .filter((one) => one.checkVisibility() && !one.ariaLabel && !one.textContent.trim() && !one.labels?.length)
             .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    for role, name in (("log", "Conversation"), ("region", "Chat"), ("region", "Figures")):
        assert page.get_by_role(role, name=name).count() == 1, role  # type: ignore[arg-type]
