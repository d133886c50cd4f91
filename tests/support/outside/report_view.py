"""What tests of the report's page compare: facts of a report, and places on its page."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ingot.report.data import Report, Step
from ingot.report.lines import program_lines

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

Show = Callable[..., Any]
TABS = ("program", "time", "step", "memory", "nodes")


def number_of(report: Report, name: str, bucket: str | None = None) -> int:
    return next(at for at, step in enumerate(report.steps) if (step.name, step.bucket) == (name, bucket))


def lines_of(step: Step) -> dict[str, object]:
    """What a program defines outside its regions, by name, and in them by the region's name and theirs."""
    found: dict[str, object] = {}
    region = ""
    for line in program_lines(step.text):
        if line.kind == "region":
            region = f"{line.name}/"
        elif line.kind == "end":
            region = ""
        elif line.kind not in ("program", "return"):
            found[region + line.name] = line
    return found


def changes(report: Report, number: int) -> dict[str, str]:
    """What a pass did to each node: added, removed, changed."""
    before = report.steps[number].before
    assert before is not None
    old, new = lines_of(report.steps[before]), lines_of(report.steps[number])
    marks = {name: "added" for name in new.keys() - old.keys()} | {name: "removed" for name in old.keys() - new.keys()}
    return marks | {name: "changed" for name in new.keys() & old.keys() if new[name] != old[name]}


def heading(page: Page) -> str:
    return page.inner_text(".pass-view h2").split("\n")[0]


def card(page: Page, title: str) -> Locator:
    return page.locator("article.card", has=page.locator(".title", has_text=re.compile(f"^{re.escape(title)}$")))


def titles(page: Page) -> list[str]:
    return page.locator(".card .title").all_inner_texts()


def shown_rows(within: Page | Locator) -> list[str]:
    return [
        str(stop).removeprefix("node ")
        for stop in within.locator(".row").evaluate_all("rows => rows.map(row => row.dataset.stop)")
    ]


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.dataset.stop ?? document.activeElement.tagName"))


def in_view(page: Page, selector: str) -> bool:
    box = page.locator(selector).bounding_box()
    size = page.viewport_size
    assert box and size
    return bool(box["y"] >= 0 and box["y"] + box["height"] <= size["height"])
