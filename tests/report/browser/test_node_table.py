"""In a browser: the table of all nodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from report_view import Show, card, heading

from ingot.report.data import Report

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("report"), pytest.mark.one_in_file(3)]


def test_the_table_of_nodes_sorts_by_every_column(show: Show, region_report: Report) -> None:
    table = region_report.nodes[0]
    rows = tuple(
        replace(row, bytes=None if row.bytes == 0 else row.bytes, region="region_r0" if at % 5 == 4 else "")
        for at, row in enumerate(table.rows)
    )
    page = show(replace(region_report, nodes=(replace(table, rows=rows),)), hash="#tab=nodes").page
    whole = [row for row in rows if not row.region]
    assert page.locator(".nodes .status").inner_text() == (
        f"{len(rows)} nodes, {sum(row.flops or 0 for row in whole) / 1000:.3g} k flops, "
        f"{sum(row.bytes or 0 for row in whole) / 1000:.1f} kB"
    )
    assert "a step of 16 tokens, 16 sequences of 128 positions; seconds are of 1, 5 tokens" in page.inner_text(
        ".nodes .controls"
    )
    values: dict[str, Callable[[Any], Any]] = {
        name: lambda row, name=name: getattr(row, name)
        for name in ("flops", "bytes", "seconds", "layer", "op", "backend")
    } | {name: lambda row, name=name: len(getattr(row, name)) for name in ("candidates", "refusals")}
    assert page.locator("th").count() == len(values) + 1
    by_name = {row.name: row for row in rows}
    for column, value in values.items():
        head = page.locator("th", has_text=re.compile(f"^{column}$"))
        directions = set()
        for _ in range(2):
            head.get_by_role("button").click()
            shown = page.locator("td[data-column=node] .link").all_inner_texts()
            found = [value(by_name[name.removeprefix("%")]) for name in shown]
            known = [one for one in found if one is not None]
            assert found == known + [None] * (len(found) - len(known)), "what is not known comes last"
            directions.add(head.get_attribute("aria-sort"))
            assert known == sorted(known, reverse=head.get_attribute("aria-sort") == "descending")
        assert directions == {"ascending", "descending"}
    assert [head.get_attribute("aria-sort") for head in page.locator("th").all()].count("none") == len(values)


def test_columns_without_anything_in_them_are_left_out(show: Show, plain_report: Report) -> None:
    table = plain_report.nodes[0]
    rows = tuple(replace(row, flops=None, bytes=None, seconds=None, candidates=()) for row in table.rows)
    page = show(replace(plain_report, nodes=(replace(table, rows=rows),)), hash="#tab=nodes").page
    assert page.locator("th").all_inner_texts() == ["node", "op", "layer", "backend", "refusals"]
    page = show(plain_report, hash="#tab=nodes").page
    assert {"flops", "bytes", "candidates"} < set(page.locator("th").all_inner_texts())


def test_a_long_table_is_shown_in_portions(show: Show, plain_report: Report) -> None:
    (table,) = plain_report.nodes
    rows = tuple(replace(table.rows[0], name=f"n{at}", key=f"n{at}") for at in range(450))
    page = show(replace(plain_report, nodes=(replace(table, rows=rows),)), hash="#tab=nodes").page
    for shown, more in ((200, "Show 200 more of 250"), (400, "Show 50 more of 50"), (450, None)):
        assert page.locator("tbody tr").count() == shown
        if more:
            page.get_by_role("button", name=more).click()
    assert not page.locator(".more").is_visible()


def test_the_table_of_nodes_filters_and_leads_to_the_program(show: Show, region_report: Report) -> None:
    page = show(region_report, hash="#tab=nodes").page
    buckets = page.get_by_label("Bucket class").locator("option").all_inner_texts()
    assert buckets == ["decode", "extend"]
    page.get_by_label("Bucket class").select_option("extend")
    page.get_by_label("Filter nodes").fill("ingot.linear layer 0")
    wanted = [row for row in region_report.nodes[1].rows if row.op == "ingot.linear" and row.layer == 0]
    shown = page.locator("td[data-column=node] .link").all_inner_texts()
    assert [name.removeprefix("%") for name in shown] == [row.name for row in wanted] and wanted
    page.get_by_label("Filter nodes").fill(f"{wanted[0].name} {wanted[0].region}")
    page.locator("td[data-column=node] .link").first.click()
    assert heading(page) == "make-plan" and page.inner_text(".inspector h2") == wanted[0].key
    assert card(page, f"Region {wanted[0].key.split('/')[0]}").locator(".row[aria-selected=true]").count() == 1
