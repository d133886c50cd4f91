"""Find the fault in an artifact whose programs are right.

It is in the plan, the packed weights, a recipe's step, a backend's kernel, a compiled region, or the executor. Cheap
checks come first, and each relies on those before it. The plan is compared with its programs, then the weights with
their recipes. At last the instructions run in lock-step with their references.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ingot.cli.views.plan import read_plans
from ingot.compile.competing import backend_named, with_choices
from ingot.compile.identity import exe_key
from ingot.compile.timing.tuning_log import artifact_log
from ingot.debug.bisect.execution.backend_reproducer import CALL, write_reproducer
from ingot.debug.bisect.execution.blame_backend import Misstep, first_misstep
from ingot.debug.bisect.execution.blame_plan import PlanFault, plan_fault
from ingot.debug.bisect.execution.blame_recipe import weight_fault
from ingot.debug.bisect.execution.blame_region import overflow_start, region_fault
from ingot.debug.bisect.execution.steps import pages_needed, recorded_steps
from ingot.debug.bisect.verdict import Kind, Verdict
from ingot.ir.artifact.plan import Plan, Ref
from ingot.ir.artifact.tuning import Choice
from ingot.ir.errors import ArtifactError, BackendError, IngotError, TargetError
from ingot.ir.machine.target import Target
from ingot.ir.program import Program, RegionCall, merged_params, target_name
from ingot.runtime.loading.artifact import Artifact
from ingot.runtime.loading.loader import Loaded, load_artifact
from ingot.runtime.loading.weights import map_weights

Read = Callable[[str], torch.Tensor]


def blame_execution(
    artifact: Artifact,
    programs: Sequence[Program],
    read: Read,
    requests: Sequence[Sequence[int]],
    *,
    loaded: Loaded | None = None,
    reproducer: Path | None = None,
) -> Verdict | None:
    """Check the plan, the weights and the execution of an artifact. Return a verdict on the first fault; None if there
    is none.

    `programs` are the final programs of the compile, one for each entry and bucket class (a range of step sizes).
    `read` takes a name and returns that checkpoint tensor. `requests` are sequences of token ids to run.

    `loaded` is the loaded artifact. Its states are overwritten. By default the artifact is loaded here. `reproducer` is
    a folder for a script that reproduces a backend's fault.
    """
    plans = read_plans(artifact)
    by_entry: dict[str, dict[str, Program]] = {}
    for program in programs:
        by_entry.setdefault(program.name, {})[program.bucket.name if program.bucket else ""] = program
    target = Target.named(str(artifact.manifest.target.get("name")))
    log = artifact_log(artifact, target)
    choices = () if log is None else log.given()
    for entry, plan in plans.plans.items():
        if entry not in by_entry:
            raise ArtifactError(f"program.ir has no program of the entry '{entry}'", where=str(artifact.folder))
        if fault := plan_fault(
            plan, by_entry[entry], region_keys(by_entry[entry], plans.executables.keys(), target, choices)
        ):
            return _of_plan(fault)
    index = artifact.read_json("weights.json")
    assert isinstance(index, dict)
    packed = map_weights(artifact)
    if wrong := weight_fault(merged_params(programs), packed, index, read):
        blamed = wrong.step.step if wrong.step else "packing"
        kind = Kind.WEIGHTS if wrong.packed else Kind.RECIPE
        return Verdict(
            kind, blamed=blamed, node=wrong.param, tensor=wrong.param, layer=_layer(wrong.param), found=wrong.text
        )
    if loaded is None:
        page_size = artifact.manifest.model.get("page_size")  # loading checks the value
        pages = pages_needed(requests, page_size) if isinstance(page_size, int) and page_size > 0 else None
        loaded = load_artifact(artifact.folder, num_pages=pages)
    for entry, plan in plans.plans.items():
        verdict = _blame_entry(loaded, plan, by_entry[entry], packed, requests, target, reproducer)
        if verdict is not None:
            return replace(verdict, entry=entry)
    return None


def _blame_entry(
    loaded: Loaded,
    plan: Plan,
    programs: Mapping[str, Program],
    params: Mapping[str, torch.Tensor],
    requests: Sequence[Sequence[int]],
    target: Target,
    reproducer: Path | None,
) -> Verdict | None:
    executor = loaded.executors[plan.entry]
    if loaded.context.device.type != "cpu":
        raise TargetError(
            "the passes and the weights are right; execution on a GPU is not compared with the programs yet",
            hint=f"`ingot verify {loaded.artifact.folder}` checks that it computes what it did when it was compiled",
        )
    limits = loaded.limits
    steps = recorded_steps(
        plan, requests, max_seq_len=limits.max_seq_len, page_size=limits.page_size, pages=loaded.num_pages
    )
    misstep = first_misstep(executor, programs, params, steps)
    if misstep is None:
        return None
    verdict = _of_misstep(misstep, target)
    runs = misstep.step + 1
    if verdict.kind is Kind.BACKEND and not misstep.stray:
        # Check whether everything is right with the reference in place of all equal calls of the backend.
        other = first_misstep(executor, programs, params, steps, swapped=misstep.instruction)
        runs += other.step + 1 if other else len(steps)
        what = "no other is wrong" if other is None else f"'{other.node.name}' is wrong too: {other.text}"
        verdict = replace(verdict, found=f"{verdict.found}; with the reference in its place {what}")
    if reproducer is not None and verdict.kind is Kind.BACKEND and misstep.inputs:
        script = write_reproducer(misstep, plan, loaded.artifact, reproducer)
        verdict = replace(verdict, reproducer=script, golden=script.with_name(CALL))
    return replace(verdict, runs=runs)


def region_keys(
    programs: Mapping[str, Program], made: Collection[str], target: Target, choices: Sequence[Choice] = ()
) -> dict[str, dict[str, str]]:
    """Compute the id that the executable of each region should have. A region is a group of calls that one backend
    compiles together.

    Return a mapping from bucket class (a range of step sizes) to a mapping from region name to id. `programs` has a
    program for each bucket class. `made` are the ids of the artifact's executables. `choices` are the tile sizes of the
    artifact's kernels.

    If none of a backend's computed ids is in `made`, its regions are left out. The artifact was then compiled by other
    code or another toolchain, so its ids cannot be computed here.
    """
    keys: dict[str, dict[str, str]] = {}
    same: set[str] = set()
    for bucket, program in programs.items():
        keys[bucket] = {}
        for region in program.regions.values():
            keys[bucket][region.name] = key = exe_key(
                region, with_choices(backend_named(region.backend, target.device), choices), target
            )
            same |= {region.backend} if key in made else set()
    return {
        bucket: {name: key for name, key in found.items() if programs[bucket].regions[name].backend in same}
        for bucket, found in keys.items()
    }


def _of_plan(fault: PlanFault) -> Verdict:
    node = fault.node
    at = "" if fault.number is None else f"instruction {fault.number}: "
    return Verdict(
        Kind.PLAN, blamed="make-plan", entry=fault.entry, bucket=fault.bucket, found=at + fault.text, **_place(node)
    )


def _of_misstep(misstep: Misstep, target: Target) -> Verdict:
    node, instruction = misstep.node, misstep.instruction
    at = f"step {misstep.step}, instruction {misstep.number}: "
    verdict = Verdict(
        Kind.BACKEND, blamed=instruction.backend, bucket=misstep.bucket, found=at + misstep.text, **_place(node)
    )
    verdict = replace(verdict, tensor=misstep.tensor)
    if misstep.executor:
        return replace(verdict, kind=Kind.PLAN, blamed="executor")
    if misstep.wrong is None or misstep.stray:
        return verdict
    region = misstep.alone.regions[node.target.name] if isinstance(node.target, RegionCall) else None
    body = region.body if region else misstep.alone
    inputs = [misstep.inputs[arg.ref] for arg in instruction.args if isinstance(arg, Ref)]
    if misstep.wrong.overflows and not body.states:
        given = inputs if region else [misstep.inputs[name] for name in body.input_types()]
        if (start := overflow_start(body, given)) is not None:
            where = _inside(node, start[0]) if region else _place(node)
            text = f"{at}values reach {start[1]:.4g} at '{start[0].name}', which {start[0].meta['type']} cannot hold"
            return replace(verdict, kind=Kind.OVERFLOW, blamed=start[0].name, found=text, **where)
    if region is None:
        return verdict
    try:
        fault = region_fault(region, inputs, misstep.results, backend_named(region.backend, target.device), target)
    except (BackendError, TargetError) as error:
        return replace(verdict, found=f"{verdict.found}; no compiler here can find which of its nodes: {error.what}")
    except (IngotError, RuntimeError, LookupError, TypeError, ValueError) as error:
        return replace(verdict, found=f"{verdict.found}; which of its nodes is unknown: {error}")
    where = _inside(node, fault.node) if fault.node is not None else {}
    alone = (
        f"the executable {instruction.target.removeprefix('exe.'):.12} of region '{region.name}' is wrong by itself: "
    )
    return replace(verdict, found=f"{verdict.found}; {alone if fault.stored else ''}{fault.text}", **where)


def _place(node: fx.Node | None) -> dict[str, Any]:
    if node is None:
        return {}
    origin = str(node.meta.get("origin", ""))
    return {"node": node.name, "op": target_name(node.target), "origin": origin, "layer": _layer(origin)}


def _inside(call: fx.Node, node: fx.Node) -> dict[str, Any]:
    """Return the place of `node`, a call in a region's body, as fields of a verdict: name, op, source line and layer.

    Equal layers share one body. Its source lines name the first of these layers. The actual layer is computed from
    `call`, the call of the region.
    """
    place = _place(node)
    calls, own = _layer(str(call.meta.get("origin", ""))), place["layer"]
    body = [_layer(str(one.meta.get("origin", ""))) for one in node.graph.nodes if one.op == "call_function"]
    first = next((layer for layer in body if layer is not None), None)
    if None not in (calls, own, first):
        place["layer"] = calls + own - first
        place["origin"] = place["origin"].replace(f"layer {own},", f"layer {place['layer']},")
    return place


def _layer(text: str) -> int | None:
    """Return the layer number in a source line or param name; None if it has none.

    Examples are "layer 3, attention.py:112" and "layers.3.mlp".
    """
    found = re.search(r"\blayers?[ .](\d+)\b", text)
    return int(found[1]) if found else None
