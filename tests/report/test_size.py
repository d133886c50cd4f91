"""A deep model's report: small enough to send, and on the screen at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tiny import TINY

from ingot import compile_model
from ingot.report.data import read_report
from ingot.report.page import report_page
from ingot.runtime.loading.artifact import open_artifact

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("report"), pytest.mark.slow]

LAYERS = 80
MOST_BYTES = 5_000_000
MOST_SECONDS = 1.0  # to the first paint, and to the first pass as it can be read and used


def test_80_layers_are_small_and_quick(browser: Browser, tmp_path: Path) -> None:
    checkpoint = TINY["qwen3-scaled"].write(tmp_path / "checkpoint", num_hidden_layers=LAYERS)
    compile_model(checkpoint, tmp_path / "deep.ingot", backend="reference", max_seq_len=160)
    page = report_page(read_report(open_artifact(tmp_path / "deep.ingot"))).encode()
    (tmp_path / "deep.html").write_bytes(page)
    assert len(page) <= MOST_BYTES
    best = (float("inf"), float("inf"))
    for _ in range(3):  # other work on the machine shows, so the best of three attempts counts
        tab = browser.new_page()
        tab.goto((tmp_path / "deep.html").as_uri())
        tab.wait_for_selector(".card")
        assert tab.locator(".card .title", has_text=f"Layers 0–{LAYERS - 1}").count() == 1
        tab.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
        paint, ready = tab.evaluate(
            "['first-contentful-paint', 'ready'].map((name) => performance.getEntriesByName(name)[0].startTime / 1000)"
        )
        best = min(best, (paint, ready), key=max)
        tab.close()
    print(f"{LAYERS} layers: {len(page)} bytes, first paint after {best[0]:.3f} s, first pass after {best[1]:.3f} s")
    assert max(best) <= MOST_SECONDS
