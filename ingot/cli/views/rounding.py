"""The output of `ingot check`, and the skipped fusions in a compile's report."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ingot.cli.console import print_table, table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ingot.rounding.check import RoundingCheck, Score


def rounding_row(check: "RoundingCheck") -> list[tuple[str, object]]:
    """Return the row about the rounding check in a compile's report: the number of scored fusions and the largest
    score.

    Return an empty list if no fusion was scored.
    """
    if not check.scores:
        return []
    largest = max(one.score for one in check.scores)
    text = f"{len(check.scores)} checked for rounding, largest score {largest:.2f}"
    partly = "; `ingot check` lists what has no score" if check.unscored else ""
    return [("fusions", text + partly)]


def print_skipped(out: "Console", risks: "Sequence[Score]") -> None:
    """Print the fusions that a compile skipped because of their rounding errors."""
    title = "\nSkipped fusions, because they would break the contract for rounding with these weights"
    out.print(title, style="bold", soft_wrap=True)
    print_table(out, _listed({"": risks}))


def print_checks(out: "Console", checks: "Mapping[str, RoundingCheck]") -> None:
    """Print the rounding check of each checkpoint.

    The table has the largest score of each pass and part of the model, such as attention. It has a column for each
    checkpoint. Fusions without a score follow. Then risks and near risks are listed with their layers and tensors.
    """
    rows: dict[tuple[str, str], dict[str, Score]] = {}
    for checkpoint, check in checks.items():
        for one in check.scores:
            found = rows.setdefault((one.name, one.part), {})
            if checkpoint not in found or one.score > found[checkpoint].score:
                found[checkpoint] = one
    columns = ("pass", "part", *(f"{name}>" for name in checks))
    cells = [[*key, *(_cell(found.get(name)) for name in checks)] for key, found in rows.items()]
    print_table(out, table(columns, cells))
    out.print("\nThe largest score of all layers. Above 2, a compile skips the fusion.", style="dim", markup=False)
    for reason in dict.fromkeys(reason for check in checks.values() for reason in check.unscored):
        having = [checkpoint for checkpoint, check in checks.items() if reason in check.unscored]
        which = "" if len(having) == len(checks) else f"{', '.join(having)}: "
        out.print(f"{which}not scored: {reason}", style="yellow", markup=False, soft_wrap=True)
    risks, near = _with("risk", checks), _with("near", checks)
    count = sum(map(len, risks.values()))
    out.print(f"\n{count or 'No'} {'risk' if count == 1 else 'risks'}", style="bold")
    if count:
        print_table(out, _listed(risks))
    if count := sum(map(len, near.values())):
        title = f"{count} near a risk: fused, although a sample breaks the contract for rounding"
        out.print(f"\n{title}", style="bold", soft_wrap=True)
        print_table(out, _listed(near))


def _with(verdict: str, checks: "Mapping[str, RoundingCheck]") -> "dict[str, list[Score]]":
    """Return the scores with the given `verdict`, such as "risk". Keys are names of checkpoints."""
    return {name: [one for one in check.scores if one.verdict == verdict] for name, check in checks.items()}


def _listed(scores: "Mapping[str, Sequence[Score]]") -> "Table":
    """Return a table with a row for each score, the largest score of a checkpoint first.

    Keys of `scores` are names of checkpoints, and the table has a column for them. If "" is the only key, it has none.
    """
    named = list(scores) != [""]
    columns = (*(["checkpoint"] if named else []), "pass", "layer>", "part", "tensor", "score>", "worst sample>")
    rows = []
    for checkpoint, found in scores.items():
        for one in sorted(found, key=lambda one: (-one.score, -one.largest)):
            layer = "–" if one.layer is None else str(one.layer)
            part = one.part if one.entry == "main" else f"{one.part} of {one.entry}"
            rows.append(
                [
                    *([checkpoint] if named else []),
                    one.name,
                    layer,
                    part,
                    one.tensor,
                    f"{one.score:.2f}",
                    f"{one.largest:.2f}",
                ]
            )
    return table(columns, rows)


def _cell(one: "Score | None") -> str:
    return "–" if one is None else f"{one.score:.2f}"
