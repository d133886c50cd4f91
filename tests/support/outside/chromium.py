"""The browser of the tests: where it is, and how it starts."""

import shutil

# Without a display, a sandbox (which needs rights that containers lack), a GPU, or anything that calls home.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium_path() -> str | None:
    """Where Chromium is, None where it is not; systems name it differently."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
