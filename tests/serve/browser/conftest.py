"""Opens the server's page in a browser, and listens to what it complains about and which servers it sends requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DESKTOP = 1280, 900


@dataclass
class Opened:
    """A page that is open, its complaints, and the URLs of its requests. A test removes complaints that it expects."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Types a text and sends it."""
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def answer(self) -> str:
        """The text of the last answer, after it has ended."""
        self.page.wait_for_selector(".turn:last-child .facts:not(:empty)")
        return self.page.locator(".turn .text").last.inner_text()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Opened]]:
    """Opens a server's page, `visit(url, size=DESKTOP, dark=False)`. At the end it must have been silent, with requests
    to no other server. `before` gets the page before it is loaded."""
    visited: list[tuple[str, Opened]] = []

    def open_page(
        url: str,
        size: tuple[int, int] = DESKTOP,
        dark: bool = False,
        before: Callable[[Page], None] | None = None,
        **options: Any,
    ) -> Opened:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light", **options
        )
        opened = Opened(context.new_page())
        opened.page.set_default_timeout(10_000)
        opened.page.on("console", lambda message: opened.complaints.append(message.text))
        opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        if before is not None:
            before(opened.page)
        opened.page.goto(url)
        visited.append((url, opened))
        return opened

    yield open_page
    for url, opened in visited:
        opened.page.context.close()
        assert opened.complaints == []
        assert {urlsplit(one).netloc for one in opened.requests} == {urlsplit(url).netloc}
