"""Make the chunks of a step: the next tokens of one sequence, known ones or drafts."""

from collections.abc import Sequence

from ingot.runtime.batch import Chunk
from ingot.runtime.request import Request
from ingot.runtime.scheduler_config import SchedulerConfig
from ingot.runtime.sequence_pages import SequencePages


def next_chunk(request: Request, length: int, goal: int, block: int) -> Chunk:
    """Return the chunk of a sequence's next `length` tokens, and set `request.denoises`.

    goal    the position at which the sequence gets new tokens: only a chunk that ends there has rows of logits to
            sample
    block   the positions of a block, with an ending that denoises blocks; else 0
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
    """Return the chunk of a sequence's last token and its drafts, and allocate pages for the drafts. The step in
    flight samples that last token.

    running   the number of sequences that share the new step
    chunks    the chunks that the new step has so far
    """
    count = 1 + _drafts(request, config, pages, running, chunks)
    return Chunk(request, request.row, request.num_computed, count, on_device=True, rows=count)


def _drafts(
    request: Request, config: SchedulerConfig, pages: SequencePages, running: int, chunks: Sequence[Chunk]
) -> int:
    """Return how many drafts the sequence feeds: as many as its length limit, free pages and the step's tokens allow.
    Return 0 with penalties, and before min_tokens: sampling would then depend on the number of drafts.

    running   the number of sequences that share the new step
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
