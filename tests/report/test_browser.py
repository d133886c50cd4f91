"""The page in a browser: what is shown is what the report holds, and everything does what it says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ingot.report.data import Report, Step, Times
from ingot.report.lines import program_lines
from ingot.report.page import report_page

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Locator, Page

Show = Callable[..., Any]

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("report")]
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
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


# Passes.


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
    assert slider.get_attribute("aria-valuetext") == f"5 of {len(plain_report.steps) - 1}: merge-linears, FUSED"
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
    number = number_of(region_report, "choose-providers", "decode")
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


# The program.


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


# One node.


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
    page.locator("[data-stop='node add']").click()
    assert "removed" in page.inner_text(".inspector header")
    life = page.locator(".inspector section", has_text="LIFE").locator("li").all_inner_texts()
    assert [one.split() for one in life] == [["added", "traced"], ["removed", "fuse-add-rms-norm"]]
    page.locator(".inspector .link", has_text="%linear_3").first.click()
    assert heading(page) == "fuse-add-rms-norm", "an argument of a removed node that is still there is shown here"
    page.locator("[data-stop='node add']").click()
    page.keyboard.press("ArrowRight")
    assert "Not in the program after this pass" in page.inner_text(".inspector")


def test_a_param_shows_its_recipe_and_its_readers(show: Show, plain_report: Report) -> None:
    number = number_of(plain_report, "merge-linears")
    page = show(plain_report, hash=f"#pass={number}&node=layers.2.attention.q_k_v.weight").page
    recipe = lines_of(plain_report.steps[number])["layers.2.attention.q_k_v.weight"].text  # type: ignore[attr-defined]
    shown = page.locator(".inspector section", has_text="RECIPE").locator("pre").inner_text()
    assert re.sub(r"\s+", "", shown) == re.sub(r"\s+", "", recipe) and "\n" in shown
    assert page.locator(".inspector section", has_text="USERS").locator(".link").count() == 1


# Search and keys.


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


# The other views.


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
    assert "No pass chose providers" in page.inner_text("#panel-nodes")


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
        for name in ("flops", "bytes", "seconds", "layer", "op", "provider")
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
    assert page.locator("th").all_inner_texts() == ["node", "op", "layer", "provider", "refusals"]
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


def test_tabs_answer_to_arrow_keys(show: Show, plain_report: Report) -> None:
    page = show(plain_report).page
    page.get_by_role("tab", name="Program").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-time"
    assert page.locator("#panel-time").is_visible() and not page.locator("#panel-program").is_visible()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.id") == "tab-nodes"


# Looks, and safety.


def test_it_is_light_or_dark_as_the_system_or_the_reader_says(show: Show, plain_report: Report) -> None:
    def brightness(page: Page) -> float:
        colours = page.evaluate("getComputedStyle(document.body).backgroundColor").removeprefix("rgb(").rstrip(")")
        return sum(map(float, colours.split(","))) / 3

    light, dark = show(plain_report).page, show(plain_report, dark=True).page
    assert brightness(light) > 200 and brightness(dark) < 60
    toggle = light.get_by_label("Dark colours")
    assert toggle.get_attribute("aria-pressed") == "false"
    toggle.click()
    assert brightness(light) < 60 and toggle.get_attribute("aria-pressed") == "true"
    light.reload()
    light.wait_for_selector("[role=tab]")
    assert brightness(light) < 60, "the choice stays"


CONTRAST = """
(selector) => {
  const parse = (colour) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => ((c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  return [...document.querySelectorAll(selector)].slice(0, 3).map((element) => {
    let behind = element;
    const ground = () => getComputedStyle(behind).backgroundColor;
    while (behind.parentElement && parse(ground())[3] === 0) behind = behind.parentElement;
    const [one, two] = [getComputedStyle(element).color, ground()].map((colour) => light(parse(colour)));
    return (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
  });
}
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_its_ground(show: Show, region_report: Report, dark: bool) -> None:
    number = number_of(region_report, "form-regions", "extend")
    page = show(region_report, hash=f"#pass={number}&node=region_r1", dark=dark).page
    for selector in (
        *(
            "h1",
            ".about dt",
            ".pass-name",
            ".timeline h3",
            ".facts",
            ".chip.added",
            ".chip.removed",
            ".card-title",
            ".size",
        ),
        *(
            ".count.added",
            ".count.removed",
            ".row .node-name",
            ".row.removed .type",
            ".row.added .type",
            ".string",
            ".quiet",
        ),
        *(".link", ".inspector dt", ".provider", ".tag", ".brand", "[role=tab]"),
    ):
        found = page.evaluate(CONTRAST, selector)
        # WCAG 2.2, 1.4.3: at least 4.5 for text of this size.
        assert found and min(found) >= 4.5, f"{selector}: {found}"


@pytest.mark.parametrize("size", SIZES)
def test_no_view_is_wider_than_the_window(show: Show, region_report: Report, size: str) -> None:
    number = number_of(region_report, "form-regions", "extend")
    page = show(region_report, size=SIZES[size], hash=f"#pass={number}&node=region_r1").page
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    page.get_by_label("Close").click()
    box = page.locator(".program").bounding_box()
    assert box and box["width"] > 0.7 * SIZES[size][0]
    assert page.locator(".timeline").is_visible() == (size == "desktop")
    for tab in TABS:
        page.locator(f"#tab-{tab}").click()
        for selector in (".refusals summary", ".card-title[aria-expanded=false]"):
            for closed in page.locator(selector).all():
                if closed.is_visible():
                    closed.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0], tab
        cut = page.evaluate(
            """() => [...document.querySelectorAll("main *")]
                 .filter((one) => one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".scroll, .row"))
                 .map((one) => one.outerHTML.slice(0, 120))"""
        )
        assert cut == [], tab


def test_everything_that_can_be_pressed_has_a_name_and_a_role(show: Show, region_report: Report) -> None:
    number = number_of(region_report, "form-regions", "extend")
    page = show(region_report, hash=f"#pass={number}&node=region_r1").page
    for tab in TABS:
        page.locator(f"#tab-{tab}").click()
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, select")]
                 .filter((one) => one.checkVisibility() && !one.ariaLabel && !one.textContent.trim())
                 .map((one) => one.outerHTML)"""
        )
        assert nameless == []
    page.locator("#tab-program").click()
    for role, name in (("navigation", "Passes"), ("slider", "Pass"), ("complementary", "Node"), ("tablist", "Views")):
        assert page.get_by_role(role, name=name).count() == 1, role  # type: ignore[arg-type]
    assert page.get_by_role("listbox").count() > 1 and page.get_by_role("option", name="region_r1, added").count() == 1


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
    rows = tuple(replace(row, op=evil, provider=evil, refusals=(evil,)) for row in plain_report.nodes[0].rows)
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
