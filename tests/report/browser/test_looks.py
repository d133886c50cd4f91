"""In a browser: colours, widths, and names for whoever cannot see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from contrast import contrasts
from report_view import TABS, Show, number_of

from ingot.report.data import Report

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("report"), pytest.mark.one_in_file(3)]
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


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
        *(".link", ".inspector dt", ".backend", ".tag", ".brand", "[role=tab]"),
    ):
        found = contrasts(page, selector)
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
