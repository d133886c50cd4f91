"""The scheduler's decision for one step, and its conversion to the step's inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ingot.ir.cache.groups import FULL, CacheGroup
from ingot.ir.features import Fed, PromptLogprobRows
from ingot.ir.features.request_view import Array
from ingot.runtime.pages.shared_prefixes import sharing_of
from ingot.runtime.scheduling.edited_rows import MaskedRow, changed_rows
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.row_tables import RowTables
from ingot.runtime.steps.step import StepBuffer, StepInputs, StepSizes
from ingot.runtime.steps.token_counts import Recount


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence in a step: `length` tokens, the first at position `start`.

    request     the sequence
    row         the sequence's device row: its index in the per-sequence tensors on the device
    start       the position of the first token. With `on_device` it is the largest possible position
    length      the number of tokens
    on_device   the device row holds the first token, its position, and the drafts that follow. The host does not know
                them yet
    rows        a token is sampled from the logits of each of the last `rows` tokens; 0 in the middle of a prompt
    scored      for prompt_logprobs: the positions whose logits give the log-probability of the next prompt token
    recounts    the token counts in the device row, which penalties use, must be recomputed. They lack the tokens before
                `start`
    block       block diffusion: the number of positions in the block; 0 for other models. Positions without a known
                token are masked. With `on_device`, the device row holds the block's tokens
    forced      the tokens of the chunk, if a grammar forces them (`ingot.runtime.scheduling.forced`). The step in
                flight samples the first of them, so the host does not have them yet
    """

    request: Request
    row: int
    start: int
    length: int
    on_device: bool
    rows: int
    scored: range = range(0)
    recounts: bool = False
    block: int = 0
    forced: tuple[int, ...] = ()

    @property
    def gains(self) -> int:
        """The most tokens that the sequence gets through this chunk: sampled ones, and forced ones without a step of
        their own."""
        return self.rows + max(0, len(self.forced) - 1)

    def tokens(self) -> Sequence[int] | Array:
        """Return the chunk's token ids, as the step's inputs need them. An id below 0 stands for a token that only the
        device knows. The token is in the sequence's device row (its row in per-sequence tensors).

        -1 is the last token, and -2 - i is draft i. With block diffusion, -1 is a masked position, and -2 - i is
        position i of the block in the device row.
        """
        if self.on_device:
            return (-2 if self.block else -1) - np.arange(self.length)
        if self.forced:
            return self.forced
        end = self.start + self.length
        if not self.block:
            return self.request.known_tokens(self.start, end)
        known = self.request.known_tokens(self.start, min(end, self.request.num_known))
        return known + [-1] * (self.length - len(known))


@dataclass(frozen=True)
class StepBatch:
    """One scheduled step: its sequences and its inputs.

    step      the number of the step
    decodes   the sequences that decode one token. They come first in the step. The device knows their input tokens
    chunks    the tokens of the other sequences, such as prompt chunks; they come after `decodes`
    sampled   the requests for which the step samples tokens, in the order of their rows of logits
    inputs    the step's inputs on the host
    scored    (request, number of rows of logits) for each request that gets prompt_logprobs. These rows come after
              those of `sampled`
    rows      the number of rows of logits of each request in `sampled`; None: one row each

    If no row is sampled or scored, the step computes one dummy row of logits. Its token is ignored.
    """

    step: int
    decodes: tuple[Request, ...]
    chunks: tuple[Chunk, ...]
    sampled: tuple[Request, ...]
    inputs: StepInputs
    scored: tuple[tuple[Request, int], ...] = ()
    rows: tuple[int, ...] | None = None

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests with tokens in the step, in the order of the step's sequences: decoding ones first."""
        return (*self.decodes, *(chunk.request for chunk in self.chunks))

    @property
    def num_sampled_rows(self) -> int:
        """The number of rows of logits from which tokens are sampled."""
        return len(self.sampled) if self.rows is None else sum(self.rows)

    @property
    def returns_logprobs(self) -> bool:
        """Whether any request gets log-probabilities from this step."""
        return self.inputs.returns_logprobs


def build_step(
    step: int,
    decodes: Sequence[Request],
    chunks: Sequence[Chunk],
    tables: RowTables,
    buffer: StepBuffer,
    page_size: int,
    groups: Sequence[CacheGroup] = (FULL,),
    least_shared: int | None = None,
) -> StepBatch:
    """Write the inputs of a step into `buffer`, and return the step. It has at least one sequence.

    step           the number of the step
    decodes        requests that decode one token. The device reads that token from its per-sequence tensors
    chunks         the tokens of the other requests, such as prompt chunks
    tables         the page tables and sampling values of running requests
    buffer         the memory for the inputs
    page_size      positions in a page of the KV cache
    groups         the cache groups, in the order of `tables.pages`. A cache group is KV caches that share one page
                   table
    least_shared   use cascade attention if it saves reading at least this many cached positions; None: never. Cascade
                   attention reads a shared prefix once for all its sequences
    """
    sampling = [chunk for chunk in chunks if chunk.rows]
    sampled = (*decodes, *[chunk.request for chunk in sampling])
    counts: tuple[int, ...] | None = None
    scored: tuple[tuple[Request, int], ...] = ()
    if chunks:
        if any(chunk.rows > 1 for chunk in sampling):
            counts = (*[1] * len(decodes), *(chunk.rows for chunk in sampling))
        scored = tuple((chunk.request, len(chunk.scored)) for chunk in chunks if chunk.scored)
    rows = np.array([request.row for request in decodes] + [chunk.row for chunk in chunks], np.int32)
    num_sampled = len(sampled) if counts is None else sum(counts)
    # While the same sequences decode, consecutive steps differ only in the inputs that are declared to vary.
    stamp = None if chunks else (rows.tobytes(), tables.version)
    last = buffer.last
    repeats = last if last is not None and last.stamp is not None and last.stamp == stamp else None
    sharing = None
    if repeats is not None:
        sharing = repeats.fed.sharing
    elif least_shared is not None and not chunks:
        sharing = sharing_of(tables.pages[0], tables.num_pages, rows, page_size, least_shared)
    sizes = StepSizes(
        T=len(decodes) + sum([chunk.length for chunk in chunks]),
        B=len(rows),
        L=max(1, num_sampled + sum([count for _, count in scored])),
        P=int(tables.num_pages[rows].max()),
        G=1 if sharing is None else len(rows),
    )
    inputs = buffer.views(sizes)

    def totals() -> Array:
        """Return, for each row of logits, the length of its sequence after a token is sampled from that row. Lengths
        count prompt and output. With drafts, they are the largest possible lengths."""
        lens = [request.num_computed + 1 for request in decodes]
        for chunk in sampling:
            lens += range(chunk.start + chunk.length - chunk.rows + 1, chunk.start + chunk.length + 1)
        return np.array(lens, np.int32)

    fed = _fed(rows, len(decodes), chunks, tables, sizes, page_size, groups) if repeats is None else repeats.fed
    fed.totals, fed.sampled, fed.sharing = totals, sampled, sharing
    if inputs is repeats:
        inputs.fill_varying(fed, tables.rows_using)
    else:
        inputs.stamp = None
        inputs.fill(fed)
        inputs.stamp = stamp
    inputs.edits = changed_rows(tables.edited, sampled) if tables.edited else ()
    inputs.masked, inputs.masks = (), None
    if tables.num_masked:
        inputs.masked = tuple(MaskedRow(one, one.row) for one in sampled if one.matcher is not None)
    inputs.recounts = tuple([_recount(chunk) for chunk in chunks if chunk.recounts])
    return StepBatch(step, tuple(decodes), tuple(chunks), sampled, inputs, scored, counts)


def _fed(
    rows: Array,
    num_decodes: int,
    chunks: Sequence[Chunk],
    tables: RowTables,
    sizes: StepSizes,
    page_size: int,
    groups: Sequence[CacheGroup],
) -> Fed:
    """Return the values from which the inputs of a step are written.

    rows          each sequence's device row (its index in the per-sequence tensors on the device)
    num_decodes   how many sequences decode one token; they come first
    chunks        the tokens of the other sequences, in order
    """
    lengths, samples = np.ones(len(rows), np.int32), np.ones(len(rows), np.int32)
    lengths[num_decodes:] = [chunk.length for chunk in chunks]
    samples[num_decodes:] = [chunk.rows for chunk in chunks]
    starts = np.full(len(rows), -1, np.int32)
    starts[num_decodes:] = [-1 if chunk.on_device else chunk.start for chunk in chunks]
    ends = np.cumsum(lengths)
    tokens = np.full(sizes.T, -1, np.int32)
    for chunk, end in zip(chunks, ends[num_decodes:].tolist(), strict=True):
        tokens[end - chunk.length : end] = chunk.tokens()
    last = np.cumsum(samples)
    count = int(last[-1])
    request_rows, logit_rows = np.full(sizes.L, -1, np.int32), np.zeros(sizes.L, np.int32)
    request_rows[:count] = np.repeat(rows, samples)
    # Logit row i of n of a sequence belongs to its token n - i from the end.
    logit_rows[:count] = np.repeat(ends - last, samples) + np.arange(count)
    prompt_logprobs: list[PromptLogprobRows] = []
    for chunk, end in zip(chunks, ends[num_decodes:].tolist(), strict=True) if count < sizes.L else ():
        if chunk.scored:
            begin = end - chunk.length - chunk.start  # the index in T that position 0 would have
            request = chunk.request
            targets = request.prompt_ids[chunk.scored.start + 1 : chunk.scored.stop + 1]
            logit_rows[count : count + len(targets)] = begin + np.arange(chunk.scored.start, chunk.scored.stop)
            prompt_logprobs.append(PromptLogprobRows(count, targets, request.params.prompt_logprobs or 0))
            count += len(targets)
    return Fed(
        rows=rows,
        lengths=lengths,
        starts=starts,
        tokens=tokens,
        logit_rows=logit_rows,
        sample_index=np.where(samples > 0, last - 1, -1),
        request_rows=request_rows,
        tables=tables.values,
        pages=tables.pages[0] if groups else np.zeros((len(tables.num_pages), 0), np.int32),
        group_pages=dict(zip(groups, tables.pages, strict=True)),
        page_size=page_size,
        prompt_logprobs=prompt_logprobs,
        state_read=None if tables.state_read is None else tables.state_read[rows],
        state_write=None if tables.state_write is None else tables.state_write[rows],
    )


def _recount(chunk: Chunk) -> Recount:
    request = chunk.request
    prompt_len = len(request.prompt_ids)
    return Recount(chunk.row, request.prompt_ids[: chunk.start], request.known_tokens(prompt_len, chunk.start))
