"""Interpret a program of any stage over a sequence of steps, and record its outputs and the values of nodes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ingot.debug.bisect.programs.schedule import Step
from ingot.ir.cache.exact import comparable_state
from ingot.ir.interpret import interpret_ranks
from ingot.ir.numerics.harness import fresh_states
from ingot.ir.numerics.recording import assembled, is_part_of_rows, without_padding
from ingot.ir.program import Program
from ingot.ir.types import TensorType

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Observed:
    """The results of one step of a program.

    `outputs` maps names to outputs. On a mesh of devices, a state among them is a stack [ranks, …]. `values` maps the
    name of each watched node to its values, one for each rank. A value whose rows are split over ranks is joined.
    """

    step: Step
    outputs: dict[str, torch.Tensor]
    values: dict[str, list[torch.Tensor]] = field(default_factory=dict)


def observe(
    program: Program,
    params: Sequence[Tensors],
    steps: Sequence[Step],
    pages: int,
    *,
    exact: bool,
    watch: Collection[str] = (),
) -> Iterator[Observed]:
    """Interpret a program over `steps` in order. Yield the results of each step.

    `params` has a mapping of the params for each rank. `pages` is the number of cache pages. States are fresh before
    the first step. With `exact`, compute in float64. `watch` has the names of nodes whose values are recorded. Nodes
    inside regions cannot be watched.
    """
    states = [fresh_states(program, pages) for _ in params]
    for step in steps:
        inputs = step.of(program.input_types())
        if not exact:  # inputs may be more precise than the program's dtypes
            types = program.input_types()
            inputs = {name: value.to(types[name].dtype) for name, value in inputs.items()}
        seen: dict[str, list[torch.Tensor]] = {}

        def look(node: fx.Node, value: object, seen: dict[str, list[torch.Tensor]] = seen) -> None:
            if node.graph is program.graph and node.name in watch and isinstance(value, torch.Tensor):
                seen.setdefault(node.name, []).append(value)

        values = [{**own, **kept, **inputs} for own, kept in zip(params, states, strict=True)]
        results = interpret_ranks(program, values, exact=exact, watch=look if watch else None)
        for kept, result in zip(states, results, strict=True):
            kept.update({name: result[name] for name in kept})
        outputs = {}
        for name in program.outputs:
            of_ranks = [result[name] for result in results]
            if name in program.states:
                of_ranks = [comparable_state(program, name, one) for one in of_ranks]
            stacked = len(of_ranks) > 1 and name in program.states
            outputs[name] = torch.stack(of_ranks) if stacked else of_ranks[0]
        placed = {str(node.target): node.name for node in program.placeholders()}
        for given in values if watch else ():
            for name, value in given.items():
                if placed.get(name) in watch:
                    seen.setdefault(placed[name], []).append(value)
        for node in program.graph.nodes if program.mesh else ():
            if node.name in seen and is_part_of_rows(node):
                whole = assembled(seen[node.name], node.meta["placement"], program.mesh)
                seen[node.name] = [without_padding(node, whole, program, inputs)] * len(results)
        yield Observed(step, outputs, seen)


def by_token(program: Program, observed: Sequence[Observed], name: str) -> list[torch.Tensor]:
    """Return the recorded value of a node for each rank, joined over the steps.

    A value with a row per token has its rows in the order of the requests. Of any other value, only the last step's
    value is returned.
    """
    node = next(node for node in program.graph.nodes if node.name == name)
    steps = [one for one in observed if name in one.values]
    if not is_by_token(node):
        return steps[-1].values[name] if steps else []
    joined = []
    for rank in range(len(steps[0].values[name]) if steps else 0):
        rows = torch.cat([one.values[name][rank] for one in steps])
        order = torch.cat([one.step.places for one in steps])
        joined.append(rows[order.argsort()])
    return joined


def is_by_token(node: fx.Node) -> bool:
    """Return whether a node's value has a row for each token.

    A value with a row for each row of logits counts too. In a bisection, every token has a row of logits.
    """
    value_type = node.meta["type"]
    by_row = isinstance(value_type, TensorType) and value_type.shape[:1] in (("T",), ("L",))
    return by_row or is_part_of_rows(node)
