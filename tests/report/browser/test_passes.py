"""In a browser: the passes, what each did, and the ways through them."""

from __future__ import annotations

from collections import Counter

import pytest
from report_view import Show, changes, heading, number_of

from ingot.report.data import Report

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("report"), pytest.mark.one_in_file(3)]


def test_it_opens_at_the_first_pass_that_did_something(show: Show, plain_report: Report) -> None:
    page = show(plain_report).page
    first = next(
        at for at, step in enumerate(plain_report.steps) if step.before is not None and changes(plain_report, at)
    )
    assert heading(page) == plain_report.steps[first].name == "insert-paged-kv"
    assert page.locator(".pass").count() == len(plain_report.steps)
    assert page.inner_text(".pass[aria-current=step] .pass-name") == "insert-paged-kv"
    assert page.inner_text("h1") == "Qwen3ForCausalLM"
    assert page.title() == "Qwen3ForCausalLM – Ingot report"


def test_every_pass_shows_what_its_record_says(show: Show, region_report: Report) -> None:
    page = show(region_report, hash="#pass=0").page
    for number, step in enumerate(region_report.steps):
        if number:
            page.get_by_label("Next pass").click()
        assert heading(page) == step.name
        text = page.inner_text(".pass-view")
        assert (step.bucket or "") in text
        if step.before is None:
            continue
        assert f"leads to {step.stage}" in text and str(step.numerics) in text
        assert f"{step.matches} match" in text
        marks = Counter(changes(region_report, number).values())
        signs = {"added": "+", "removed": "−", "changed": "~"}
        expected = [f"{signs[mark]}{marks[mark]}" for mark in signs if marks[mark]]
        assert page.locator(".ops .count").all_inner_texts() == expected
        assert page.locator(".pass").nth(number).locator(".count").all_inner_texts() == expected
        chips = page.locator(".chip").all_inner_texts()
        assert sorted(chips) == sorted(
            f"{'+' if by > 0 else '−'}{abs(by)} {op}" for op, by in (step.op_count_diff or {}).items() if marks
        )
    assert page.get_by_label("Next pass").is_disabled()


def test_the_slider_goes_through_passes(show: Show, plain_report: Report) -> None:
    page = show(plain_report, hash="#pass=0").page
    slider = page.get_by_role("slider", name="Pass")
    assert heading(page) == "traced" and page.get_by_label("Previous pass").is_disabled()
    slider.fill("5")
    assert heading(page) == plain_report.steps[5].name
    assert slider.get_attribute("aria-valuetext") == f"5 of {len(plain_report.steps) - 1}: insert-ending, CACHED"
    slider.press("ArrowRight")
    assert heading(page) == plain_report.steps[6].name
    page.locator(".pass").nth(2).click()
    assert heading(page) == plain_report.steps[2].name and slider.input_value() == "2"
    assert "stays as it was" in page.inner_text(".pass-view")


def test_left_and_right_go_through_passes(show: Show, plain_report: Report) -> None:
    page = show(plain_report, hash="#pass=1").page
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert heading(page) == plain_report.steps[3].name
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    assert heading(page) == "traced"
    page.get_by_label("Search nodes").press("ArrowRight")
    assert heading(page) == "traced", "arrows belong to a text field that has the focus"


def test_refusals_of_a_pass_are_listed_by_reason(show: Show, region_report: Report) -> None:
    number = number_of(region_report, "choose-backends", "decode")
    page = show(region_report, hash=f"#pass={number}").page
    refusals = region_report.steps[number].refusals
    reasons = Counter(reason for _, reason in refusals)
    summary = page.locator(".refusals summary")
    assert summary.inner_text() == f"{len(refusals)} refusals, {len(reasons)} reason{'s' * (len(reasons) > 1)}"
    assert page.locator(".refusals li").count() == 0, "made when it is opened"
    summary.click()
    page.locator(".refusals li").first.wait_for()
    assert page.locator(".refusals .reason").all_inner_texts() == [
        f"{count} × {reason}" for reason, count in reasons.most_common()
    ]
    page.locator(".refusals .link").first.click()
    assert page.inner_text(".inspector h2") == page.locator(".refusals .link").first.inner_text().removeprefix("%")


def test_rewrites_lead_from_what_they_replaced_to_what_they_made(show: Show, plain_report: Report) -> None:
    number = number_of(plain_report, "fuse-add-rms-norm")
    step = plain_report.steps[number]
    page = show(plain_report, hash=f"#pass={number}").page
    summary = page.locator(".rewrites summary")
    assert summary.inner_text() == f"{step.matches} rewrites"
    summary.click()
    rows = page.locator(".rewrites li")
    rows.first.wait_for()
    assert [[link.removeprefix("%") for link in row.locator(".link").all_inner_texts()] for row in rows.all()] == [
        [anchor, *made] for anchor, made in step.rewrites
    ]
    rows.first.locator(".link").last.click()
    assert page.inner_text(".inspector h2") == step.rewrites[0][1][-1]
    assert "added" in page.inner_text(".inspector header")
    assert rows.count() == step.matches, "it stays open"
