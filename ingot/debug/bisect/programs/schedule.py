"""Make steps that expose faults of programs: chunked prompts, prefill mixed with decode, samplers of every kind, and
pages and rows out of order."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from ingot.ir.cache.groups import FULL, group_of_input
from ingot.ir.errors import ArtifactError
from ingot.ir.features import FedSequence, fed_of, step_inputs, step_values, turn_of
from ingot.ir.features.paging import PAGING
from ingot.ir.program import Program
from ingot.ir.types import TensorType

# Tokens of a sequence in a step. The number is odd, so that steps end inside pages of any power of two.
CHUNK = 11
PAGE_SIZE = 16
# Inputs that only sequences with pages have.
_OF_PAGES = frozenset(one.name for one in PAGING.inputs)


@dataclass(frozen=True)
class SamplerOptions:
    """The sampling options of a request. Each field has the name of the step input for this option, such as
    `temperature`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seeds: int = 0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    banned: tuple[int, ...] = ()
    targets: int = -1
    num_logprobs: int = -1

    @property
    def counts(self) -> bool:
        """Return whether the request has penalties. If so, the program must count the tokens of the request."""
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)


GREEDY = SamplerOptions()
# Requests use these in turn. Every sampler input occurs, no two inputs of a row are equal, and one row is greedy. The
# penalties of a row cancel for a token that it generated once, so that swapping two of them changes later tokens.
SAMPLERS = (
    SamplerOptions(num_logprobs=4),
    SamplerOptions(0.8, 9, 0.95, 0.02, 0.999, 12345, 1.7, 2.0, -2.0, num_logprobs=2, targets=7),
    SamplerOptions(1.3, 0, 0.7, 0.0, 0.9, 2**40 + 1, banned=(3, 5, 8)),
    SamplerOptions(0.6, 5, 1.0, 0.1, 0.999, 99, 0.8, -2.0, 2.0, num_logprobs=0),
)


@dataclass(frozen=True)
class Request:
    """A sequence to serve.

    The first `prompt` tokens of `tokens` are the prompt. `row` is the row of the sequence in per-sequence tensors on
    the device. `pages` are the numbers of its cache pages, in order.
    """

    tokens: tuple[int, ...]
    prompt: int
    sampler: SamplerOptions = GREEDY
    row: int = 0
    pages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """The inputs of one step, for any program of a compile.

    `inputs` maps names to the inputs that a program may have. `places` has the index of each of the step's tokens in
    the concatenation of all requests. `pool` is the number of cache pages and the number of tokens in a page.

    Pages are numbered as in the caches that keep every token. Caches with a window number their pages differently; `of`
    converts the numbers.
    """

    inputs: Mapping[str, torch.Tensor]
    places: torch.Tensor
    pool: tuple[int, int]

    def of(self, inputs: Mapping[str, TensorType]) -> dict[str, torch.Tensor]:
        """Return the step's values for the inputs of a program, by name.

        `inputs` maps the names of the program's inputs to their types. Raises ArtifactError for an unknown input.
        """
        return {name: self._value(name) for name in inputs}

    def _value(self, name: str) -> torch.Tensor:
        group = group_of_input(name) or FULL
        turned = {group.page_table: FULL.page_table, group.slots: FULL.slots}
        if turned.get(name, name) not in self.inputs:
            raise ArtifactError(f"the input '{name}' is unknown", expected=", ".join(sorted(self.inputs)))
        if name not in turned:
            return self.inputs[name]
        value = self.inputs[turned[name]]
        pages, page_size = self.pool
        unit = page_size if name == group.slots else 1
        moved = (value + turn_of(group, pages) * unit) % max(1, pages * unit)
        return torch.where(value < 0, value, moved) if group.forgets else value


def is_cached(program: Program) -> bool:
    """Return whether a program has states, such as KV caches. Then it can process a sequence in several steps."""
    return any(True for _ in program.placeholders("state"))


def with_pages(requests: Sequence[Request], page_size: int, seed: int = 0) -> tuple[list[Request], int]:
    """Assign cache pages to the requests in a random order. Return the requests with their pages, and the number of all
    pages.

    `seed` sets the random order. Some pages stay unused.
    """
    widths = [-(-len(request.tokens) // page_size) for request in requests]
    order = list(range(sum(widths) + 3))  # a few unused ones
    random.Random(seed).shuffle(order)
    given = []
    for request, width in zip(requests, widths, strict=True):
        taken, order = tuple(order[:width]), order[width:]
        given.append(Request(request.tokens, request.prompt, request.sampler, request.row, taken))
    return given, sum(widths) + 3


def whole(requests: Sequence[Request], pool: tuple[int, int]) -> list[Step]:
    """Return a list of one step with all tokens of all requests.

    `pool` is the number of cache pages and the number of tokens in a page.
    """
    return [_step(requests, [len(request.tokens) for request in requests], [0] * len(requests), pool, False)]


def in_chunks(requests: Sequence[Request], pool: tuple[int, int], *, by_device: bool, chunk: int = CHUNK) -> list[Step]:
    """Return steps that serve the requests: prompts in chunks of `chunk` tokens, then generated tokens one by one.

    `pool` is the number of cache pages and the number of tokens in a page. With `by_device`, the program reads
    generated tokens from the device. Otherwise they are step inputs.
    """
    steps, done = [], [0] * len(requests)
    while any(place < len(request.tokens) for place, request in zip(done, requests, strict=True)):
        counts = [
            min(chunk, request.prompt - place) if place < request.prompt else min(1, len(request.tokens) - place)
            for place, request in zip(done, requests, strict=True)
        ]
        steps.append(_step(requests, counts, done, pool, by_device))
        done = [place + count for place, count in zip(done, counts, strict=True)]
    return steps


def _step(
    requests: Sequence[Request], counts: Sequence[int], done: Sequence[int], pool: tuple[int, int], by_device: bool
) -> Step:
    """Return a step with `counts[i]` tokens of request i.

    Earlier steps have processed the first `done[i]` tokens of the request. Every token has a row of logits. With
    `by_device`, generated tokens are read from the device instead of from inputs.
    """
    batch = [index for index, count in enumerate(counts) if count]
    begins = [sum(len(request.tokens) for request in requests[:index]) for index in range(len(requests))]
    places = [begins[index] + done[index] + i for index in batch for i in range(counts[index])]
    sequences = [_fed(requests[index], done[index], counts[index], by_device) for index in batch]
    paged = all(one.pages for one in sequences)
    names = [name for name in step_inputs() if paged or name not in _OF_PAGES]
    return Step(step_values(names, fed_of(sequences, pool[1])), torch.tensor(places), pool)


def _fed(request: Request, done: int, count: int, by_device: bool) -> FedSequence:
    asked = request.sampler
    given = {field.name: getattr(asked, field.name) for field in fields(asked) if field.name != "targets"}
    if asked.counts:
        given |= {"count_rows": request.row, "prompt_ends": request.prompt}
    return FedSequence(
        row=request.row,
        tokens=[
            -1 if by_device and place >= request.prompt else request.tokens[place]
            for place in range(done, done + count)
        ],
        place=done,
        # The first step sets the start of a sequence; later ones use the device's own position.
        start=0 if done == 0 else -1,
        pages=request.pages,
        rows=count,
        samples=done + count >= request.prompt,  # nothing is sampled within a prompt
        params=given,
        prompt_logprobs=(asked.targets, asked.num_logprobs) if asked.targets >= 0 else None,
    )
