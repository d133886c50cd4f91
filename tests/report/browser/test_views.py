"""In a browser: times, a step on a GPU, and memory."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from report_view import Show, heading

from ingot.report.data import Report, Times

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("report"), pytest.mark.one_in_file(3)]


def test_times_add_up(show: Show, plain_report: Report) -> None:
    report = replace(
        plain_report,
        times=Times({"trace": 1.5, "passes": 2.25}, {"a" * 64: 0.5, "b" * 64: 1.0}, ("b" * 64,)),
        start_up={"Python": 0.1, "imports": 3.9},
    )
    page = show(report, hash="#tab=time").page
    bars = {text.split("\n")[0]: text for text in page.locator(".panel").all_inner_texts()}
    assert bars.keys() == {"Compile, by phase", "Passes", "Executables built", "Start-up"}
    assert "3.75 s" in bars["Compile, by phase"] and re.search(r"passes\s+2.25 s\s+60.0 %", bars["Compile, by phase"])
    assert "4.00 s" in bars["Start-up"] and "97.5 %" in bars["Start-up"]
    assert "aaaaaaaaaaaa" in bars["Executables built"] and "bbbb" not in bars["Executables built"]
    widths = (
        page.locator(".panel", has_text="Compile, by phase")
        .locator(".stacked > svg rect")
        .evaluate_all("all => all.map(one => one.width.baseVal.value)")
    )
    assert widths == pytest.approx([599, 399])
    rows = page.locator(".panel", has=page.get_by_role("heading", name="Passes", exact=True)).locator("tr").count()
    assert rows == sum(step.seconds is not None for step in report.steps)


def test_what_was_not_recorded_is_said(show: Show, plain_report: Report) -> None:
    steps = tuple(replace(step, seconds=None) for step in plain_report.steps)
    page = show(replace(plain_report, times=Times({}, {}, ()), steps=steps, nodes=()), hash="#tab=time").page
    assert page.get_by_text("not recorded in this artifact").count() == 3
    assert page.get_by_text("ingot report --start-up").count() == 1
    page.get_by_role("tab", name="Nodes").click()
    assert "No pass chose backends" in page.inner_text("#panel-nodes")


def test_a_step_on_a_gpu_is_drawn(show: Show, region_report: Report) -> None:
    opened = show(region_report, hash="#tab=step")
    page, (one, *_) = opened.page, region_report.step_times
    panels = {text.split("\n")[0]: text for text in page.locator("#panel-step .panel").all_inner_texts()}
    assert panels.keys() == {"A step, by kind", "Roofline", "Along the step", "Above the roofline"}
    assert "products 2 calls" in panels["A step, by kind"] and "gaps between calls" in panels["A step, by kind"]
    assert "42 % of the roofline on NVIDIA H200: 1.0 TB/s" in panels["A step, by kind"]
    assert all(gap.closing in panels["Above the roofline"] for gap in one.time.gaps)
    # Every call is as wide as it takes, and the strip below as the roofline asks for.
    widths = page.locator(".along rect").evaluate_all("all => all.map(one => one.width.baseVal.value)")
    total = one.time.predicted
    assert widths == pytest.approx([1000 * s / total for call in one.calls for s in (call.taken, call.roofline)])
    # Equal calls are one point, below the roof: higher is faster, further right more flops a byte.
    points = page.locator(".roofline circle").evaluate_all(
        "all => all.map(one => [one.cx, one.cy].map(at => at.baseVal.value))"
    )
    assert len(points) == len({call[1:] for call in one.calls if call.flops and call.bytes})
    for x, y in points:
        assert 54 <= x <= 640 and 20 <= y <= 286
    page.locator(".along rect").first.click()
    assert one.calls[0].name in page.inner_text(".inspector")
    assert not opened.complaints


def test_without_a_gpu_there_is_no_step_to_draw(show: Show, plain_report: Report) -> None:
    page = show(plain_report, hash="#tab=step").page
    assert "this artifact is not for one" in page.inner_text("#panel-step")


def test_memory_shows_the_groups_of_caches(show: Show, region_report: Report) -> None:
    page = show(region_report, hash="#tab=memory").page
    (group,) = region_report.caches.groups
    rows = page.get_by_role("region", name="Cache groups").locator("tbody tr")
    assert rows.count() == 1
    cells = rows.first.locator("td").all_inner_texts()
    assert cells[:2] == ["full", "every token"] and cells[-1] == "; ".join(group.forms)
    assert cells[3:5] == [str(group.between_steps), str(group.in_step)]


def test_memory_shows_what_lives_at_an_instruction(show: Show, region_report: Report) -> None:
    page = show(region_report, hash="#tab=memory").page
    for one in region_report.memories:
        panel = page.locator(f"[data-bucket={one.bucket}]")
        assert f"Instruction {one.peak} of {len(one.calls) - 1}" in panel.inner_text()
        cursor = panel.get_by_role("slider")
        for at in (0, one.peak, len(one.calls) - 1):
            cursor.fill(str(at))
            alive = [storage.name for storage in one.storages if storage.first <= at <= storage.last]
            shown = panel.locator(".alive .link").all_inner_texts()
            assert len(shown) == min(12, len(alive)) and {name.removeprefix("%") for name in shown} <= set(alive)
            assert one.calls[at] in panel.locator(".at").inner_text()
        cursor.fill("1")
        cursor.press("ArrowRight")
        assert "Instruction 2 " in panel.locator(".at").inner_text()
        box = panel.locator(".curve").bounding_box()
        assert box
        page.mouse.click(box["x"] + box["width"] - 2, box["y"] + 20)
        assert f"Instruction {len(one.calls) - 1} " in panel.locator(".at").inner_text()
    last = region_report.memories[-1]
    panel = page.locator(f"[data-bucket={last.bucket}]")
    panel.locator(".alive .link", has_text=re.compile("^%logits$")).click()
    assert heading(page) == "make-plan" and "logits" in page.inner_text(".inspector")
