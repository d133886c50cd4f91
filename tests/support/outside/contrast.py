"""How well text on a page stands out from its ground."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

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


def contrasts(page: Page, selector: str) -> list[float]:
    """The contrast by WCAG 2.2 of the first three elements that a selector finds; 1 is none, 21 the most."""
    found: list[float] = page.evaluate(CONTRAST, selector)
    return found
