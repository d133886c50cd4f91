"""What `ingot explain` says of a step's time on a GPU: totals by kind, and what stands above the roofline."""

from typing import TYPE_CHECKING

from ingot.console import console, facts, print_table, size_text, table

if TYPE_CHECKING:
    from ingot.debug.step_time.times import StepTime


def print_step_time(step: "StepTime") -> None:
    out = console()
    rows = [(one.kind, one.calls or "–", *_times(one.roofline, one.predicted, one.measured)) for one in step.kinds]
    calls = sum(one.calls for one in step.kinds)
    rows.append(("step", calls, *_times(step.roofline, step.predicted, step.measured)))
    names = ("kind", "calls>", "roofline>", "predicted>", "measured>", "of roofline>")
    print_table(out, table(names if step.measured is not None else [*names[:4], names[5]], rows))
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
        above = [(time_text(one.seconds), one.calls or "–", one.what, one.closing) for one in step.gaps]
        print_table(out, table(("above roofline>", "calls>", "where", "what would close it"), above))
        out.print()


def _times(roofline: float, predicted: float, measured: float | None) -> list[str]:
    """The cells of a row; the measured one only where there is a measurement."""
    taken = predicted if measured is None else measured
    share = f"{roofline / taken:.0%}" if roofline and taken > 0 else "–"
    cells = [time_text(roofline), time_text(predicted), share]
    if measured is not None:
        cells.insert(2, time_text(measured))
    return cells


def time_text(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if abs(seconds) < 1e-3 else f"{seconds * 1e3:.2f} ms"
