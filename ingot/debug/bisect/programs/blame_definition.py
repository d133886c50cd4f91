"""Find where a model's definition and an oracle differ, by comparing the traced program's tensors with the oracle's."""

import torch
from torch import fx

from ingot.compile.request import Request
from ingot.debug.bisect.case import Case, recorded_requests
from ingot.debug.bisect.programs.observe import is_by_token, observe
from ingot.debug.bisect.programs.oracles import Digest, Oracle
from ingot.debug.bisect.programs.schedule import Request as Sequence
from ingot.debug.bisect.programs.schedule import whole
from ingot.debug.bisect.verdict import Kind, Verdict
from ingot.ir.numerics.recording import layer_of
from ingot.ir.program import VIEWS, Program, target_name
from ingot.ir.text import print_program

# The tolerance between logits and an oracle's, relative to the largest one. Oracles compute at least partly in float32,
# whose tolerance for one op is as large.
_NEAR = 1e-4


def blame_definition(case: Case, oracle: Oracle) -> Verdict | None:
    """Compare the traced program with an independent implementation of the model, the oracle.

    Return None if the logits are equal up to rounding. Otherwise return a verdict on the first call with a result that
    the oracle does not compute. If no such call is found, or if the oracle shows no intermediate tensors, the verdict
    names only the architecture.
    """
    program = _traced(case)
    folder, context = case.request.checkpoint.folder, case.request.limits.max_seq_len
    requests = recorded_requests(case.artifact, case)
    theirs = oracle.logits(folder, requests, context)
    case.runs += 1
    (step,) = whole([Sequence(tuple(request), len(request)) for request in requests], (1, 1))
    (seen,) = observe(program, case.params(program), [step], 1, exact=True)
    ours = seen.outputs["logits"].split([len(request) for request in requests])
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if problem := _difference(mine, other):
            found = f"logits of request {index} {problem}, by {oracle.name}; all passes keep the meaning"
            if oracle.watched is None:
                return Verdict(Kind.DEFINITION, blamed=case.request.spec.architecture, tensor="logits", found=found)
            return _located(case, program, oracle.watched(folder, requests[index], context), requests[index], found)
    return None


def _traced(case: Case) -> Program:
    """Return the traced program of the entry `main`.

    The model is traced again in float32, so that constants are not rounded to its dtype. If the installed model
    definition has changed since the compile, return the artifact's traced program instead.
    """
    stored = next(chain for chain in case.chains if chain.entry == "main").links[0].program
    same = print_program(stored) == print_program(case.model.entries["main"])
    if not same or case.request.spec.dtype is torch.float32:
        return stored
    options = {**case.request.options, "dtype": "float32"}
    return Request.read(case.request.checkpoint.folder, **options).trace().entries["main"]


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    if found.shape != expected.shape:
        return f"are {list(found.shape)}, expected {list(expected.shape)}"
    error = (found.double() - expected.double()).abs().nan_to_num(nan=float("inf"))
    if float(error.max()) <= _NEAR * max(1.0, float(expected.double().abs().max())):
        return None
    rows = (error.amax(-1) > _NEAR * max(1.0, float(expected.double().abs().max()))).nonzero()
    place = int(rows[0])
    token = int(error[place].argmax())
    return (
        f"part at position {place}: token {token} has {float(found[place, token]):.6g}, "
        f"expected {float(expected[place, token]):.6g}"
    )


def _located(case: Case, program: Program, theirs: list[Digest], request: list[int], found: str) -> Verdict:
    """Return a verdict on the first faulty call of the traced program.

    A call is faulty if the oracle, an independent implementation, computes neither its result nor any result that
    depends on it. `theirs` has digests of the tensors that the oracle computed. `request` is the token sequence to run.
    `found` describes the wrong logits.
    """
    calls = [node for node in program.calls() if is_by_token(node) and node.meta["type"].dtype.is_floating_point]
    case.runs += 1
    (step,) = whole([Sequence(tuple(request), len(request))], (1, 1))
    names = {node.name for node in calls}
    (seen,) = observe(program, case.params(program), [step], 1, exact=True, watch=names)
    matches = {node: _match(Digest.of(seen.values[node.name][0]), theirs) for node in calls}
    absent = {node for node, match in matches.items() if match is None}
    for node in calls:
        if (
            node in absent
            and node.target not in VIEWS
            and not any(other not in absent for other in _dependents(node, calls))
        ):
            module = _module(node, program, matches)
            return Verdict(
                Kind.DEFINITION,
                blamed=str(node.meta.get("origin", "")).rpartition(", ")[2] or node.name,
                node=node.name,
                op=target_name(node.target),
                tensor=node.name,
                layer=layer_of(node),
                origin=str(node.meta.get("origin", "")),
                found=f"{found}; its module {module} makes no such value from the values that both have",
            )
    return Verdict(Kind.DEFINITION, blamed=case.request.spec.architecture, tensor="logits", found=found)


def _match(digest: Digest, theirs: list[Digest]) -> Digest | None:
    return next((other for other in theirs if digest.is_near(other)), None)


def _dependents(node: fx.Node, calls: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes among `calls` that depend on the value of `node`, directly or through other `calls`."""
    found, waiting, known = set(), list(node.users), set(calls)
    while waiting:
        one = waiting.pop()
        if one not in found and one in known:
            found.add(one)
            waiting += one.users
    return found


def _module(node: fx.Node, program: Program, matches: dict[fx.Node, Digest | None]) -> str:
    """Return the quoted name of the module that corresponds to a call, in the oracle (an independent implementation).

    The name comes from a weight that the call reads. For a call without weights, it comes from the modules that
    computed its inputs. `matches` maps each call to the digest of the oracle's equal tensor, None if there is none.
    """
    for source in node.all_input_nodes:
        if source.op == "placeholder" and str(source.target) in program.params:
            for name in sorted(program.params[str(source.target)].recipe.sources()):
                return f"'{name.rpartition('.')[0]}'"
    modules = [match.module for source in node.all_input_nodes if (match := matches.get(source)) is not None]
    common = []
    for parts in zip(*(module.split(".") for module in modules), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return f"'{'.'.join(common)}'"
