"""The chunk of a sequence with drafts: its last token, and as many drafts as can be accepted."""

from collections.abc import Sequence

from ingot.runtime.batch import Chunk
from ingot.runtime.request import Request
from ingot.runtime.scheduler_config import SchedulerConfig
from ingot.runtime.sequence_pages import SequencePages


def drafted_chunk(
    request: Request, config: SchedulerConfig, pages: SequencePages, running: int, chunks: Sequence[Chunk]
) -> Chunk:
    """Return a sequence's chunk, and allocate pages for its drafts. The step in flight samples the sequence's last
    token. `running` sequences share the new step; `chunks` are its chunks so far."""
    count = 1 + _drafts(request, config, pages, running, chunks)
    return Chunk(request, request.row, request.num_computed, count, on_device=True, rows=count)


def _drafts(
    request: Request, config: SchedulerConfig, pages: SequencePages, running: int, chunks: Sequence[Chunk]
) -> int:
    """Return the number of drafts: as many as the length limit, free pages and the step's tokens allow. Return 0 with
    penalties, and before min_tokens: sampling would then depend on the number of drafts."""
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
