"""Make the chunks of a step: the next tokens of one sequence, known ones or drafts."""

from collections.abc import Sequence

from ingot.runtime.batch import Chunk
from ingot.runtime.request import Request
from ingot.runtime.scheduler_config import SchedulerConfig
from ingot.runtime.sequence_pages import SequencePages


def next_chunk(request: Request, length: int, goal: int, block: int) -> Chunk:
    """Return a chunk of the next `length` tokens of a sequence. Also set `request.denoises`: whether the chunk includes
    a block of block diffusion.

    goal    the position at which the sequence's next token is sampled; only a chunk that ends there has logits to
            sample from
    block   block diffusion: the number of positions in a block; 0 for other models
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
    """Return the chunk of a speculative step: the last token of a sequence, which the step in flight samples, and its
    drafts after it. Allocate pages for the drafts.

    running   the number of sequences in the new step
    chunks    the chunks that the new step has so far
    """
    count = 1 + _drafts(request, config, pages, running, chunks)
    return Chunk(request, request.row, request.num_computed, count, on_device=True, rows=count)


def _drafts(
    request: Request, config: SchedulerConfig, pages: SequencePages, running: int, chunks: Sequence[Chunk]
) -> int:
    """Return how many draft tokens of the sequence to verify in the new step: as many as its length limit, free pages
    and the step's token limit allow.

    Return 0 for a request with penalties, and before min_tokens: there the sampled tokens would depend on the number of
    drafts.

    running   the number of sequences in the new step
    chunks    the chunks that the new step has so far
    """
    params = request.params
    if params.penalizes or request.num_known < len(request.prompt_ids) + params.min_tokens:
        return 0
    step = config.max_tokens - running - sum(chunk.length - 1 for chunk in chunks)
    wanted = min(config.max_drafts, request.max_total - request.num_tokens - 1, step)
    tokens = request.num_computed + 1 + max(0, wanted)
    count = -(-(tokens - pages.tokens_held(request)) // pages.page_size)
    if 0 < count <= pages.num_free - running:  # drafts preempt no sequence
        pages.take(request, tokens)
    return max(0, min(wanted, pages.tokens_held(request) - request.num_computed - 1))
