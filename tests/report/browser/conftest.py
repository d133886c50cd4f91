"""Opens reports in a browser, and listens to what their pages complain about and ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from ingot.report.data import Report

DESKTOP = 1280, 900


@dataclass
class Opened:
    """A page that is open, what it complained about, and what it asked for beside its own file."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Report], Path]:
    """The page of a report as a file, written once for each."""
    from ingot.report.page import report_page

    folder = tmp_path_factory.mktemp("pages")
    made: dict[int, tuple[Report, Path]] = {}

    def get(report: Report) -> Path:
        if id(report) not in made:
            made[id(report)] = report, folder / f"{len(made)}.html"
            made[id(report)][1].write_text(report_page(report))
        return made[id(report)][1]

    return get


@pytest.fixture
def show(browser: Browser, file_of: Callable[[Report], Path]) -> Iterator[Callable[..., Opened]]:
    """Opens a report from a file, `show(report, size=DESKTOP, hash="", dark=False)`; at the end it must have been
    silent."""
    shown: list[Opened] = []

    def open_report(
        report: Report, size: tuple[int, int] = DESKTOP, hash: str = "", dark: bool = False, **options: Any
    ) -> Opened:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light", **options
        )
        opened = Opened(context.new_page())
        opened.page.set_default_timeout(5000)
        opened.page.on("console", lambda message: opened.complaints.append(message.text))
        opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(f"{file_of(report).as_uri()}{hash}")
        opened.page.wait_for_selector("[role=tab]")
        shown.append(opened)
        return opened

    yield open_report
    for opened in shown:
        own = opened.page.url.partition("#")[0]
        opened.page.context.close()
        assert opened.complaints == []
        assert {url.partition("#")[0] for url in opened.requests} == {own}
