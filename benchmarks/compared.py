"""The result of compare_commits.py: samples of two commits, their medians and spreads, and whether the new one is
slower.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from units import quantity

SIDES = ("old", "new")


@dataclass(frozen=True)
class Bar:
    """The limit for one measured number when two commits are compared. `what` describes the number.

    The new commit may be worse by the factor `limit`, plus the spread of the samples. With the limit None, the number
    is only reported.
    """

    what: str
    limit: float | None = 1.02
    unit: str = "s"

    @property
    def more_is_better(self) -> bool:
        return self.unit == "tokens/s"


# Bars by figure, in display order. `bar_of` makes those of figures with a number, such as batch_8_step.
BARS: Mapping[str, Bar] = {
    "compile": Bar("compile-model with empty caches", limit=1.1),
    "compile_cached": Bar("compile-model with its caches filled"),
    "first_token_less_context": Bar("start to first token, less making the GPU's context"),
    "first_token": Bar("start of the process to its first token", limit=None),
    "context": Bar("of it: making the GPU's context", limit=None),
    "import": Bar("of it: importing the package", limit=None),
    "load": Bar("of it: making the engine", limit=None),
    "throughput": Bar("requests given at once", unit="tokens/s"),
}


def bar_of(name: str) -> Bar:
    if name in BARS:
        return BARS[name]
    kind, _, rest = name.partition("_")
    if kind == "phase":
        return Bar(f"of it: {rest}", limit=None)
    what = {
        "batch": f"a decode step of {rest.partition('_')[0]}",
        "prompt": f"the first token after a prompt of {rest}",
        "host": f"the host's time of a step, {rest}",
    }
    return Bar(what[kind])


@dataclass(frozen=True)
class Verdict:
    """The comparison of one measured number.

    old      the median of the old commit
    new      the median of the new commit
    ratio    the factor by which the new commit is worse
    spread   the distance between the quartiles divided by the median; the larger one of both commits
    limit    the allowed factor; None if there is no limit
    holds    True if `ratio` is at most `limit + spread`; None if there is no limit
    """

    old: float
    new: float
    ratio: float
    spread: float
    limit: float | None
    holds: bool | None


def verdict(bar: Bar, old: Sequence[float], new: Sequence[float]) -> Verdict:
    before, after = statistics.median(old), statistics.median(new)
    ratio = before / after if bar.more_is_better else after / before
    spread = max(_spread(old), _spread(new))
    holds = None if bar.limit is None else ratio <= bar.limit + spread
    return Verdict(before, after, ratio, spread, bar.limit, holds)


def _spread(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


@dataclass
class Comparison:
    """All samples of a comparison of two commits.

    `samples` maps the name of a measured number, and then "old" or "new", to the samples. `failed` lists failed
    measurements. `about` says what is compared: sources, machine, settings. Samples of an earlier run are reused only
    if its `about` is equal.
    """

    about: Mapping[str, Any]
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, side: str, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.samples.setdefault(name, {one: [] for one in SIDES})[side].append(value)

    def verdicts(self) -> dict[str, Verdict]:
        """Return the comparison of each measured number, by name. Numbers without samples of both commits are left
        out."""
        names = [*(name for name in BARS if name in self.samples), *sorted(self.samples.keys() - BARS.keys())]
        pairs = {name: [self.samples[name][side] for side in SIDES] for name in names}
        return {name: verdict(bar_of(name), *pair) for name, pair in pairs.items() if all(pair)}

    def missed(self) -> list[str]:
        """Return the names of the measured numbers for which the new commit is worse than allowed.

        Numbers with a limit, but without samples of one commit, are included.
        """
        found = self.verdicts()
        lacking = [name for name in self.samples if name not in found and bar_of(name).limit is not None]
        return [*(name for name, one in found.items() if one.holds is False), *lacking]

    def write(self, path: Path) -> None:
        """Write the comparison as JSON. The file is replaced in one operation, since the process may be interrupted."""
        verdicts = {name: asdict(one) for name, one in self.verdicts().items()}
        text = json.dumps({**asdict(self), "verdicts": verdicts, "missed": self.missed()}, indent=1, sort_keys=True)
        beside = path.with_suffix(".part")
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(path)


def read_comparison(path: Path, about: Mapping[str, Any]) -> Comparison:
    """Return the comparison that an earlier run wrote to `path`. Return an empty one if there is none.

    An earlier comparison counts only if it has an equal `about`: sources, machine and settings.
    """
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["about"] == about:
            return Comparison(about, found["samples"])
    return Comparison(about)


def table(comparison: Comparison) -> Iterator[str]:
    yield f"{'':52} {'old':>15} {'new':>15} {'new is':>8} {'spread':>7}  samples"
    for name, one in comparison.verdicts().items():
        bar, found = bar_of(name), comparison.samples[name]
        counts = "+".join(str(len(found[side])) for side in SIDES)
        end = "" if one.holds is None else f"{'holds' if one.holds else 'MISSED'} {one.limit:g} ×"
        yield (
            f"{bar.what:52} {quantity(one.old, bar.unit):>15} {quantity(one.new, bar.unit):>15}"
            f" {one.ratio:7.3f}× {one.spread:7.1%}  {counts:7} {end}"
        )
