"""One step's inputs on the host: views of one flat buffer, so that a device needs one copy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ingot.runtime.request import Request


@dataclass(frozen=True)
class StepSizes:
    """T tokens fed, B sequences, L logit rows, P page-table entries per sequence; each at least 1."""

    T: int
    B: int
    L: int
    P: int


# name, dtype, shape: what the program takes. The 8-byte field stands first, so that it is aligned wherever the buffer
# is.
STEP_FIELDS: tuple[tuple[str, torch.dtype, str], ...] = (
    ("seeds", torch.int64, "L"),  # random numbers are keyed by (seed, position)
    ("tokens", torch.int32, "T"),  # -1: the row's last sampled token, which the host does not know yet
    ("token_seqs", torch.int32, "T"),  # which sequence, 0..B-1
    ("q_starts", torch.int32, "B"),  # where in T the sequence begins
    ("q_lens", torch.int32, "B"),  # tokens fed of it
    ("rows", torch.int32, "B"),  # its device row, 0..max_batch-1
    ("starts", torch.int32, "B"),  # position of its first token fed; -1: the device's position[row]
    ("state_read", torch.int32, "B"),  # the slot that its per-sequence state is read from; -1: it has none yet
    ("state_write", torch.int32, "B"),  # the slot that the state after the step is written to
    ("sample_index", torch.int32, "B"),  # its logit row, 0..L-1; -1: no token sampled
    ("page_table", torch.int32, "BP"),  # unused entries 0
    ("logit_rows", torch.int32, "L"),  # which of T
    ("temperature", torch.float32, "L"),  # 0: greedy
    ("top_k", torch.int32, "L"),  # 0: off
    ("top_p", torch.float32, "L"),
    ("min_p", torch.float32, "L"),
)


def step_views(flat: torch.Tensor, sizes: StepSizes) -> dict[str, torch.Tensor]:
    """The fields as views of `flat` (i32, one-dimensional, 8-byte aligned, `step_words(sizes)` long or longer).

    The same on the host and on a device that got a copy of `flat`.
    """
    views: dict[str, torch.Tensor] = {}
    offset = 0
    for name, dtype, dims in STEP_FIELDS:
        shape = [getattr(sizes, dim) for dim in dims]
        words = math.prod(shape) * dtype.itemsize // 4
        views[name] = flat[offset : offset + words].view(dtype).view(shape)
        offset += words
    return views


def step_words(sizes: StepSizes) -> int:
    """4-byte words that `step_views` needs."""
    return sum(math.prod(getattr(sizes, dim) for dim in dims) * dtype.itemsize // 4 for _, dtype, dims in STEP_FIELDS)


class StepInputs(dict[str, torch.Tensor]):
    """The program's inputs by name, on the host: `STEP_FIELDS`, all views of `flat` (i32), which one copy moves.

    Valid until the step has retired; then the buffer serves another step.
    """

    def __init__(self, flat: torch.Tensor, sizes: StepSizes) -> None:
        super().__init__(step_views(flat, sizes))
        self.flat = flat
        self.sizes = sizes


class StepBuffer:
    """A flat i32 buffer for steps of up to `largest`, allocated once."""

    def __init__(self, largest: StepSizes, pin_memory: bool = False) -> None:
        self._flat = torch.zeros(step_words(largest), dtype=torch.int32, pin_memory=pin_memory)
        self._last: tuple[StepInputs, dict[str, np.ndarray]] | None = None

    def views(self, sizes: StepSizes) -> tuple[StepInputs, dict[str, np.ndarray]]:
        """Inputs of these sizes and the same memory as numpy arrays, to be filled. Contents are those of an older
        step."""
        if self._last is None or self._last[0].sizes != sizes:  # decode steps mostly repeat their sizes
            inputs = StepInputs(self._flat[: step_words(sizes)], sizes)
            self._last = inputs, {name: view.numpy() for name, view in inputs.items()}
        return self._last


@dataclass(frozen=True)
class Chunk:
    """What one sequence does in a step: feed `length` tokens, the first at position `start`.

    on_device   its one token is not known on the host yet: the device takes it, and its position, from its row
    samples     the last token fed is the last one there is, so the step gives the next one
    """

    request: Request
    row: int
    start: int
    length: int
    on_device: bool
    samples: bool


@dataclass(frozen=True)
class StepBatch:
    """One scheduled step. `sampled` are the requests that get a token, in the order of the logit rows.

    Without any, one dummy logit row is computed, and its token is to be ignored.
    """

    step: int
    chunks: tuple[Chunk, ...]
    sampled: tuple[Request, ...]
    inputs: StepInputs


class RowTables:
    """What the steps need per device row, kept as arrays so that a step gathers it instead of rebuilding it."""

    def __init__(self, max_batch: int, max_pages: int) -> None:
        self.pages = np.zeros((max_batch, max_pages), np.int32)
        self.num_pages = np.zeros(max_batch, np.int32)
        self.seeds = np.zeros(max_batch, np.int64)
        self.temperature = np.zeros(max_batch, np.float32)
        self.top_k = np.zeros(max_batch, np.int32)
        self.top_p = np.ones(max_batch, np.float32)
        self.min_p = np.zeros(max_batch, np.float32)

    def set_request(self, row: int, request: Request) -> None:
        params = request.params
        self.seeds[row] = request.seed
        self.temperature[row] = 0.0 if params.greedy else params.temperature
        self.top_k[row] = 0 if params.greedy else params.top_k
        self.top_p[row] = 1.0 if params.greedy else params.top_p
        self.min_p[row] = 0.0 if params.greedy else params.min_p

    def add_pages(self, row: int, pages: Sequence[int]) -> None:
        held = self.num_pages[row]
        self.pages[row, held : held + len(pages)] = pages
        self.num_pages[row] = held + len(pages)

    def clear(self, row: int) -> None:
        self.pages[row, : self.num_pages[row]] = 0
        self.num_pages[row] = 0


def build_step(step: int, chunks: Sequence[Chunk], tables: RowTables, buffer: StepBuffer) -> StepBatch:
    """Fill `buffer` with the inputs of these chunks (at least one)."""
    sampled = tuple(chunk.request for chunk in chunks if chunk.samples)
    rows = np.array([chunk.row for chunk in chunks], np.int32)
    lengths = np.array([chunk.length for chunk in chunks], np.int32)
    samples = np.array([chunk.samples for chunk in chunks])
    max_pages = int(tables.num_pages[rows].max())
    inputs, arrays = buffer.views(StepSizes(int(lengths.sum()), len(chunks), max(1, len(sampled)), max_pages))

    ends = np.cumsum(lengths)
    arrays["token_seqs"][:] = np.repeat(np.arange(len(chunks)), lengths)
    arrays["q_starts"][:] = ends - lengths
    arrays["q_lens"][:] = lengths
    arrays["rows"][:] = rows
    arrays["starts"][:] = [-1 if chunk.on_device else chunk.start for chunk in chunks]
    # A sequence keeps its state in the slot of its row; one that begins, or begins again, reads none.
    arrays["state_read"][:] = [-1 if chunk.start == 0 else chunk.row for chunk in chunks]
    arrays["state_write"][:] = rows
    arrays["page_table"][:] = tables.pages[rows, :max_pages]
    tokens = arrays["tokens"]
    for chunk, end in zip(chunks, ends, strict=True):
        tokens[end - chunk.length : end] = (
            -1 if chunk.on_device else chunk.request.known_tokens(chunk.start, chunk.start + chunk.length)
        )

    arrays["sample_index"][:] = np.where(samples, np.cumsum(samples) - 1, -1)
    if sampled:
        arrays["logit_rows"][:] = ends[samples] - 1
        sampled_rows = rows[samples]
        for name in ("seeds", "temperature", "top_k", "top_p", "min_p"):
            arrays[name][:] = getattr(tables, name)[sampled_rows]
    else:
        for name, value in (
            ("logit_rows", 0),
            ("seeds", 0),
            ("temperature", 0.0),
            ("top_k", 0),
            ("top_p", 1.0),
            ("min_p", 0.0),
        ):
            arrays[name][:] = value
    return StepBatch(step, tuple(chunks), sampled, inputs)
