"""Write a folder that reproduces the fault of a pass, with the smallest program around the rewrite that shows it."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ingot.debug.bisect.case import Case
from ingot.debug.bisect.programs.blame_pass import Culprit
from ingot.debug.bisect.programs.blame_rewrite import Blame
from ingot.debug.bisect.programs.excerpt import around, excerpt
from ingot.debug.bisect.programs.expectation import Expectation
from ingot.debug.bisect.programs.observe import by_token, observe
from ingot.debug.bisect.programs.replay import AFTER, BEFORE, PASS, TENSORS, replay
from ingot.debug.bisect.programs.schedule import Step, whole
from ingot.ir.errors import IngotError
from ingot.ir.program import Program
from ingot.ir.text import print_program, value_name
from ingot.ir.types import DTYPE_NAMES

SCRIPT = "reproducer.py"
# Distances around the rewrite that are tried before the whole program.
_HOPS = (0, 1, 2, 4)
# Larger weights are not copied; random ones of the same shapes replace them.
_MOST_BYTES = 256 << 20
_TEXT = '''"""The fault of the pass {name}.

Exits with 1 while the fault is present, with 0 when it is gone, and with 2 when the run cannot decide. It needs
Ingot{package}, but neither artifact nor checkpoint. {before} is the program before the pass, which can also be used in
a test; {tensors} holds the program's inputs.
"""

import sys
from pathlib import Path

from ingot.reproduce import reproduce

sys.exit(reproduce(Path(__file__).parent))
'''
# Replaces the first line if the current pass makes another program.
_CHANGED = f'''"""The fault of the pass {{name}} when the artifact was compiled; the pass has changed since.

The pass is not run: {BEFORE} is compared with {AFTER}, which the pass made then, so fixing the pass has no effect
here. To test the current pass, compile the model again.
'''


def write_reproducer(
    case: Case, culprit: Culprit, blame: Blame, expected: Expectation, folder: Path
) -> tuple[Path, Path]:
    """Write a new folder that reproduces the fault of a pass. Return the paths of its script and of its program.

    The folder holds a script, the program before the pass, and the program's tensors.
    """
    folder.mkdir(parents=True)
    try:
        for program in _candidates(culprit, blame):
            for mode in ("at once", "forced", "by device"):
                _write(case, culprit, blame, expected, program, mode, folder)
                if _shows(folder):
                    return folder / SCRIPT, folder / BEFORE
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / SCRIPT, folder / BEFORE


def _shows(folder: Path) -> bool:
    try:
        return bool(replay(folder).problem)
    except (IngotError, ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        return False  # the pass rejects this excerpt of the program


def _candidates(culprit: Culprit, blame: Blame) -> Iterator[Program]:
    """Yield programs on which the pass may show its fault.

    The first ones are parts of the program around the faulty rewrite, the smallest first. The last one is the whole
    program.
    """
    before = culprit.link.before
    left = {value_name(node)[1:] for node in blame.after.graph.nodes if node.op != "output"}
    names = {node.name for node in blame.before.calls() if node.name not in left}
    if blame.rewrite is not None:
        names.add(blame.rewrite.anchor)
    if blame.site is not None:
        names |= {blame.site.node.partition("/")[0], blame.site.instead_of}
    names |= {user.name for node in before.placeholders("param") if str(node.target) in names for user in node.users}
    names &= {node.name for node in before.calls()}
    if names and not before.mesh and not blame.changed:
        for hops in _HOPS:
            for with_inputs in (False, True):
                yield excerpt(before, around(before, names, hops), with_inputs=with_inputs)
    yield before


def _write(
    case: Case,
    culprit: Culprit,
    blame: Blame,
    expected: Expectation,
    program: Program,
    mode: str,
    folder: Path,
) -> None:
    link = culprit.link
    assert link.one is not None and link.context is not None
    pass_type = type(link.one)
    steps = expected.steps(blame.after, forced=mode == "forced", at_once=mode == "at once")
    at_once = whole(expected.requests, expected.pool)
    tensors = {
        **_values(case, culprit, expected, program),
        **_sources(case, program),
        **_of_steps("whole", at_once),
        **_of_steps("steps", steps),
        **_known(expected, program, blame.after, at_once=mode == "at once"),
    }
    about = {
        "module": pass_type.__module__,
        "class": pass_type.__qualname__,
        "options": link.one.options(),
        "under": link.under.name,
        "reached": link.ends_phase,
        "what": culprit.what,
        "numerics": link.one.numerics.value,
        "dtype": DTYPE_NAMES[case.request.spec.dtype],
        "pages": expected.pages,
        "page_size": expected.page_size,
        "context": {
            "target": link.context.target.name,
            "max_seq_len": link.context.max_seq_len,
            "max_batch": link.context.max_batch,
            "max_tokens": link.context.max_tokens,
            "backends": [backend.name for backend in link.context.backends],
            "deterministic": link.context.deterministic,
            "weight_budget": link.context.weight_budget,
            "bucket": link.bucket.name if link.bucket else None,
            "buckets": [bucket.model_dump(mode="json") for bucket in link.context.buckets],
            "decided": [one.model_dump(mode="json") for one in link.context.decided.values()],
            "mesh": dict(link.context.mesh),
            "skipped_fusions": [[*key, dict(reasons)] for key, reasons in link.context.skipped_fusions.items()],
        },
    }
    (folder / PASS).write_text(json.dumps(about, indent=2), encoding="utf-8")
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / TENSORS)
    (folder / BEFORE).write_text(print_program(program), encoding="utf-8")
    if blame.changed:
        (folder / AFTER).write_text(print_program(blame.after), encoding="utf-8")
    package = pass_type.__module__.partition(".")[0]
    text = _CHANGED + _TEXT.partition("\n")[2] if blame.changed else _TEXT
    needs = "" if package == "ingot" or blame.changed else f" and {package}"
    script = text.format(name=link.name, package=needs, before=BEFORE, tensors=TENSORS)
    (folder / SCRIPT).write_text(script, encoding="utf-8")


def _known(expected: Expectation, before: Program, after: Program, *, at_once: bool) -> dict[str, torch.Tensor]:
    """Return the expected values of outputs that only the program after the pass has, such as caches.

    Keys are the outputs' names with the prefix "known.". With `at_once`, all tokens are in one step.
    """
    known = expected.known(after, None, at_once=at_once)
    return {f"known.{name}": value for name, value in known.items() if name not in before.outputs}


def _of_steps(kind: str, steps: list[Step]) -> dict[str, torch.Tensor]:
    return {
        f"{kind}{number}.{name}": value
        for number, step in enumerate(steps)
        for name, value in {**step.inputs, "places": step.places}.items()
    }


def _values(case: Case, culprit: Culprit, expected: Expectation, program: Program) -> dict[str, torch.Tensor]:
    """Return values, in float64, for those inputs of an excerpt that replace calls of the whole program.

    `program` is the excerpt, a part of the program before the pass. Keys are the inputs' names with the prefix
    "value.".
    """
    before = culprit.link.before
    calls = {node.name for node in before.calls()}
    wanted = {name for name in program.input_types() if name in calls}
    if not wanted:
        return {}
    case.runs += 1
    steps = expected.steps(before, forced=True)
    seen = list(observe(before, case.params(before), steps, expected.pages, exact=True, watch=wanted))
    return {f"value.{name}": by_token(before, seen, name)[0] for name in wanted}


def _sources(case: Case, program: Program) -> dict[str, torch.Tensor]:
    """Return the checkpoint tensors from which a program's params are made.

    Keys are the tensors' names with the prefix "checkpoint.". If the tensors are too large to store, return random
    tensors of the same shapes.
    """
    names = sorted({name for spec in program.params.values() for name in spec.recipe.sources()})
    tensors = {f"checkpoint.{name}": case.read(name) for name in names}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return tensors if size <= _MOST_BYTES else _drawn(tensors)


def _drawn(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(tensor.shape, generator=generator) * float(tensor.float().std())).to(tensor.dtype)
        for name, tensor in tensors.items()
    }
