"""docs/benchmarks.md and its plots, made from benchmarks/results. Importing this needs benchmarks/ on the path."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bars import bars
from gpu_page import SHAPES, device_of, gpu_sections, missing, provenance, sequences, shown
from http_page import http_sections, is_http
from kernel_page import SCRIPTS, kernel_kind, kernel_section
from markdown_table import table
from mesh_page import TITLE as MESH_TITLE
from mesh_page import mesh_section
from natural_order import natural_order as _ordered
from quality_page import TITLE, quality_section
from results import RESULTS, Figure, Result, read_result
from transmla_page import TITLE as TRANSMLA_TITLE
from transmla_page import transmla_section
from units import quantity

BENCHMARKS = RESULTS.parent
HEAD = """\
# Benchmarks

`make docs` writes this page from [benchmarks/results](../benchmarks/results). Times are the least of several tries:
other work on a machine only adds to them. Absolute numbers hold for one machine, so compare figures of one session. A
machine with a GPU shares its host's processors with other work, so host times vary most between sessions.
"""
Plots = Mapping[str, str]


def benchmark_page() -> tuple[str, Plots]:
    """Return the text of docs/benchmarks.md, and its plots by their paths in docs/."""
    found = [read_result(path) for path in sorted(RESULTS.glob("*.json"))]
    return page(found)


def page(results: Sequence[Result]) -> tuple[str, Plots]:
    """Return the page of these results: engines by GPU, servers, kernels, then other benchmarks."""
    plots: dict[str, str] = {}
    lines = [HEAD]
    by_name = sorted(results, key=lambda one: one.name)
    # Engines first, then the decode steps of decode.py, which have no peers.
    engines = [one for script in ("gpu.py", "decode.py") for one in by_name if one.script == script and _shape(one)]
    for device in dict.fromkeys(device_of(one) for one in engines):
        lines += gpu_sections([one for one in engines if device_of(one) == device], plots)
    servers = [one for one in by_name if is_http(one)]
    for device in dict.fromkeys(map(device_of, servers)):
        lines += http_sections([one for one in servers if device_of(one) == device])
    kernels = [one for one in by_name if one.script in SCRIPTS]
    for result in kernels:
        lines += [*_kernels(result, plots), ""]
    quality = [one for one in by_name if one.script == "quality.py"]
    if quality:
        lines.append(f"## {TITLE}\n")
    for result in quality:
        lines += [*quality_section(result), "", provenance(result), ""]
    converted = [one for one in by_name if one.name.startswith("transmla")]
    if converted:
        lines.append(f"## {TRANSMLA_TITLE}\n")
    for result in converted:
        lines += [*transmla_section(result), "", provenance(result), ""]
    parts = {one.name: one for one in by_name if one.name in ("mesh_8b", "collectives")}
    if len(parts) == 2:
        lines += [f"## {MESH_TITLE}\n", *mesh_section(parts["mesh_8b"], parts["collectives"]), ""]
    for result in by_name:
        if result not in (*engines, *kernels, *servers, *quality, *converted):
            lines += [*_plain(result, plots), ""]
    return "\n".join(lines), plots


def _shape(result: Result) -> bool:
    return "shape" in result.settings


def _kernels(result: Result, plots: dict[str, str]) -> Iterator[str]:
    kind = kernel_kind(result)
    yield f"## {kind} of {SHAPES[str(result.settings['shape'])]} on {device_of(result)}\n"
    yield from kernel_section(result, plots)
    yield from missing(result)
    yield provenance(result)


def _plain(result: Result, plots: dict[str, str]) -> Iterator[str]:
    script = BENCHMARKS / result.script
    beyond = result.name.removeprefix(script.stem).strip("_").replace("_", " ")
    yield f"## {_title(script)}{f' ({beyond})' if beyond else ''}\n"
    settings = ", ".join(f"{name} {value}" for name, value in result.settings.items() if value not in ("", None))
    yield f"`python benchmarks/{result.script}`, with {settings}.\n"
    yield from _plot(result, _engine_groups(result.figures), "a decode step", plots)
    figures = [(name, result.figures[name]) for name in _ordered(result.figures)]
    yield from table(("figure", ""), ((figure.what, shown(figure)) for _, figure in figures))
    yield ""
    yield provenance(result)


def _engine_groups(figures: Mapping[str, Figure]) -> dict[str, list[tuple[str, float, str]]]:
    """Return by batch the steps of the engines that decode_cpu.py compares."""
    groups: dict[str, list[tuple[str, float, str]]] = {}
    for name in _ordered(figures):
        found = re.fullmatch(r"batch_(\d+)_(ingot|transformers\w*)", name)
        if found is not None:
            value = figures[name].value
            label = {"ingot": "Ingot"}.get(found[2], found[2].replace("_", ", "))
            groups.setdefault(sequences(found[1]), []).append((label, value, quantity(value, "s")))
    return groups


def _plot(
    result: Result, groups: Mapping[str, list[tuple[str, float, str]]], what: str, plots: dict[str, str]
) -> Iterator[str]:
    if groups:
        path = f"benchmarks/{result.name}.svg"
        title = f"{what[:1].upper()}{what[1:]}, {device_of(result)}"
        plots[path] = bars(title, groups)
        yield f"![{title}]({path})\n"


def _title(script: Path) -> str:
    """Return the first sentence of a script's docstring."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or script.stem
    return text.partition("\n")[0].rstrip(".")
