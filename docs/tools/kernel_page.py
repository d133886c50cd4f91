"""The part of docs/benchmarks.md on kernels: a table for each part, and some plots."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bars import bars
from markdown_table import table
from natural_order import natural_order
from results import Figure, Result
from units import quantity

COMMAND = "`python benchmarks/{script} --shape {shape}{options}`:\n"
HEAD = """\
the kernels of one layer and of both ends of a step, on random
numbers. Each runs as CUDA graphs of many calls over different memory. Contenders take turns, and the median counts. The
share next to a time is the least possible time divided by it: copying the bytes that must come from memory, or the
operations at the rate of a large cuBLAS matmul, whichever is longer.
"""
EXPERTS = """\
the experts of one layer of a mixture, with all launches. Each token's experts are drawn at random. Bytes are those of
the different experts that a call needs. The name of a format follows the model's where weights are quantized.
"""
QUANTIZED = """\
the matmuls of one layer with quantized weights. Ingot's include the norm, gate or residual. cuBLAS's compute the matmul
alone, with weights in bfloat16.
"""
NARROW = """\
decode attention of one layer over 8-bit caches with one scale, through `append_attention`: rotary embedding, cache
write and attention. Bytes are those of the cached keys and values.
"""
# By script: how a heading begins, and what the script measures.
SCRIPTS = {
    "kernels/attention.py": ("Decode attention over {cache_dtype} caches", NARROW),
    "gpu_kernels.py": ("Kernels", HEAD),
    "kernels/experts.py": ("Experts", EXPERTS),
    "kernels/quant_linear.py": ("Quantized matmuls", QUANTIZED),
}
PARTS = {
    "attention": "Attention of decode steps, by sequences and cached positions",
    "prefill": "Attention of prefill steps, by tokens",
    "linear": "Matmuls; up to 64 tokens Ingot's include the norm, gate or residual, cuBLAS's do not",
    "step": "Small kernels, by rows",
    "experts": "Experts of a mixture, by tokens",
    "quant_linear": "Quantized matmuls, by format and tokens",
}
_PLOTTED = ("attention", "prefill")
_BY_ROWS = ("step",)  # tables with a column per number of rows, in place of contenders
_LEAST_SHARE = 0.01  # below that the bytes do not bound the time


@dataclass(frozen=True)
class Call:
    """A call of a part: figures by their names without the prefix of the call."""

    figures: Mapping[str, Figure]

    @property
    def what(self) -> str:
        return self.figures["bytes"].what.partition(": ")[0]

    @property
    def times(self) -> dict[str, Figure]:
        """Return times by contender, Ingot first."""
        found = ((name, figure) for name, figure in self.figures.items() if figure.unit == "s")
        return dict(sorted(found, key=lambda item: not _contender(item[1]).startswith("Ingot")))

    def share(self, contender: str) -> tuple[float, str]:
        """Return the share of the least possible time, and its bound: "copy" or "rate"."""
        of = next(name for name in self.figures if name.startswith(f"{contender}.of_"))
        return self.figures[of].value, of.partition(".of_")[2]


def kernel_kind(result: Result) -> str:
    """Return what a result measures, as a heading begins."""
    return SCRIPTS[result.script][0].format(**result.settings)


def kernel_section(result: Result, plots: dict[str, str]) -> Iterator[str]:
    """Yield the tables of a result; add plots by their paths in docs/."""
    settings = {name: value for name, value in result.settings.items() if name != "shape"}
    options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in settings.items())
    command = COMMAND.format(script=result.script, shape=result.settings["shape"], options=options)
    yield command + SCRIPTS[result.script][1]
    for part, title in PARTS.items():
        calls = _calls(result.figures, part)
        if not calls:
            continue
        yield f"### {title}\n"
        if part in _PLOTTED:
            path = f"benchmarks/{result.name}_{part}.svg"
            heading = f"{title.partition(',')[0]}, {result.machine.gpu}"
            plots[path] = bars(heading, {call.what: list(_bars(call)) for call in calls})
            yield f"![{heading}]({path})\n"
        yield from (_table_by_rows(calls) if part in _BY_ROWS else _table(calls))
        peak = f"\nThe copy reads and writes {_shown(result.figures[f'{part}.copy'])}"
        rate = result.figures.get(f"{part}.rate")
        yield f"{peak}; the large matmul reaches {_shown(rate)}.\n" if rate else f"{peak}.\n"


def _calls(figures: Mapping[str, Figure], part: str) -> list[Call]:
    """Return the calls of a part, in natural order of their names."""
    names = [name.removesuffix(".bytes") for name in figures if re.fullmatch(rf"{part}\.\w+\.bytes", name)]
    return [
        Call({key.removeprefix(f"{name}."): one for key, one in figures.items() if key.startswith(f"{name}.")})
        for name in natural_order(names)
    ]


def _table(calls: Sequence[Call]) -> Iterator[str]:
    who = {contender: _contender(figure) for call in calls for contender, figure in call.times.items()}
    who = dict(sorted(who.items(), key=lambda item: not item[1].startswith("Ingot")))  # some calls have not all
    ratios = [call.figures["faster"].what.partition(": ")[2] for call in calls if "faster" in call.figures]
    against = ratios[0] if ratios else None
    counted = any("flop" in call.figures for call in calls)
    yield from table(
        ("", "bytes", *(["operations"] if counted else []), *who.values(), *([against] if against else [])),
        (
            [
                call.what,
                _shown(call.figures["bytes"]),
                *([_shown(call.figures["flop"])] if counted else []),
                *(_cell(call, contender) for contender in who),
                *([f"{call.figures['faster'].value:#.3g} ×" if "faster" in call.figures else "–"] if against else []),
            ]
            for call in calls
        ),
    )


def _table_by_rows(calls: Sequence[Call]) -> Iterator[str]:
    """Yield a table of calls with one contender: "sample, 32 rows" is row "sample", column "32 rows"."""
    cells: dict[str, dict[str, str]] = {}
    for call in calls:
        what, _, rows = call.what.rpartition(", ")
        (contender,) = call.times
        cells.setdefault(what, {})[rows] = _cell(call, contender)
    columns = list(dict.fromkeys(rows for own in cells.values() for rows in own))
    yield from table(("", *columns), ([what, *(own.get(rows, "–") for rows in columns)] for what, own in cells.items()))


def _cell(call: Call, contender: str) -> str:
    if contender not in call.times:
        return "–"
    share, of = call.share(contender)
    took = _shown(call.times[contender])
    return took if share < _LEAST_SHARE else f"{took}, {share:.1%} of the {of}"


def _bars(call: Call) -> Iterator[tuple[str, float, str]]:
    """Yield the time of each contender, and the least possible time."""
    for figure in call.times.values():
        yield _contender(figure), figure.value, _shown(figure)
    contender, figure = next(iter(call.times.items()))
    share, of = call.share(contender)
    least = figure.value * share
    yield {"copy": "a copy of its bytes", "rate": "at the matmul's rate"}[of], least, quantity(least, "s")


def _contender(figure: Figure) -> str:
    """Return the contender, in words."""
    return figure.what.partition(": ")[2].removesuffix(", the median")


def _shown(figure: Figure) -> str:
    return quantity(figure.value, figure.unit)
