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
    """Make a program's params from checkpoint tensors, by their recipes. Return them by name.

    `read` returns a checkpoint tensor by name. With `rank`, only this rank's parts are returned. Calls with one `memo`
    compute equal recipe steps once.
    """
    recipes = {name: spec.recipe.for_rank(rank) if rank else spec.recipe for name, spec in params.items()}
    return {name: recipe.execute(read, memo) for name, recipe in recipes.items()}


def rank_params(
    program: Program, read: Callable[[str], torch.Tensor], memo: dict[Recipe, Results] | None = None
) -> list[dict[str, torch.Tensor]]:
    """Make a program's params from checkpoint tensors. Return them by name, for each rank of its mesh in order.

    `read` returns a checkpoint tensor by name. A program without a mesh has one rank. Calls with one `memo` compute
    equal recipe steps once.
    """
    return [load_params(program.params, read, rank, memo) for rank in ranks(program.mesh)]


def fresh_states(program: Program, pages: int) -> dict[str, torch.Tensor]:
    """Return a tensor for each state of a program, by name. Caches have `pages` pages.

    The tensors are filled with NaN or -1, so that results show when unwritten memory is read.
    """
    rows = program.dims["R"].hi if "R" in program.dims else 1
    states = {}
    for name, spec in program.states.items():
        poison = float("nan") if spec.type.dtype.is_floating_point else -1
        states[name] = torch.full(spec.type.bind({"pages": pages, "R": rows, "S": rows}), poison, dtype=spec.type.dtype)
    return states


@dataclass
class InterpreterRun:
    """A callable that runs one step of a program in the interpreter. It maps inputs by name to outputs by name.

    It keeps the states between steps. `exact` computes in float64. With `rowwise`, a token's result does not depend on
    the other tokens in the step.
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
    """A callable that runs one step of a program on all ranks of its mesh. It maps inputs by name to outputs by name.

    All ranks run in one process. Each has its params and its states, which are kept between steps. A program without a
    mesh has one rank. `exact` computes in float64. `watch` is called with each node and its result. If `agree`, a step
    raises VerifyError when ranks return different outputs.
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
        """Make the params of a program from checkpoint tensors, and return a callable that runs it.

        `read` returns a checkpoint tensor by name.
        """
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
    """Run requests (token ids) through a program, and return the logits f32[n, vocab] of each request's n tokens.

    A program that pools returns hidden states instead. `inputs` are the types of the program's inputs by name. `run`
    runs one step. All requests run together in each step. A step runs at most `chunk` tokens of each request; None: all
    tokens. A program without a cache always runs whole requests in one step.

    `pages` pages of `page_size` tokens are used, in an order permuted by `seed`. No token is sampled: a program with
    drafts would reject given tokens that differ from sampled ones.
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
    """Return the output of a step with a row per token: logits, or hidden states if the program pools."""
    return outputs["logits"] if "logits" in outputs else outputs["hidden"]


def chunked(lengths: Sequence[int], chunk: int | None) -> Schedule:
    """Return a schedule that runs each request in chunks of at most `chunk` tokens; None: all tokens at once.

    A schedule lists, for each step, pairs (index of a request, number of its next tokens to run). `lengths` holds the
    number of tokens of each request.
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
    """Run the steps of `schedule` on a program with a cache, and yield the outputs of each step by name.

    A step of the schedule holds pairs (index of a request, number of its next tokens to run). `inputs` are the types of
    the program's inputs by name. `run` runs one step. Each token gets a row of logits. If `samples`, the last row of
    each sequence samples a token, which stays on the device. Request i uses row i of the states on the device.

    Pages come from a pool of `pages` pages, in an order permuted by `seed`. A sequence has different pages in each
    group of caches.
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
    """Return the inputs, by name, of each step that runs `requests` (token ids) through a program.

    `inputs` are the types of the program's inputs by name. A step has at most `chunk` tokens of each request. None: one
    step has all tokens, so that programs of all stages return the same rows. Pages of a KV cache come from a pool of
    `pages` pages, in an order permuted by `seed`.
    """
    steps: list[Mapping[str, torch.Tensor]] = []

    def keep(given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        steps.append(given)
        return {"logits": torch.empty(len(given["tokens"]), 0)}

    teacher_forced(inputs, keep, requests, chunk=chunk, pages=pages, page_size=page_size, seed=seed)
    return steps


def _whole(inputs: Mapping[str, TensorType], requests: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Return the inputs of one step that runs all tokens of all requests, for a program without a cache."""
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
    """Return the inputs, by name, of one step of a program with a cache.

    `fed` holds pairs (index of a request, number of its next tokens to run). `done` holds how many tokens of each
    request have run before. `tables` holds the pages of each request, with numbers below `pages`.
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
