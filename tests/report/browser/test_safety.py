"""In a browser: what an artifact says is text and never script, and the page asks for nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from report_view import TABS, Show, card, number_of

from ingot.report.data import Report, Times
from ingot.report.page import report_page

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("report")]


def test_hostile_names_stay_names(show: Show, plain_report: Report) -> None:
    evil = '<img src=x onerror="window.hacked=1"></script><script>window.hacked=1</script>'
    escaped = evil.replace('"', '\\"')
    number = number_of(plain_report, "merge-linears")
    step = plain_report.steps[number]
    text = re.sub(r'source\(name="', f'source(name="{escaped}', step.text)
    text = re.sub(r"  # layer 0, .*", f"  # layer 0, {evil}", text)
    hostile = replace(
        step, name=evil, text=text, options={evil: evil}, refusals=((evil, evil),), op_count_diff={evil: 1}
    )
    steps = (*plain_report.steps[:number], hostile)
    rows = tuple(replace(row, op=evil, backend=evil, refusals=(evil,)) for row in plain_report.nodes[0].rows)
    nodes = (replace(plain_report.nodes[0], step=number, basis=evil, rows=rows),)
    report = replace(plain_report, title=evil, steps=steps, nodes=nodes, times=Times({evil: 1.0}, {}, ()))
    page = show(report, hash=f"#pass={number}").page
    assert evil in page.inner_text("h1")
    page.locator(".refusals summary").click()
    page.locator(".row.call", has_text="rms_norm").first.click()
    assert evil in page.inner_text(".inspector")
    card(page, "Layer 0").locator(".row.param:not(.removed)").first.click()
    assert "onerror" in page.locator(".inspector section", has_text="RECIPE").inner_text()
    page.get_by_label("Search nodes").fill(evil)
    for tab in TABS:
        page.locator(f"#tab-{tab}").click()
        assert page.locator("img").count() == 0 and page.locator("main script").count() == 0
    assert page.evaluate("window.hacked") is None


def test_a_browser_that_is_too_old_is_told(browser: Browser, plain_report: Report, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(report_page(plain_report))
    page = browser.new_page()
    page.add_init_script("delete window.DecompressionStream")
    page.goto((tmp_path / "report.html").as_uri())
    page.get_by_text("needs a browser of 2024").wait_for()
    assert "DecompressionStream is not defined" in page.inner_text("main")
    page.close()


def test_the_page_asks_for_nothing_and_could_not(show: Show, plain_report: Report) -> None:
    opened = show(plain_report, offline=True)
    page = opened.page
    for tab in TABS:
        page.locator(f"#tab-{tab}").click()
    assert [url.partition("#")[0] for url in opened.requests] == [page.url.partition("#")[0]]
    blocked = page.evaluate(
        """() => new Promise((done) => {
             document.addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
             fetch("https://ingot.invalid/").catch(() => {});
           })"""
    )
    assert blocked == "connect-src"
    opened.complaints.clear()
    opened.requests[1:] = []
