"""In a browser: search, keys, and the address that keeps the place."""

from __future__ import annotations

import pytest
from report_view import Show, card, focused, heading, lines_of, number_of, shown_rows, titles

from ingot.report.data import Report

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("report"), pytest.mark.one_in_file(3)]


def test_search_shows_only_what_it_finds(show: Show, plain_report: Report) -> None:
    number = number_of(plain_report, "insert-paged-kv")
    page = show(plain_report, hash=f"#pass={number}").page
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.type("ingot.rope")
    found = [name for name, line in lines_of(plain_report.steps[number]).items() if line.op == "ingot.rope"]  # type: ignore[attr-defined]
    assert page.inner_text(".program .status") == f"{len(found)} nodes with “ingot.rope”"
    assert titles(page) == ["Layers 0–4"] and shown_rows(page) == found[:2]
    page.get_by_label("Search nodes").fill("layers.3 gate")
    assert titles(page) == ["Layer 3"], "a search that wants one layer unfolds it"
    assert shown_rows(page) == ["linear_25", "layers.3.mlp.gate.weight"]
    page.get_by_label("Search nodes").fill("no such node")
    assert page.inner_text(".program .status") == "No node with “no such node” after this pass."
    page.keyboard.press("Escape")
    assert page.get_by_label("Search nodes").input_value() == "" and len(titles(page)) > 3


def test_keys_go_through_nodes_and_open_them(show: Show, plain_report: Report) -> None:
    page = show(plain_report, hash="#pass=0").page
    page.keyboard.press("/")
    page.keyboard.type("silu")
    page.keyboard.press("Enter")
    assert focused(page) == "node silu_mul"
    page.keyboard.press("Enter")
    assert page.inner_text(".inspector h2") == "silu_mul"
    page.keyboard.press("Escape")
    assert not page.locator(".inspector").is_visible() and focused(page) == "node silu_mul"
    page.keyboard.press("Escape")
    assert page.get_by_label("Search nodes").input_value() == ""
    rows = shown_rows(card(page, "Layers 0–4"))
    page.locator(f"[data-stop='node {rows[0]}']").focus()
    for key, at in (("j", 1), ("ArrowDown", 2), ("k", 1), ("ArrowUp", 0)):
        page.keyboard.press(key)
        assert focused(page) == f"node {rows[at]}"
    page.keyboard.press("k")
    assert focused(page).startswith("card layer 0")
    page.keyboard.press("Enter")
    assert card(page, "Layers 0–4").locator(".row").count() == 0 and focused(page).startswith("card layer 0")


def test_the_focus_is_seen_and_stays_on_its_node(show: Show, plain_report: Report) -> None:
    page = show(plain_report, hash=f"#pass={number_of(plain_report, 'insert-paged-kv')}").page
    page.locator("[data-stop='node linear_3']").focus()
    page.keyboard.press("j")
    page.keyboard.press("k")
    style = page.evaluate(
        "getComputedStyle(document.activeElement).outlineStyle + getComputedStyle(document.activeElement).outlineWidth"
    )
    assert style == "solid2px"
    page.keyboard.press("ArrowRight")
    assert focused(page) == "node linear_3"


def test_the_address_keeps_the_place(show: Show, plain_report: Report) -> None:
    page = show(plain_report).page
    page.get_by_role("slider", name="Pass").fill("4")
    page.locator(".row").first.click()
    page.get_by_role("tab", name="Time").click()
    where = page.evaluate("location.hash")
    assert where.startswith("#tab=time&pass=4&node=")
    again = show(plain_report, hash=where).page
    assert again.get_by_role("tab", name="Time").get_attribute("aria-selected") == "true"
    again.get_by_role("tab", name="Program").click()
    assert heading(again) == plain_report.steps[4].name
    nowhere = show(plain_report, hash="#tab=none&pass=99&node=nothing").page
    assert heading(nowhere) == "insert-paged-kv"
    assert "Not in the program" in nowhere.inner_text(".inspector")


def test_tabs_answer_to_arrow_keys(show: Show, plain_report: Report) -> None:
    page = show(plain_report).page
    page.get_by_role("tab", name="Program").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-time"
    assert page.locator("#panel-time").is_visible() and not page.locator("#panel-program").is_visible()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.id") == "tab-nodes"
