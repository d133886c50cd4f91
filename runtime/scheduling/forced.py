"""Forced tokens: where a grammar allows only one token, a step feeds several tokens of a sequence at once.

While step n+1 runs, the host gets token n and finds that the grammar forces the tokens f1, f2 … fk after it. Step n+1
can only sample f1. So step n+2 feeds f1 … fk, as a prompt chunk would, and samples the token after them. The tokens f2
… fk are accepted when step n+1 is complete.
"""

from collections.abc import Sequence

from ingot.runtime.pages.sequence_pages import SequencePages
from ingot.runtime.scheduling import steady_decode
from ingot.runtime.scheduling.batch import Chunk
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig

# A step that feeds several tokens of a sequence takes longer than a decode step, and all its sequences wait for it. So
# it must save this many tokens for each of them. If it has few tokens, so that it runs the code of decode steps, it
# takes 1.05 to 1.15 times as long (bundled model on two cores, 1 to 8 sequences, 7 tokens for one of them). A step
# of more tokens runs other code. 12 to 48 sequences then take 1.05 to 1.15 times as long as well, but ten times as long
# on a busy machine, where compiled regions stall; the second number keeps such steps rare.
_LEAST_SAVED_FEW = 1 / 8
_LEAST_SAVED = 1 / 2
# The host looks ahead in each grammar and builds a step of its own kind. On an H200 machine, such steps of a 1B model
# with 32 sequences took 5.2 ms and others 1.9: 0.1 ms for each sequence (benchmarks/grammar.py). A token that is saved
# for one of n sequences is worth 1.9 ms / n, so feeding pays from n * n / 19 tokens on. Those steps ran without CUDA
# graphs. With them, steps with 8 sequences take 1.9 ms and others 1.0, and all requests 0.95 of the time. Larger models
# gain with fewer tokens: 8B with 32 sequences takes 0.83 of the time if it feeds them, which this number gives away.
_WORTH = 19


def worth_looking(running: int) -> bool:
    """Return whether to look ahead in the grammars of a step of `running` sequences.

    Few sequences have forced tokens at a time. So a step must pay if it saves one token for each of its sequences.
    """
    return running <= _WORTH


def forced_run(request: Request, config: SchedulerConfig) -> Sequence[int]:
    """Return the tokens that a sequence's grammar forces and that the next step may feed at once. The first of them is
    the token that the step in flight samples. Return fewer than two if nothing is to be gained.

    They end before a token that ends the sequence, and leave one token to sample within its length limit.
    """
    if request.matcher is None or request.in_flight != 1 or not request.takes_forced:
        return ()
    most = min(config.max_forced, request.max_total - request.num_tokens)
    found = request.matcher.forced(len(request.output_ids))[:most]
    return next((found[:place] for place, token in enumerate(found) if token in request.ends), found)


def forced_chunks(
    requests: Sequence[Request],
    config: SchedulerConfig,
    pages: SequencePages,
    running: int,
    chunks: Sequence[Chunk],
    *,
    mixed: bool,
) -> list[Chunk]:
    """Return the chunks of forced tokens of a new step, and allocate pages for them. A sequence whose tokens get no
    pages or no room in the step has no chunk: it decodes one token. Return no chunks if the step would take longer than
    they save.

    requests   decoding sequences with forced tokens, by rank; each has a page for its next token
    running    the number of sequences in the new step
    chunks     the other chunks that the new step has so far
    mixed      the new step feeds several tokens of other sequences anyway
    """
    room = config.max_tokens - running - sum(chunk.length - 1 for chunk in chunks)
    few = min(room, config.few_tokens - running)
    least = max(1, running * running / _WORTH)
    found = [] if mixed else _fitting(requests, config, pages, running, few)
    if mixed or _saved(found) < max(least, _LEAST_SAVED_FEW * running):
        found = _fitting(requests, config, pages, running, room)
        if not mixed and _saved(found) < max(least, _LEAST_SAVED * running):
            found = []
    for chunk in found:
        pages.take(chunk.request, chunk.start + chunk.length)
    fed = {chunk.request for chunk in found}
    for request in requests:
        if request not in fed:
            steady_decode.enter(request, pages.steady_end(request))
    return found


def _fitting(
    requests: Sequence[Request], config: SchedulerConfig, pages: SequencePages, running: int, room: int
) -> list[Chunk]:
    """Return the chunks of forced tokens that fit into a step. The arguments are those of `forced_chunks`, and `room`
    is how many tokens fit besides one of each sequence."""
    found: list[Chunk] = []
    free = pages.num_free - running  # forced tokens preempt no sequence
    for request in requests:
        tokens = forced_run(request, config)[: max(0, room) + 1]
        start, held = request.num_computed, pages.tokens_held(request)
        if pages.slots is not None:  # the prefix cache keeps states at the ends of pages
            tokens = tokens[: pages.slots.next_end(request) - start]
        missing = max(0, -(-(start + len(tokens) - held) // pages.page_size))
        if missing > free:
            tokens, missing = tokens[: held - start], 0
        if len(tokens) > 1:
            room, free = room - len(tokens) + 1, free - missing
            found.append(Chunk(request, request.row, start, len(tokens), False, 1, forced=tuple(tokens)))
    return found


def _saved(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.length - 1 for chunk in chunks)
