"""Measure how long the server's page takes in a browser: to its first paint, and until it can chat.

    python benchmarks/first_paint.py models/pico [--tries 5] [--json FILE]

It needs playwright and Chromium. Each try opens the page in a context of its own, so nothing is cached. Times begin
with the navigation, as the browser reports them.
"""

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from http_servers import HOST, free_port, ingot_command, running
from results import Figure, add_json_option, report

_START_SECONDS = 600.0  # a checkpoint is compiled first
# A container has neither a display nor the rights that Chromium's sandbox needs.
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu")
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an artifact or a checkpoint, as for `ingot serve`")
    parser.add_argument("--tries", type=int, default=5)
    add_json_option(parser)
    options = parser.parse_args()
    port = free_port()
    command = ingot_command(options.model, port)
    with tempfile.TemporaryDirectory() as folder:
        server = running(command, port, env={}, timeout=_START_SECONDS, log=Path(folder) / "log")
        with server, browser() as opened:
            tries = [visit(opened, f"http://{HOST}:{port}/") for _ in range(options.tries)]
    paints, usable = zip(*tries, strict=True)
    figures = {
        "first_paint": Figure(value=min(paints), unit="s", what="to the first paint of the page", values=paints),
        "usable": Figure(value=min(usable), unit="s", what="until a message can be sent", values=usable),
    }
    report(__file__, options.json, {"model": options.model.name, "tries": options.tries}, figures)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Yield playwright's Chromium. Raises SystemExit if it is not installed."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        sys.exit("there is no Chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        yield opened
        opened.close()


def visit(opened: Any, url: str) -> tuple[float, float]:
    """Open the page. Return the seconds to its first paint, and until its button to send is enabled."""
    page = opened.new_context().new_page()
    page.goto(url)
    page.wait_for_selector("#send:enabled")
    usable = page.evaluate("performance.now()")
    page.wait_for_timeout(100)  # the entry of a paint may follow it
    paint = page.evaluate(_PAINT)
    page.context.close()
    return paint / 1000, usable / 1000


if __name__ == "__main__":
    main()
