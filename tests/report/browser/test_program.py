"""In a browser: the program after a pass, its cards, and what is marked on them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from report_view import Show, card, changes, lines_of, number_of, shown_rows, titles

from ingot.report.data import Report

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("report"), pytest.mark.one_in_file(3)]


def test_added_removed_and_changed_nodes_are_marked(show: Show, plain_report: Report) -> None:
    number = number_of(plain_report, "fuse-add-rms-norm")
    page = show(plain_report, hash=f"#pass={number}").page
    expected = changes(plain_report, number)
    layer = card(page, "Layer 0")
    shown = {
        name: next((mark for mark in ("added", "removed", "changed") if mark in classes.split()), None)
        for name, classes in zip(
            shown_rows(layer), layer.locator(".row").evaluate_all("rows => rows.map(row => row.className)"), strict=True
        )
    }
    assert {name: mark for name, mark in shown.items() if mark} == {
        name: mark for name, mark in expected.items() if name in shown
    }
    assert {"added", "removed", "changed", None} == set(shown.values())
    assert layer.locator(".row.removed .mark").first.inner_text() == "−"
    # A removed node stands where it stood: behind the node that came before it.
    rows = shown_rows(layer)
    assert rows.index("add") == rows.index("linear_3") + 1


def test_layers_that_are_equal_but_for_names_are_one_card(show: Show, plain_report: Report) -> None:
    page = show(plain_report, hash=f"#pass={number_of(plain_report, 'insert-paged-kv')}").page
    assert [title for title in titles(page) if "ayer" in title] == [
        "Before the layers",
        "Layers 0–4",
        "After the layers",
    ]
    # Once norms are fused, the first layer's norm has no sum in front of it, and the last one's comes after the layers.
    page.get_by_role("slider", name="Pass").fill(str(number_of(plain_report, "fuse-add-rms-norm")))
    folded = [title for title in titles(page) if title.startswith("Layer")]
    assert folded == ["Layer 0", "Layers 1–3", "Layer 4"]
    equal = card(page, "Layers 1–3")
    assert equal.locator(".times").inner_text() == "× 3"
    assert equal.locator(".picker option").all_inner_texts() == ["1", "2", "3"]


def test_layers_that_a_pass_changed_otherwise_are_not_folded(show: Show, plain_report: Report) -> None:
    traced, cse = plain_report.steps[0], plain_report.steps[1]
    other = re.sub(r"(%silu_mul_2 = ingot)\.silu_mul", r"\1.other_mul", traced.text)
    assert other != traced.text
    report = replace(plain_report, steps=(replace(traced, text=other), replace(cse, text=traced.text)), nodes=())
    page = show(report, hash="#pass=1").page
    assert [title for title in titles(page) if title.startswith("Layer")] == ["Layers 0–1, 3–4", "Layer 2"]
    assert shown_rows(page) and page.locator(".row.changed .node-name").all_inner_texts() == ["silu_mul_2"]


def test_a_folded_card_shows_any_of_its_layers(show: Show, plain_report: Report) -> None:
    number = number_of(plain_report, "fuse-add-rms-norm")
    page = show(plain_report, hash=f"#pass={number}").page
    lines = lines_of(plain_report.steps[number])
    equal = card(page, "Layers 1–3")
    for layer, turn in ((1, None), (2, "Next layer"), (3, "Next layer"), (2, "Previous layer")):
        if turn:
            equal.get_by_label(turn).click()
        calls = [name for name in shown_rows(equal) if name in lines]
        assert {lines[name].layer for name in calls} == {layer}  # type: ignore[attr-defined]
        assert calls == [name for name in calls if name in lines], "all of them are in the program"
    equal.get_by_label("Layer shown").select_option("3")
    assert equal.locator(".picker select").input_value() == "2"


def test_nodes_are_made_when_their_card_is_opened(show: Show, plain_report: Report) -> None:
    page = show(plain_report, hash="#pass=0").page
    closed = card(page, "After the layers")
    toggle = closed.locator(".card-title")
    assert closed.locator(".row").count() == 0 and toggle.get_attribute("aria-expanded") == "false"
    toggle.click()
    assert closed.locator(".row").count() == 4 and toggle.get_attribute("aria-expanded") == "true"
    toggle.click()
    assert closed.locator(".row").count() == 0


def test_regions_have_cards_of_their_own(show: Show, region_report: Report) -> None:
    number = number_of(region_report, "form-regions", "extend")
    page = show(region_report, hash=f"#pass={number}&node=region_r1").page
    bodies = re.findall(r"^region (\w+)", region_report.steps[number].text, re.MULTILINE)
    assert [title for title in titles(page) if title.startswith("Region")] == [f"Region {name}" for name in bodies]
    page.get_by_role("button", name="body of region r1").click()
    assert card(page, "Region r1").locator(".row[aria-selected=true]").count() == 1
    assert page.inner_text(".inspector dd:has(code)")
    assert "r1" in page.locator(".inspector dl").inner_text()
    # A region's body reads its own inputs, of which every region has one of the same name.
    page.locator(".inspector .link", has_text="%in0").first.click()
    assert page.inner_text(".inspector h2") == "r1/in0"
