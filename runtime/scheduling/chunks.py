"""Make the chunks of a step: the next tokens of one sequence, known ones or drafts."""

from collections.abc import Sequence

from ingot.runtime.pages.sequence_pages import SequencePages
from ingot.runtime.scheduling.batch import Chunk
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig


def next_chunk(request: Request, length: int, goal: int, block: int) -> Chunk:
    """Return a chunk of the next `length` tokens of a sequence, and set `request.denoises`.

    goal    the position at which the sequence's next token is sampled. A token is sampled only from a chunk that ends
            there
    block   block diffusion: the number of positions in a block; 0 for other models

    `request.denoises` becomes True if the chunk contains a block of block diffusion that is being generated.
    """
    start = request.num_computed
    last = start + length == goal
    request.denoises = last and block > 0
    return Chunk(
        request,
        request.row,
        start,
        length,
        on_device=start >= request.num_known and not block,
        rows=(block or 1) if last else 0,
        scored=request.scored_in(start, start + length) if request.given.scores_prompt else range(0),
        recounts=request.miscounted and start > 0,
        block=block,
    )


def drafted_chunk(
    request: Request, config: SchedulerConfig, pages: SequencePages, running: int, chunks: Sequence[Chunk]
) -> Chunk:
    """Return the chunk of a sequence that decodes with draft tokens: its last token and the drafts after it. Allocate
    pages for the drafts. The device knows these tokens from the step in flight.

    running   the number of sequences in the new step
    chunks    the chunks that the new step has so far
    """
    count = 1 + _drafts(request, config, pages, running, chunks)
    return Chunk(request, request.row, request.num_computed, count, on_device=True, rows=count)


def _drafts(
    request: Request, config: SchedulerConfig, pages: SequencePages, running: int, chunks: Sequence[Chunk]
) -> int:
    """Return how many draft tokens of the sequence to verify in the new step, and allocate pages for them. The length
    limit, free pages and the step's token limit bound this number.

    running   the number of sequences in the new step
    chunks    the chunks that the new step has so far

    The number is 0 for a request with penalties or bad words of several tokens, and before min_tokens. Otherwise
    sampled tokens would depend on the number of drafts.
    """
    if not request.takes_drafts or request.num_known < len(request.prompt_ids) + request.params.min_tokens:
        return 0
    step = config.max_tokens - running - sum(chunk.length - 1 for chunk in chunks)
    wanted = min(config.max_drafts, request.max_total - request.num_tokens - 1, step)
    tokens = request.num_computed + 1 + max(0, wanted)
    count = -(-(tokens - pages.tokens_held(request)) // pages.page_size)
    if 0 < count <= pages.num_free - running:  # drafts preempt no sequence
        pages.take(request, tokens)
    return max(0, min(wanted, pages.tokens_held(request) - request.num_computed - 1))
