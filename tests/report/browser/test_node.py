"""In a browser: what is said of one node."""

from __future__ import annotations

import re

import pytest
from report_view import Show, card, heading, in_view, lines_of, number_of

from ingot.report.data import Report

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("report"), pytest.mark.one_in_file(3)]


def test_a_node_tells_all_about_itself(show: Show, plain_report: Report) -> None:
    number = number_of(plain_report, "fuse-add-rms-norm")
    page = show(plain_report, hash=f"#pass={number}").page
    line = lines_of(plain_report.steps[number])["add_rms_norm"]
    page.locator("[data-stop='node add_rms_norm']").click()
    text = page.inner_text(".inspector")
    for part in (line.origin, line.type, "add_rms_norm", "added"):  # type: ignore[attr-defined]
        assert part in text
    arguments = page.locator(".inspector section", has_text="ARGUMENTS").locator("li").all_inner_texts()
    assert [one.split()[0] for one in arguments] == line.text.replace(",", "").split()  # type: ignore[attr-defined]
    readers = [
        name
        for name, other in lines_of(plain_report.steps[number]).items()
        if re.search(r"%add_rms_norm\b", other.text)
    ]  # type: ignore[attr-defined]
    users = page.locator(".inspector section", has_text="USERS").locator(".link").all_inner_texts()
    assert users == [f"%{name}" for name in readers] and readers
    page.locator(".inspector .link", has_text=users[0]).click()
    assert page.inner_text(".inspector h2") == readers[0]
    assert page.locator(".row[aria-selected=true]").get_attribute("data-stop") == f"node {readers[0]}"


def test_a_link_to_another_layer_turns_a_folded_card_to_it(show: Show, plain_report: Report) -> None:
    number = number_of(plain_report, "insert-paged-kv")
    page = show(plain_report, hash=f"#pass={number}&node=rms_norm_13").page
    assert lines_of(plain_report.steps[number])["rms_norm_13"].layer == 3  # type: ignore[attr-defined]
    assert card(page, "Layers 0–4").get_by_label("Layer shown").input_value() == "3"
    assert in_view(page, ".row[aria-selected=true]")


def test_changed_removed_and_absent_nodes_say_so(show: Show, plain_report: Report) -> None:
    number = number_of(plain_report, "fuse-add-rms-norm")
    page = show(plain_report, hash=f"#pass={number}").page
    page.locator(".row.changed").first.click()
    assert "BEFORE THIS PASS" in page.inner_text(".inspector")
    page.locator("[data-stop='node add_1']").click()
    assert "removed" in page.inner_text(".inspector header")
    life = page.locator(".inspector section", has_text="LIFE").locator("li").all_inner_texts()
    assert [one.split() for one in life] == [["added", "traced"], ["removed", "fuse-add-rms-norm"]]
    page.locator(".inspector .link", has_text="%linear_6").first.click()
    assert heading(page) == "fuse-add-rms-norm", "an argument of a removed node that is still there is shown here"
    page.locator("[data-stop='node add_1']").click()
    page.keyboard.press("ArrowRight")
    assert "Not in the program after this pass" in page.inner_text(".inspector")


def test_a_param_shows_its_recipe_and_its_readers(show: Show, plain_report: Report) -> None:
    number = number_of(plain_report, "merge-linears")
    page = show(plain_report, hash=f"#pass={number}&node=layers.2.attention.q_k_v.weight").page
    recipe = lines_of(plain_report.steps[number])["layers.2.attention.q_k_v.weight"].text  # type: ignore[attr-defined]
    shown = page.locator(".inspector section", has_text="RECIPE").locator("pre").inner_text()
    assert re.sub(r"\s+", "", shown) == re.sub(r"\s+", "", recipe) and "\n" in shown
    assert page.locator(".inspector section", has_text="USERS").locator(".link").count() == 1
