"""`ingot bisect`: who is to blame when an artifact computes the wrong thing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ingot.cli.commands import ArtifactFolder, AsJson
from ingot.cli.console import console, facts, print_json, print_table

if TYPE_CHECKING:
    from ingot.debug.bisect import Verdict

# What the command ends with.
CULPRIT = 3
UNCONFIRMED = 4


def bisect_artifact(
    artifact: ArtifactFolder,
    /,
    *,
    oracle: str | None = None,
    checkpoint: str | None = None,
    output: Annotated[str | None, Parameter(name=("--output", "-o"))] = None,
    json: AsJson = False,
) -> int:
    """Find what makes an artifact compute something else than its checkpoint means. Ends with 0 when nothing does, and
    with 3 when the culprit was found; with 4 when a pass is accused that further prompts do not confirm.

    Parameters
    ----------
    oracle
        Judges the model's definition too: `transformers`, or a Python file that defines `oracle(requests)`.
    checkpoint
        The checkpoint that was compiled, where it has moved: a folder, or a name on the hub.
    output
        The folder for what shows the fault by itself; NAME.bisect beside the artifact by default.
    """
    from ingot.debug.bisect import bisect

    verdict = bisect(artifact, oracle=oracle, checkpoint=checkpoint, output=output or default_output(artifact))
    if json:
        print_json(verdict.to_json())
    else:
        print_verdict(verdict)
    return CULPRIT if verdict else UNCONFIRMED if verdict.blamed else 0


def default_output(artifact: str) -> Path:
    """NAME.bisect beside NAME.ingot."""
    path = Path(artifact)
    path = path if path.name not in ("", "..") else path.resolve()  # "." has no name of its own
    return path.with_name(f"{path.name.removesuffix('.ingot')}.bisect")


# What was blamed, by the kind of a verdict, where that is not its name.
_WHAT = {"recipe": "recipe step", "unconfirmed": "pass, unconfirmed"}


def print_verdict(verdict: "Verdict") -> None:
    """The verdict for people."""
    out = console()
    if not verdict and not verdict.blamed:
        out.print(f"healthy: nobody is to blame ({verdict.runs} runs of programs)", markup=False)
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
