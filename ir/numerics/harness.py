"""Run a program of any stage on given tokens (teacher-forced), in chunks as serving does, and return its logits."""

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
    """Make the params of a program from checkpoint tensors by their recipes, and return them by name.

    `read` returns a checkpoint tensor by name. On a mesh, the parts that `rank` holds are returned. Recipe steps that
    occur in several calls with the same `memo` are computed once.
    """
    recipes = {name: spec.recipe.for_rank(rank) if rank else spec.recipe for name, spec in params.items()}
    return {name: recipe.execute(read, memo) for name, recipe in recipes.items()}


def rank_params(
    program: Program, read: Callable[[str], torch.Tensor], memo: dict[Recipe, Results] | None = None
) -> list[dict[str, torch.Tensor]]:
    """Make the params of a program from checkpoint tensors. Return them by name, for every rank of its mesh in order.

    `read` returns a checkpoint tensor by name. A program without a mesh has one rank. Recipe steps that occur in
    several calls with the same `memo` are computed once.
    """
    return [load_params(program.params, read, rank, memo) for rank in ranks(program.mesh)]


def fresh_states(program: Program, pages: int) -> dict[str, torch.Tensor]:
    """Return a tensor for every state of a program, by name, with `pages` pages in each cache.

    The tensors are filled with NaN or -1, so that a read of unwritten memory shows in the results.
    """
    rows = program.dims["R"].hi if "R" in program.dims else 1
    states = {}
    for name, spec in program.states.items():
        poison = float("nan") if spec.type.dtype.is_floating_point else -1
        states[name] = torch.full(spec.type.bind({"pages": pages, "R": rows, "S": rows}), poison, dtype=spec.type.dtype)
    return states


@dataclass
class InterpreterRun:
    """A callable that runs one step of a program under the interpreter: from inputs by name to outputs by name.

    It keeps the states from step to step. `exact` computes in float64; `rowwise` makes each token's result independent
    of the others.
    """

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
    """A callable that runs one step of a program on all ranks of its mesh: from inputs to outputs, by name.

    All ranks run in one process, each with its own params and with states that it keeps from step to step. A program
    without a mesh has a single rank. `exact` computes in float64. `watch` is called with each node and result. A call
    raises VerifyError if the ranks return different outputs, unless `agree` is False.
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
        """Return a callable for a program whose params are made from checkpoint tensors, which `read` returns."""
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
    """Run requests (token ids) through a program, and return the logits f32[n, vocab] of the n tokens of each request.

    A program that pools returns hidden states instead of logits. `inputs` are the types of the program's inputs by
    name; `run` runs one step. All requests run in the same steps. A program without a cache runs whole sequences in one
    step. With a cache, a step runs at most `chunk` tokens of each request (all at once by default). The pages come from
    a pool of `pages` pages of `page_size` tokens, in an order permuted by `seed`. Nothing is sampled, because with
    drafts the program would reject tokens that differ from sampled ones.
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
    """Return the output of a step that has a row per token: the logits, or hidden states for a program that pools."""
    return outputs["logits"] if "logits" in outputs else outputs["hidden"]


def chunked(lengths: Sequence[int], chunk: int | None) -> Schedule:
    """Return a schedule: for each step, pairs (index of a request, number of its next tokens that the step runs).

    `lengths` holds the number of tokens of each request. A step runs at most `chunk` tokens of a request; None: all.
    """
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
    """Run the steps of `schedule` on a program with a cache, and yield each step's outputs by name.

    A step of the schedule holds pairs (index of a request, number of its next tokens). `inputs` are the types of the
    program's inputs by name; `run` runs one step. Every token has a row of logits. `samples`: the last row of each
    sequence samples the next token, which stays on the device. Request i uses row i of states on the device. Pages come
    from a pool of `pages` pages, in an order permuted by `seed`; a sequence has other pages in each cache group.
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
    """Return the inputs, by name, of every step that runs `requests` (token ids) through a program.

    `inputs` are the types of the program's inputs by name. A step has at most `chunk` tokens of each request. None: one
    step has all tokens, and programs of all stages then return the same rows. The pages of a KV cache come from a pool
    of `pages` pages, in an order permuted by `seed`.
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
    """Return the inputs by name of one step of a program with a cache.

    `fed` holds pairs (index of a request, number of tokens that the step runs); `done` counts the tokens of each
    request that earlier steps ran. `tables` holds the pages of each request, out of `pages`.
    """
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
