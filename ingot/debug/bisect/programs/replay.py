"""Run a reproducer of a faulty pass: a folder with a program, its inputs, and the pass's name and options."""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ingot.backends.table import find_entry
from ingot.compile.competing import backends_named
from ingot.debug.bisect.programs.chain import build_nothing, emit_nothing, rewritten
from ingot.debug.bisect.programs.compare import differs
from ingot.debug.bisect.programs.observe import Observed, observe
from ingot.debug.bisect.programs.params import Params
from ingot.debug.bisect.programs.quantized import broken_quantization
from ingot.debug.bisect.programs.schedule import Step, is_cached
from ingot.ir.artifact.backend_times import BackendTimes
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import ArtifactError, VerifyError
from ingot.ir.machine.target import Target
from ingot.ir.numerics.contracts import Measured, breach
from ingot.ir.parse import parse_program
from ingot.ir.plugins import load_user_ops
from ingot.ir.program import Program, Stage
from ingot.ir.types import DTYPES
from ingot.passes.base import Pass, PassContext

BEFORE, AFTER, TENSORS, PASS = "before.ir", "after.ir", "tensors.safetensors", "pass.json"


@dataclass(frozen=True)
class Replay:
    """The result of running a reproducer, a folder that reproduces the fault of a pass.

    `before` and `after` describe what the programs before and after the pass compute. `problem` describes the fault. It
    is "" if the fault does not occur.
    """

    before: str
    after: str
    problem: str

    def __str__(self) -> str:
        verdict = f"the fault is present: {self.problem}" if self.problem else "the fault is gone"
        return f"before: {self.before}\nafter:  {self.after}\n{verdict}"


def replay(folder: Path) -> Replay:
    """Run the installed pass on the program in a reproducer, and compare the programs before and after the pass.

    A reproducer is a folder that reproduces the fault of a pass. If it has a file after.ir, the pass had changed before
    the folder was written. Then the pass does not run, and the program in after.ir is compared instead.

    Raises ArtifactError if the folder is incomplete or the pass cannot be created.
    """
    load_user_ops()
    try:
        about = json.loads((folder / PASS).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS)
        program = parse_program((folder / BEFORE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"the reproducer is incomplete: {error}", where=str(folder)) from error
    if (folder / AFTER).exists():
        result = parse_program((folder / AFTER).read_text(encoding="utf-8"))
    else:
        one = _pass(about, folder)
        try:
            result, _ = rewritten(one, program, _context(about), Stage[about["under"]], reached=about["reached"])
        except VerifyError as error:
            return Replay(f"{len(list(program.calls()))} calls", "no valid program", error.what)
    return _compared(about, tensors, program, result)


def _pass(about: Mapping[str, Any], folder: Path) -> Pass:
    """Create the pass that a reproducer names, from the installed code.

    `about` has the module, class and options of the pass. Raises ArtifactError if the pass cannot be created. Such an
    error is not the fault to reproduce.
    """
    place, package = f"{about['module']}.{about['class']}", str(about["module"]).partition(".")[0]
    if find_spec(package) is None:
        raise ArtifactError(
            f"the pass {place} is missing: the package '{package}' is not installed",
            where=str(folder),
            hint="install the package that brings it",
        )
    try:
        made = getattr(importlib.import_module(about["module"]), about["class"])(**about["options"])
    except Exception as error:
        raise ArtifactError(
            f"the pass {place} cannot be made: {type(error).__name__}: {error}",
            where=str(folder),
            hint="run `ingot bisect` again, with the pass as it is now",
        ) from error
    if not isinstance(made, Pass):
        raise ArtifactError(f"{place} is no longer a pass", where=str(folder), hint="run `ingot bisect` again")
    return made


def _context(about: Mapping[str, Any]) -> PassContext:
    given = about["context"]
    target = Target.named(given["target"])
    entries = {name: find_entry(name) for name in given["backends"]}
    known = [name for name, entry in entries.items() if entry is not None and target.device in entry.emit]
    backends = backends_named(known, target.device)
    buckets = tuple(BucketClass.model_validate_json(json.dumps(one)) for one in given["buckets"])
    return PassContext(
        target=target,
        max_seq_len=given["max_seq_len"],
        max_batch=given["max_batch"],
        max_tokens=given["max_tokens"],
        backends=backends,
        deterministic=given["deterministic"],
        bucket=next((bucket for bucket in buckets if bucket.name == given["bucket"]), None),
        buckets=buckets,
        weight_budget=given["weight_budget"],
        emit=emit_nothing,
        emit_library=build_nothing,
        decided={one.key: one for one in map(_backend_times, given["decided"])},
        mesh=given["mesh"],
        skipped_fusions={(entry, name): reasons for entry, name, reasons in given["skipped_fusions"]},
    )


def _backend_times(value: Mapping[str, Any]) -> BackendTimes:
    return BackendTimes.model_validate_json(json.dumps(value))


def _compared(about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], before: Program, after: Program) -> Replay:
    params = Params(lambda name: tensors[f"checkpoint.{name}"])
    pages, what = int(about["pages"]), about["what"]
    pool = pages, int(about["page_size"])
    steps = {name: _steps(tensors, name, pool) for name in ("whole", "steps")}

    def run(program: Program, exact: bool) -> list[Observed]:
        chosen = steps["steps" if is_cached(program) else "whole"]
        return list(observe(program, params(program), chosen, pages, exact=exact))

    if what == "quantization":
        problem = broken_quantization(params, before, after, steps["whole"])
        return Replay("the weights of the checkpoint", "quantized weights", problem or "")
    try:
        old, new = (_joined(run(program, True)) for program in (before, after))
    except VerifyError as error:
        return Replay("runs", "does not run", str(error))
    known = {name.removeprefix("known."): value for name, value in tensors.items() if name.startswith("known.")}
    pairs = {name: (old[name], new[name]) for name in new if name in old}
    pairs |= {name: (value, new[name]) for name, value in known.items() if name in new}
    if what == "numerics":
        found, other = (_joined(run(program, False)) for program in (before, after))
        numerics, dtype = Numerics(about["numerics"]), DTYPES[about["dtype"]]
        for name in [name for name in pairs if name in found and name in other]:
            measured = Measured(found[name], old[name]), Measured(other[name], new[name])
            if broken := breach(numerics, *measured, dtype):
                return Replay(_shown(found[name], name), _shown(other[name], name), f"{name}: {broken.text}")
    for name, (one, two) in pairs.items():
        if text := differs(two, one):
            return Replay(_shown(one, name), _shown(two, name), f"{name}: {text}")
    name = next(iter(pairs), "")
    return Replay(_shown(old[name], name) if name in old else "", _shown(new[name], name) if name else "", "")


def _joined(observed: list[Observed]) -> dict[str, torch.Tensor]:
    """Return a program's outputs by name, joined over all steps.

    Outputs with a row per token have their rows in the order of the requests. Of any other output, only the last step's
    value is returned.
    """
    order = torch.cat([one.step.places for one in observed]).argsort()
    joined = {}
    for name, last in observed[-1].outputs.items():
        if all(one.outputs[name].shape[:1] == one.step.places.shape for one in observed):
            joined[name] = torch.cat([one.outputs[name] for one in observed])[order]
        else:
            joined[name] = last
    return joined


def _steps(tensors: Mapping[str, torch.Tensor], kind: str, pool: tuple[int, int]) -> list[Step]:
    """Read the inputs of steps from a reproducer's tensors.

    `kind` is "whole" for one step with all tokens, or "steps" for several steps. `pool` is the number of cache pages
    and the number of tokens in a page.

    The reproducer's program may leave out calls. Their values are stored once, for all tokens. Each step gets the rows
    of its tokens.
    """
    values = {name.removeprefix("value."): value for name, value in tensors.items() if name.startswith("value.")}
    found: list[Step] = []
    while f"{kind}{len(found)}.places" in tensors:
        prefix = f"{kind}{len(found)}."
        inputs = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        places = inputs.pop("places")
        found.append(Step({**inputs, **{name: value[places] for name, value in values.items()}}, places, pool))
    return found


def _shown(value: torch.Tensor, name: str) -> str:
    flat = value.flatten()[:4].tolist()
    return f"{name} {list(value.shape)} = {', '.join(f'{item:.6g}' for item in flat)}, …"
