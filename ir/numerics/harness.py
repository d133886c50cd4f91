"""Run a program of any stage on requests, teacher-forced. Tests of passes and of parity build on it."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ingot.ir.cache.groups import table_groups
from ingot.ir.errors import VerifyError
from ingot.ir.features import FedSequence, fed_of, step_values, turn_of
from ingot.ir.interpret import Watch, interpret, interpret_ranks
from ingot.ir.mesh import Rank, ranks
from ingot.ir.program import ParamSpec, Program
from ingot.ir.recipe import Recipe, Results
from ingot.ir.types import TensorType

# Runs one step: takes inputs by name and returns outputs by name. The callable keeps the states.
Run = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
# The tokens of each step: pairs of a request's index and the number of its next tokens.
Schedule = Sequence[Sequence[tuple[int, int]]]


def load_params(
    params: Mapping[str, ParamSpec],
    read: Callable[[str], torch.Tensor],
    rank: Rank | None = None,
    memo: dict[Recipe, Results] | None = None,
) -> dict[str, torch.Tensor]:
    """Return every param by name, made by its recipe from checkpoint tensors; on a mesh, `rank`'s part.

    `memo` is as in `Recipe.execute`: programs that share it share tensors.
    """
    recipes = {name: spec.recipe.for_rank(rank) if rank else spec.recipe for name, spec in params.items()}
    return {name: recipe.execute(read, memo) for name, recipe in recipes.items()}


def rank_params(
    program: Program, read: Callable[[str], torch.Tensor], memo: dict[Recipe, Results] | None = None
) -> list[dict[str, torch.Tensor]]:
    """Return `load_params` of every rank in order; a program without a mesh has one."""
    return [load_params(program.params, read, rank, memo) for rank in ranks(program.mesh)]


def fresh_states(program: Program, pages: int) -> dict[str, torch.Tensor]:
    """Return every state, filled with NaN or -1, so that a read of unwritten memory shows."""
    rows = program.dims["R"].hi if "R" in program.dims else 1
    states = {}
    for name, spec in program.states.items():
        poison = float("nan") if spec.type.dtype.is_floating_point else -1
        states[name] = torch.full(spec.type.bind({"pages": pages, "R": rows, "S": rows}), poison, dtype=spec.type.dtype)
    return states


@dataclass
class InterpreterRun:
    """A `Run` of a program under the interpreter, which keeps its states."""

    program: Program
    params: Mapping[str, torch.Tensor]
    pages: int = 64
    exact: bool = False
    rowwise: bool = False
    states: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states = fresh_states(self.program, self.pages)

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        values = {**self.params, **self.states, **inputs}
        outputs = interpret(self.program, values, exact=self.exact, rowwise=self.rowwise)
        for name in self.states:
            self.states[name] = outputs[name]
        return outputs


@dataclass
class MeshRun:
    """A `Run` of a program on a mesh: all ranks in one process, each with its own params and states.

    A program without a mesh has a single rank. `watch` is as in `interpret_ranks`. Raises VerifyError if the ranks
    return different outputs, unless `agree` is False.
    """

    program: Program
    params: Sequence[Mapping[str, torch.Tensor]]
    pages: int = 64
    exact: bool = False
    watch: Watch | None = None
    agree: bool = True
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @staticmethod
    def load(program: Program, read: Callable[[str], torch.Tensor], *, exact: bool = False) -> "MeshRun":
        """Return a run with each rank's part of every param, made from checkpoint tensors."""
        return MeshRun(program, rank_params(program, read), exact=exact)

    def __post_init__(self) -> None:
        self.states = [fresh_states(self.program, self.pages) for _ in self.params]

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        values = [{**params, **states, **inputs} for params, states in zip(self.params, self.states, strict=True)]
        outputs = interpret_ranks(self.program, values, exact=self.exact, watch=self.watch)
        for states, result in zip(self.states, outputs, strict=True):
            for name in states:
                states[name] = result[name]
        for name in outputs[0].keys() - self.program.states.keys():
            for index, other in enumerate(outputs[1:] if self.agree else (), 1):
                if not torch.equal(other[name], outputs[0][name]):
                    raise VerifyError(f"ranks 0 and {index} return different '{name}'")
        return outputs[0]


def teacher_forced(
    inputs: Mapping[str, TensorType],
    run: Run,
    requests: Sequence[Sequence[int]],
    *,
    chunk: int | None = None,
    pages: int = 64,
    page_size: int = 16,
    seed: int | None = None,
) -> list[torch.Tensor]:
    """Return the logits f32[n, vocab] of every position of each request of n tokens, with all requests in the same
    steps; for a program that pools, its hidden states.

    `inputs` are the program's (`Program.input_types()`, or the types in a plan). A program without a cache runs whole
    sequences in one step. With a cache, a step runs at most `chunk` tokens of each request (all at once by default).
    The pages come from a pool of `pages` pages of `page_size` tokens, in an order permuted by `seed`. No step samples,
    because an ending that compares tokens with sampled ones would reject some.
    """
    if not table_groups(inputs):
        outputs = run(_whole(inputs, requests))
        return list(_rows(outputs).split([len(request) for request in requests]))
    steps = chunked([len(request) for request in requests], chunk)
    results: list[list[torch.Tensor]] = [[] for _ in requests]
    served = scheduled(inputs, run, requests, steps, pages, page_size, seed, samples=False)
    for fed, outputs in zip(steps, served, strict=True):
        for (index, _), rows in zip(fed, _rows(outputs).split([count for _, count in fed]), strict=True):
            results[index].append(rows)
    return [torch.cat(rows) for rows in results]


def _rows(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the output with a row per token of the step."""
    return outputs["logits"] if "logits" in outputs else outputs["hidden"]


def chunked(lengths: Sequence[int], chunk: int | None) -> Schedule:
    """Return the schedule of requests of these lengths, at most `chunk` tokens of each per step; None: all at once."""
    size = chunk or max(lengths)
    return [
        [(index, min(size, length - done)) for index, length in enumerate(lengths) if done < length]
        for done in range(0, max(lengths), size)
    ]


def scheduled(
    inputs: Mapping[str, TensorType],
    run: Run,
    requests: Sequence[Sequence[int]],
    schedule: Schedule,
    pages: int,
    page_size: int,
    seed: int | None = None,
    *,
    samples: bool = True,
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the outputs of each step of a program with a cache. Every token of a step has a row of logits. `samples`:
    the last row of each sequence samples the next token, which stays on the device.

    Each request keeps the device row with its index. The cache's pages are drawn as in `teacher_forced`, and differ
    between cache groups (`turn_of`).
    """
    order = list(range(pages))
    if seed is not None:
        random.Random(seed).shuffle(order)
    supply = itertools.chain(order)
    tables = [[next(supply) for _ in range(-(-len(request) // page_size))] for request in requests]
    done = [0] * len(requests)
    for fed in schedule:
        yield run(_step(inputs, requests, fed, done, tables, pages, page_size, samples))
        for index, count in fed:
            done[index] += count


def step_inputs(
    inputs: Mapping[str, TensorType],
    requests: Sequence[Sequence[int]],
    *,
    chunk: int | None = None,
    pages: int = 64,
    page_size: int = 16,
    seed: int | None = None,
) -> list[Mapping[str, torch.Tensor]]:
    """Return the inputs of the steps that `teacher_forced` makes from the same arguments.

    Without `chunk` that is one step of all tokens, for which programs of all stages compute the same rows.
    """
    steps: list[Mapping[str, torch.Tensor]] = []

    def keep(given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        steps.append(given)
        return {"logits": torch.empty(len(given["tokens"]), 0)}

    teacher_forced(inputs, keep, requests, chunk=chunk, pages=pages, page_size=page_size, seed=seed)
    return steps


def _whole(inputs: Mapping[str, TensorType], requests: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Return the inputs of one step with all tokens of all requests, for a program without a cache."""
    return step_values(inputs, fed_of([_fed(row, request, 0, (), False) for row, request in enumerate(requests)], 1))


def _step(
    inputs: Mapping[str, TensorType],
    requests: Sequence[Sequence[int]],
    fed: Sequence[tuple[int, int]],
    done: Sequence[int],
    tables: Sequence[Sequence[int]],
    pages: int,
    page_size: int,
    samples: bool,
) -> dict[str, torch.Tensor]:
    """Return the inputs of one step with the tokens `fed` after the `done` tokens of each request."""
    sequences = [
        _fed(index, requests[index][done[index] : done[index] + count], done[index], tables[index], samples)
        for index, count in fed
    ]
    step = fed_of(sequences, page_size, width=max(map(len, tables)))
    step.group_pages = {group: (step.pages + turn_of(group, pages)) % pages for group in table_groups(inputs)}
    return step_values(inputs, step)


def _fed(row: int, tokens: Sequence[int], place: int, pages: Sequence[int], samples: bool) -> FedSequence:
    # The first step passes the start position; later ones use the device's own position.
    return FedSequence(row, tokens, place, 0 if place == 0 else -1, pages, len(tokens), samples)
