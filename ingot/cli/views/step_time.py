"""Print the time of a step on a GPU for `ingot explain`: totals by kind of call, and where it exceeds the roofline."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ingot.cli.console import console, facts, print_table, size_text, table

if TYPE_CHECKING:
    from ingot.debug.step_time.times import StepTime


def known_columns(step: "StepTime") -> int:
    """Return how many columns of measured times the table of a step has.

    It is 0 if times were only predicted, and 1 if the calls were timed. It is 2 if there are times from a profiler too.
    """
    traced = any(one.traced is not None for one in step.kinds)
    return 2 if traced else 1 if step.measured is not None else 0


def print_step_time(step: "StepTime") -> None:
    out, known = console(), known_columns(step)
    rows = [
        (one.kind, one.calls or "–", *_times(one.roofline, one.predicted, [one.measured, one.traced][:known]))
        for one in step.kinds
    ]
    calls = sum(one.calls for one in step.kinds)
    rows.append(("step", calls, *_times(step.roofline, step.predicted, [step.measured, step.traced][:known])))
    names = ("kind", "calls>", "roofline>", "predicted>", *("measured>", "traced>")[:known], "of roofline>")
    print_table(out, table(names, rows))
    out.print()
    how = "replayed from a captured graph" if step.captured else "launched call by call"
    lines: list[tuple[str, object]] = [
        ("step", how),
        ("device", f"{step.device}: {size_text(step.bandwidth)}/s, {step.rate / 1e12:.0f} Tflop/s"),
        ("predicted by", step.basis),
    ]
    print_table(out, facts(lines))
    out.print()
    if step.gaps:
        traced = ("traced>",) if known == 2 else ()
        above = [
            (
                time_text(one.seconds),
                *(_known(one.traced) for _ in traced),
                one.calls or "–",
                one.what,
                one.closing,
            )
            for one in step.gaps
        ]
        print_table(out, table(("above roofline>", *traced, "calls>", "where", "what would close it"), above))
        out.print()


def _times(roofline: float, predicted: float, known: Sequence[float | None]) -> list[str]:
    """Return the time cells of a table row: roofline, prediction, measurements, and the share of the roofline.

    `known` has the measured seconds, one for each column, None where unknown. The share is the roofline's time divided
    by the first measured time. Without one, it is divided by the predicted time.
    """
    taken = known[0] if known and known[0] is not None else predicted
    share = f"{roofline / taken:.0%}" if roofline and taken > 0 else "–"
    return [time_text(roofline), time_text(predicted), *map(_known, known), share]


def _known(seconds: float | None) -> str:
    return "–" if seconds is None else time_text(seconds)


def time_text(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if abs(seconds) < 1e-3 else f"{seconds * 1e3:.2f} ms"
