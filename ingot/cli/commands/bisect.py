"""`ingot bisect`: find the part that makes an artifact compute wrong results."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ingot.cli.commands import ArtifactFolder, AsJson, Variant
from ingot.cli.console import console, facts, print_json, print_table

if TYPE_CHECKING:
    from ingot.debug.bisect import Verdict

# Exit codes of the command.
CULPRIT = 3
UNCONFIRMED = 4


def bisect_artifact(
    artifact: ArtifactFolder,
    /,
    *,
    oracle: str | None = None,
    checkpoint: str | None = None,
    output: Annotated[str | None, Parameter(name=("--output", "-o"))] = None,
    variant: Variant = None,
    json: AsJson = False,
) -> int:
    """Find the part of the compiler that makes an artifact compute wrong results.

    Exit codes: 0 for no fault, 3 for a fault, 4 for a suspected pass that further prompts do not confirm.

    Parameters
    ----------
    oracle
        Also check the model's definition against this implementation: `transformers`, or a Python file that defines
        `oracle(requests)`.
    checkpoint
        The checkpoint that was compiled, if it has moved: a folder, or a name on the hub.
    output
        The folder for a script that reproduces the fault. Default: NAME.bisect next to the artifact.
    """
    from ingot.debug.bisect import bisect
    from ingot.runtime.loading.variants import variant_folder

    chosen = variant_folder(artifact, variant)
    verdict = bisect(chosen, oracle=oracle, checkpoint=checkpoint, output=output or default_output(artifact))
    if json:
        print_json(verdict.to_json())
    else:
        print_verdict(verdict)
    return CULPRIT if verdict else UNCONFIRMED if verdict.blamed else 0


def default_output(artifact: str) -> Path:
    """Return the folder NAME.bisect next to the artifact NAME.ingot."""
    path = Path(artifact)
    path = path if path.name not in ("", "..") else path.resolve()  # "." has no name of its own
    return path.with_name(f"{path.name.removesuffix('.ingot')}.bisect")


# The text for the kind of a verdict, if it differs from the kind's name.
_WHAT = {"recipe": "recipe step", "unconfirmed": "pass, unconfirmed"}


def print_verdict(verdict: "Verdict") -> None:
    """Print the result of a bisection, a row for each field that is set."""
    out = console()
    if not verdict and not verdict.blamed:
        out.print(f"healthy: no fault found ({verdict.runs} runs of programs)", markup=False)
        return
    rewrite = verdict.rewrite
    rows = [
        (_WHAT.get(verdict.kind.value, verdict.kind.value), verdict.blamed),
        ("entry", "" if verdict.entry == "main" else verdict.entry),
        ("bucket class", verdict.bucket or ""),
        ("rewrite", f"no. {rewrite.index + 1}, at %{rewrite.anchor.removeprefix('%')}" if rewrite else ""),
        ("node", f"%{verdict.node} ({verdict.op})" if verdict.node and verdict.op else verdict.node),
        ("first wrong", f"%{verdict.tensor}" if verdict.tensor else ""),
        ("layer", "" if verdict.layer is None else str(verdict.layer)),
        ("origin", verdict.origin),
        ("found", verdict.found),
        ("note", verdict.note),
        ("runs", str(verdict.runs)),
        ("reproducer", str(verdict.reproducer or "")),
        ("program", str(verdict.golden or "")),
    ]
    print_table(out, facts([row for row in rows if row[1]]))
