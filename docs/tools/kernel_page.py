"""What docs/benchmarks.md says of kernels: a table for each part of benchmarks/gpu_kernels.py, and a plot for some."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bars import bars
from markdown_table import table
from natural_order import natural_order
from results import Figure, Result
from units import quantity

HEAD = """\
`python benchmarks/gpu_kernels.py --shape {shape}`: the kernels of one layer and of both ends of a step, with random
numbers, each as CUDA graphs of a row of calls over different memory; those who compute the same take turns, and the
median counts. Beside a time stands its share: what a copy would take for the bytes that have to come from memory, or a
large product by cuBLAS for the operations, whichever is longer, over the time.
"""
PARTS = {
    "attention": "Attention of decode steps, by sequences and cached positions",
    "prefill": "Attention of steps that feed prompts, by tokens",
    "linear": "Products; of up to 64 tokens ours with the norm, gate or residual around them, cuBLAS's alone",
    "step": "Small kernels",
}
_PLOTTED = ("attention", "prefill")


@dataclass(frozen=True)
class Call:
    """A call of a part: figures by what stands behind its name."""

    figures: Mapping[str, Figure]

    @property
    def what(self) -> str:
        return self.figures["bytes"].what.partition(": ")[0]

    @property
    def times(self) -> dict[str, Figure]:
        """By provider."""
        return {name: figure for name, figure in self.figures.items() if figure.unit == "s"}

    def share(self, provider: str) -> tuple[float, str]:
        """Of what it takes at the least, and of what that is: "copy" or "rate"."""
        of = next(name for name in self.figures if name.startswith(f"{provider}.of_"))
        return self.figures[of].value, of.partition(".of_")[2]


def kernel_section(result: Result, plots: dict[str, str]) -> Iterator[str]:
    """The tables of a result; adds plots by their paths in docs/."""
    yield HEAD.format(shape=result.settings["shape"])
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
        yield from _table(calls)
        peak = f"\nThe copy reads and writes {_shown(result.figures[f'{part}.copy'])}"
        rate = result.figures.get(f"{part}.rate")
        yield f"{peak}; the large product comes to {_shown(rate)}.\n" if rate else f"{peak}.\n"


def _calls(figures: Mapping[str, Figure], part: str) -> list[Call]:
    """Those of a part, numbers in their names in order."""
    names = [name.removesuffix(".bytes") for name in figures if re.fullmatch(rf"{part}\.\w+\.bytes", name)]
    return [
        Call({key.removeprefix(f"{name}."): one for key, one in figures.items() if key.startswith(f"{name}.")})
        for name in natural_order(names)
    ]


def _table(calls: Sequence[Call]) -> Iterator[str]:
    who = {provider: _who(figure) for call in calls for provider, figure in call.times.items()}
    peers = [call.figures["faster"].what.partition(", faster than ")[2] for call in calls if "faster" in call.figures]
    against = f"Ingot is faster than {peers[0].removesuffix(' by')} by" if peers else None
    counted = any("flop" in call.figures for call in calls)
    yield from table(
        ("", "bytes", *(["operations"] if counted else []), *who.values(), *([against] if against else [])),
        (
            [
                call.what,
                _shown(call.figures["bytes"]),
                *([_shown(call.figures["flop"])] if counted else []),
                *(_cell(call, provider) for provider in who),
                *([f"{call.figures['faster'].value:#.3g} ×" if "faster" in call.figures else "–"] if against else []),
            ]
            for call in calls
        ),
    )


def _cell(call: Call, provider: str) -> str:
    if provider not in call.times:
        return "–"
    share, of = call.share(provider)
    return f"{_shown(call.times[provider])}, {share:.1%} of the {of}"


def _bars(call: Call) -> Iterator[tuple[str, float, str]]:
    """Each provider's time, and the least."""
    for figure in call.times.values():
        yield _who(figure), figure.value, _shown(figure)
    provider, figure = next(iter(call.times.items()))
    share, of = call.share(provider)
    least = figure.value * share
    yield {"copy": "a copy of its bytes", "rate": "at the product's rate"}[of], least, quantity(least, "s")


def _who(figure: Figure) -> str:
    """The provider, in words."""
    return figure.what.partition(": ")[2].removesuffix(", the median")


def _shown(figure: Figure) -> str:
    return quantity(figure.value, figure.unit)
