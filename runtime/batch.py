"""What the scheduler decided for one step, and how that becomes the step's inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ingot.runtime.request import Request
from ingot.runtime.step import STEP_FIELDS, StepBuffer, StepInputs, StepSizes
from ingot.runtime.token_counts import Recount

_NUMPY: Mapping[torch.dtype, np.dtype[Any]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
}
# How a row of logits is sampled and rated when nobody asks for anything.
NOTHING_ASKED: Mapping[str, float] = {
    "seeds": 0,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "count_rows": -1,
    "repetition": 1.0,
    "frequency": 0.0,
    "presence": 0.0,
    "banned": -1,
    "targets": -1,
    "num_logprobs": -1,
}


class Chunk(NamedTuple):
    """What one sequence does in a step: feed `length` tokens, the first at position `start`.

    on_device   its one token is not known on the host yet: the device takes it, and its position, from its row
    samples     the last token fed is the last one there is, so the step gives the next one
    scored      positions among those fed whose logits rate the prompt's next token
    recounts    its row does not count the tokens before `start`, and has to
    """

    request: Request
    row: int
    start: int
    length: int
    on_device: bool
    samples: bool
    scored: range = range(0)
    recounts: bool = False


@dataclass(frozen=True)
class StepBatch:
    """One scheduled step: first the sequences of `decodes`, each of which feeds the token that its device row holds and
    gets the next one, then those of `chunks`. `sampled` are all requests that get a token, in the order of the logit
    rows.

    Behind their rows stand those of `scored`: a request and how many rows it has, in the order of its prompt. Without
    either, one dummy logit row is computed, and its token is to be ignored.
    """

    step: int
    decodes: tuple[Request, ...]
    chunks: tuple[Chunk, ...]
    sampled: tuple[Request, ...]
    inputs: StepInputs
    scored: tuple[tuple[Request, int], ...] = ()

    @property
    def requests(self) -> tuple[Request, ...]:
        """All whose tokens it feeds."""
        return (*self.decodes, *(chunk.request for chunk in self.chunks))

    @property
    def gives_logprobs(self) -> bool:
        """Whether any request gets log-probabilities from this step."""
        return bool((self.inputs.arrays["num_logprobs"] >= 0).any())


class RowTables:
    """What the steps need per device row, kept as arrays so that a step gathers it instead of rebuilding it."""

    def __init__(self, max_batch: int, max_pages: int) -> None:
        self.pages = np.zeros((max_batch, max_pages), np.int32)
        self.num_pages = np.zeros(max_batch, np.int32)
        self.prompt_ends = np.full(max_batch, -1, np.int32)
        self.unbanned_at = np.zeros(max_batch, np.int32)  # with so many tokens, prompt included, all may be sampled
        self.banning: set[int] = set()  # rows of those that may not be sampled at first
        self.version = object()  # another one after every change of anything but the pages
        self.asked = {
            name: np.zeros([max_batch, *map(int, dims[1:])], _NUMPY[dtype])
            for name, dtype, dims in STEP_FIELDS
            if name in NOTHING_ASKED
        }

    def set_request(self, row: int, request: Request) -> None:
        self.version = object()
        params, asked = request.params, self.asked
        prompt_len = len(request.prompt_ids)
        self.prompt_ends[row] = prompt_len if params.penalizes else -1
        self.unbanned_at[row] = min(prompt_len + params.min_tokens, request.max_total)
        for name, value in NOTHING_ASKED.items():
            asked[name][row] = value
        asked["seeds"][row] = request.seed
        if not params.greedy:
            for name in ("temperature", "top_k", "top_p", "min_p"):
                asked[name][row] = getattr(params, name)
        if params.penalizes:
            asked["count_rows"][row] = row
            for name in ("repetition", "frequency", "presence"):
                asked[name][row] = getattr(params, f"{name}_penalty")
        if params.min_tokens:
            self.banning.add(row)
            ends = request.end_tokens()
            asked["banned"][row, : len(ends)] = sorted(ends)
        if params.logprobs is not None:
            asked["num_logprobs"][row] = params.logprobs

    def add_pages(self, row: int, pages: Sequence[int]) -> None:
        held = self.num_pages[row]
        self.pages[row, held : held + len(pages)] = pages
        self.num_pages[row] = held + len(pages)

    def set_page(self, row: int, place: int, page: int) -> None:
        self.pages[row, place] = page

    def clear(self, row: int) -> None:
        self.pages[row, : self.num_pages[row]] = 0
        self.num_pages[row] = 0
        self.banning.discard(row)


def build_step(
    step: int, decodes: Sequence[Request], chunks: Sequence[Chunk], tables: RowTables, buffer: StepBuffer
) -> StepBatch:
    """Fill `buffer` with the inputs of these sequences, at least one."""
    sampled = (*decodes, *(chunk.request for chunk in chunks if chunk.samples))
    scored = tuple((chunk.request, len(chunk.scored)) for chunk in chunks if chunk.scored)
    rows = np.array([request.row for request in decodes] + [chunk.row for chunk in chunks], np.int32)
    sizes = StepSizes(
        T=len(decodes) + sum(chunk.length for chunk in chunks),
        B=len(rows),
        L=max(1, len(sampled) + sum(count for _, count in scored)),
        P=int(tables.num_pages[rows].max()),
    )
    inputs = buffer.views(sizes)
    # Steps that only decode differ from each other in little as long as the same sequences run.
    stamp = None if chunks else (rows.tobytes(), tables.version)
    if stamp is None or stamp != inputs.stamp:
        inputs.stamp = None
        _fill(inputs.arrays, rows, len(decodes), chunks, tables)
        inputs.stamp = stamp
    inputs.recounts = tuple(_recount(chunk) for chunk in chunks if chunk.recounts)
    np.take(tables.pages[:, : sizes.P], rows, axis=0, out=inputs.arrays["page_table"], mode="clip")
    if tables.banning:
        _fill_banned(inputs.arrays["banned"], decodes, chunks, tables)
    return StepBatch(step, tuple(decodes), tuple(chunks), sampled, inputs, scored)


def _fill(
    arrays: Mapping[str, np.ndarray], rows: np.ndarray, num_decodes: int, chunks: Sequence[Chunk], tables: RowTables
) -> None:
    """All inputs but those that differ from step to step in any case."""
    lengths, samples = np.ones(len(rows), np.int32), np.ones(len(rows), np.bool_)
    lengths[num_decodes:] = [chunk.length for chunk in chunks]
    samples[num_decodes:] = [chunk.samples for chunk in chunks]
    ends = np.cumsum(lengths)
    arrays["token_seqs"][:] = np.repeat(np.arange(len(rows)), lengths)
    arrays["q_starts"][:] = ends - lengths
    arrays["q_lens"][:] = lengths
    arrays["rows"][:] = rows
    arrays["starts"][:num_decodes] = -1
    arrays["starts"][num_decodes:] = [-1 if chunk.on_device else chunk.start for chunk in chunks]
    # A sequence keeps its state in the slot of its row; one that begins, or begins again, reads none.
    arrays["state_read"][:num_decodes] = rows[:num_decodes]
    arrays["state_read"][num_decodes:] = [-1 if chunk.start == 0 else chunk.row for chunk in chunks]
    arrays["state_write"][:] = rows
    arrays["prompt_ends"][:] = tables.prompt_ends[rows]
    tokens = arrays["tokens"]
    tokens[:num_decodes] = -1
    for chunk, end in zip(chunks, ends[num_decodes:], strict=True):
        tokens[end - chunk.length : end] = (
            -1 if chunk.on_device else chunk.request.known_tokens(chunk.start, chunk.start + chunk.length)
        )

    sampled = rows[samples]
    arrays["sample_index"][:] = np.where(samples, np.cumsum(samples) - 1, -1)
    arrays["logit_rows"][: len(sampled)] = ends[samples] - 1
    for name, table in tables.asked.items():
        arrays[name][: len(sampled)] = table[sampled]
    if len(sampled) < len(arrays["logit_rows"]):
        _fill_scored(arrays, len(sampled), chunks, ends[num_decodes:])


def _fill_banned(banned: np.ndarray, decodes: Sequence[Request], chunks: Sequence[Chunk], tables: RowTables) -> None:
    """The tokens that sequences may not end with yet."""
    sampled = [chunk for chunk in chunks if chunk.samples]
    rows = np.array([request.row for request in decodes] + [chunk.row for chunk in sampled], np.int32)
    lens = [request.num_computed + 1 for request in decodes] + [chunk.start + chunk.length for chunk in sampled]
    banned[: len(rows)] = tables.asked["banned"][rows]
    banned[: len(rows)][np.array(lens, np.int32) >= tables.unbanned_at[rows]] = -1


def _recount(chunk: Chunk) -> Recount:
    request = chunk.request
    prompt_len = len(request.prompt_ids)
    return Recount(chunk.row, request.prompt_ids[: chunk.start], request.known_tokens(prompt_len, chunk.start))


def _fill_scored(arrays: Mapping[str, np.ndarray], first: int, chunks: Sequence[Chunk], ends: np.ndarray) -> None:
    """The rows of logits from `first` on: those that rate prompts, or the dummy."""
    for name, value in (("logit_rows", 0), *NOTHING_ASKED.items()):
        arrays[name][first:] = value
    for chunk, end in zip(chunks, ends, strict=True):
        if not chunk.scored:
            continue
        place = slice(first, first + len(chunk.scored))
        begin = end - chunk.length - chunk.start  # where position 0 would stand in T
        arrays["logit_rows"][place] = begin + np.arange(chunk.scored.start, chunk.scored.stop)
        arrays["targets"][place] = chunk.request.prompt_ids[chunk.scored.start + 1 : chunk.scored.stop + 1]
        arrays["num_logprobs"][place] = chunk.request.params.prompt_logprobs
        first = place.stop
