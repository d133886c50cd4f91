"""`ingot report`: write the record of a compile as one page for a browser, which needs no network."""

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ingot.cli.commands import ArtifactFolder, Flag, Variant
from ingot.cli.console import console, size_text
from ingot.ir.errors import OutputError


def report_artifact(
    artifact: ArtifactFolder,
    /,
    *,
    output: Annotated[str, Parameter(name=("--output", "-o"))],
    start_up: Flag = False,
    variant: Variant = None,
) -> None:
    """Write the record of a compile as one page for a browser: passes, programs, times, memory, backends.

    Parameters
    ----------
    output
        The page to write, NAME.html. An existing page is replaced.
    start_up
        Start the artifact on this machine up to a first token, and show the seconds of each phase.
    """
    from ingot.report.data import read_report
    from ingot.report.page import report_page
    from ingot.report.start_up import measure_start_up
    from ingot.runtime.loading.artifact import open_artifact

    path = Path(output)
    if path.suffix.lower() not in (".html", ".htm"):
        raise OutputError(f"'{output}' is not the name of a page", where="--output", expected="NAME.html")
    opened = open_artifact(artifact, variant=variant)
    report = read_report(opened, measure_start_up(opened.folder) if start_up else None)
    page = report_page(report).encode()
    _write(path, page)
    console().print(f"Wrote {output} ({size_text(len(page))})", markup=False, soft_wrap=True)


def _write(path: Path, data: bytes) -> None:
    """Write the file atomically: first to a hidden file in the same folder, then rename it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with partial.open("xb") as file:
                file.write(data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}", where="--output") from error
