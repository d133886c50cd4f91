"""Find the part that makes an artifact compute wrong results: a pass, a backend, a recipe, the model's definition."""

import os
from dataclasses import replace
from pathlib import Path

from ingot.debug.bisect.case import Case, recorded_requests
from ingot.debug.bisect.execution.blame_execution import blame_execution
from ingot.debug.bisect.programs.blame_definition import blame_definition
from ingot.debug.bisect.programs.blame_overflow import blame_overflow
from ingot.debug.bisect.programs.blame_pass import Culprit, Judge, base_of, blame_pass
from ingot.debug.bisect.programs.blame_recipe_steps import wrong_step
from ingot.debug.bisect.programs.blame_rewrite import Blame, blame_rewrite, harm
from ingot.debug.bisect.programs.locate import Site
from ingot.debug.bisect.programs.oracles import Oracle, open_oracle
from ingot.debug.bisect.programs.reproducer import write_reproducer
from ingot.debug.bisect.verdict import Kind, Verdict
from ingot.ir.errors import OutputError
from ingot.ir.origin import layer_of


def bisect(
    artifact: str | Path,
    *,
    oracle: str | Path | None = None,
    checkpoint: str | Path | None = None,
    output: str | Path | None = None,
) -> Verdict:
    """Find the part of the compiler that makes an artifact compute wrong results. Return a verdict that names it.

    The search has up to three steps. First, each program of the compile is compared with the traced program, the one
    that was traced from the model definition. Programs run in float64, and also in the model's dtype to check rounding.
    Then the artifact runs, and its results are compared with its final programs. Last, the traced program is compared
    with the `oracle`, if one is given.

    `oracle` is an independent implementation of the model: "transformers", or a Python file that defines
    `oracle(requests)`. `checkpoint` is the folder of the compiled checkpoint. It is needed only if that folder has
    moved. `output` is a new folder for a script that reproduces the fault. By default no script is written.

    A faulty pass is checked on other prompts: the outputs must be wrong with the faulty rewrite, and right without it.
    If this check fails and nothing else is found, the verdict is UNCONFIRMED.

    Raises IngotError if the artifact, checkpoint, oracle or output folder cannot be used.
    """
    folder = None if output is None else Path(output)
    if folder is not None and folder.exists():
        raise OutputError(f"{folder} exists already", hint="remove it, or name another folder with -o")
    if folder is not None and not _can_be_made(folder):
        raise OutputError(f"{folder} cannot be made", where=str(folder.parent), hint="name another folder with -o")
    opened = None if oracle is None else open_oracle(oracle)
    case = Case.open(artifact, checkpoint)
    found = _blame(case, opened, folder)
    verdict = Verdict(Kind.HEALTHY) if found is None else found
    return replace(verdict, runs=max(case.runs, verdict.runs))


def _can_be_made(folder: Path) -> bool:
    """Return whether a folder can be created. Its nearest existing parent must be a folder with write permission."""
    above = next(path for path in folder.absolute().parents if path.exists())
    return above.is_dir() and os.access(above, os.W_OK)


def _blame(case: Case, oracle: Oracle | None, folder: Path | None) -> Verdict | None:
    accused = _blame_pass(case, folder)
    return (
        accused
        or blame_overflow(case)
        or _blame_execution(case, folder)
        or (blame_definition(case, oracle) if oracle else None)
        or accused
    )


def _blame_pass(case: Case, folder: Path | None) -> Verdict | None:
    judge = Judge(case)
    culprit = blame_pass(case, judge)
    if culprit is None:
        return None
    if wrong := wrong_step(case, culprit.link.before, culprit.link.program):
        return wrong
    expected = judge.expectation(culprit.chain, base_of(culprit.chain, culprit.place - 1))
    blame = blame_rewrite(judge, culprit, expected)
    verdict = _verdict(culprit, blame)
    if not _is_confirmed(case, culprit, blame):
        return replace(verdict, kind=Kind.UNCONFIRMED, note=_UNCONFIRMED)
    if folder is None:
        return verdict
    script, golden = write_reproducer(case, culprit, blame, expected, folder)
    return replace(verdict, reproducer=script, golden=golden)


# Seeds of the prompts of the second check: one draw may show a fault that another does not.
_LOOKS = (1, 2, 3)
_UNCONFIRMED = (
    "the first prompts show the fault; with others it is absent, or also present without this rewrite: compare the"
    " artifact with its oracle on prompts of your own"
)


def _is_confirmed(case: Case, culprit: Culprit, blame: Blame) -> bool:
    """Check on other prompts that a rewrite is at fault. Return whether the outputs are wrong with it and right without
    it.

    `blame` has the programs with and without the rewrite. A fault that makes a program invalid needs no check: return
    True.
    """
    if culprit.what == "structure":
        return True
    place = base_of(culprit.chain, culprit.place - 1)
    for seed in _LOOKS:
        other = Judge(case, seed)
        harms = harm(other, culprit, other.expectation(culprit.chain, place))
        if harms(blame.after):
            return not harms(blame.before)
    return False


def _verdict(culprit: Culprit, blame: Blame) -> Verdict:
    site, link = blame.site, culprit.link
    found = culprit.text
    if site is not None and site.text and site.text not in found:
        found += f"; at %{site.tensor}" + (f", which replaces %{site.instead_of}" if site.instead_of else "")
        found += f": {site.text}"
    if blame.rewrite is None and not blame.changed:
        found += "; the pass does this outside its rewrites"
    return Verdict(
        Kind.PASS,
        blamed=link.name,
        entry=link.entry,
        bucket=link.bucket.name if link.bucket else None,
        rewrite=blame.rewrite,
        node=site.node if site else "",
        op=site.op if site else "",
        tensor=site.tensor if site else "",
        layer=_layer(site, blame),
        origin=site.origin if site else (blame.rewrite.origin if blame.rewrite else ""),
        found=found,
        note="the pass has changed since the artifact was compiled: compile it again" if blame.changed else "",
    )


def _layer(site: Site | None, blame: Blame) -> int | None:
    """Return the number of the decoder layer with the fault; None if it is unknown.

    The number is part of the source line or param name of the faulty node, `site`. If the node has none, it is read
    from the source line of the faulty rewrite.
    """
    texts = [] if site is None else [site.origin, site.node.replace("layers.", "layer ")]
    texts += [] if blame.rewrite is None else [blame.rewrite.origin]
    return next((found for text in texts if (found := layer_of(text)) is not None), None)


def _blame_execution(case: Case, folder: Path | None) -> Verdict | None:
    if case.request.mesh:
        return None  # nothing runs on several devices yet
    return blame_execution(
        case.artifact,
        case.final_programs,
        case.read,
        recorded_requests(case.artifact, case),
        reproducer=folder,
    )
