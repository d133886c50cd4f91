"""Print the result of `--check-numerics`: each pass with its contract, overflows of the model, and risky weights."""

from typing import TYPE_CHECKING

from ingot.cli.console import print_table, table

if TYPE_CHECKING:
    from rich.console import Console

    from ingot.compile.numerics import NumericsReport, PassNumerics
    from ingot.compile.weight_statistics import WeightStatistic


def print_numerics(out: "Console", report: "NumericsReport") -> None:
    """Print the report of --check-numerics: the error of each pass.

    The error is over the logits at all positions of the sample requests. It is their root mean square for a ROUNDING
    pass, and the largest error of a logit for other passes.
    """
    tokens = ", ".join(map(str, report.sample))
    out.print("\nNumerics", style="bold")
    out.print(f"every contract is kept, on requests of {tokens} tokens", markup=False, soft_wrap=True)
    columns = ("pass", "program", "contract", "error>", "relative>", "allowed>", "meaning moved>", "")
    print_table(out, table(columns, [_row(one) for one in report.passes]))
    for entry, reason in report.unmeasured.items():
        out.print(f"warning: not measured: the entry '{entry}': {reason}", style="yellow", markup=False, soft_wrap=True)
    for entry, overflow in report.overflows.items():
        text = f"warning: the model itself overflows in {entry}: {overflow}"
        out.print(text, style="yellow", markup=False, soft_wrap=True)
    _print_weights(out, report.weights)


def _row(one: "PassNumerics") -> list[str]:
    program = one.entry + (f"@{one.bucket}" if one.bucket else "")
    if not one.changed:
        return [one.name, program, one.numerics, "", "", "", "", "program unchanged"]
    allowed = "" if one.allowed is None else _number(one.allowed)
    notes = [f"KL divergence {one.kl:.3g} nats"] if one.kl is not None else []
    notes += [f"{one.lost} logits were not finite before"] if one.lost else []
    return [
        one.name,
        program,
        one.numerics,
        _number(one.error),
        _number(one.relative),
        allowed,
        _number(one.meaning),
        "; ".join(notes),
    ]


def _print_weights(out: "Console", weights: "tuple[WeightStatistic, ...]") -> None:
    risks = [one for one in weights if one.is_risk]
    out.print("\nWeights", style="bold")
    calm = len(weights) - len(risks)
    out.print(f"{len(risks)} statistics out of bounds, {calm} within", markup=False, soft_wrap=True)
    if not risks:
        return
    columns = ("weights", "statistic", "value>", "bound>", "layer>", "of them>", "risky then")
    rows = [
        [
            one.kind,
            one.measure.name,
            _number(one.value),
            _number(one.measure.bound),
            "" if one.layer is None else str(one.layer),
            f"{one.exceed} of {one.params}",
            one.measure.risky,
        ]
        for one in risks
    ]
    print_table(out, table(columns, rows))
    for source in dict.fromkeys(f"{one.measure.name}: {one.measure.source}" for one in risks):
        out.print(source, style="dim", markup=False, soft_wrap=True)


def _number(value: float) -> str:
    return f"{value:.3g}"
