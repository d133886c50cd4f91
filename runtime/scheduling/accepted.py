"""The tokens that a complete step adds to its sequences: drafts that it keeps, tokens of a denoised block, and forced
tokens."""

from collections.abc import Iterator, Sequence

from ingot.ir.errors import InternalError
from ingot.runtime.scheduling.batch import StepBatch
from ingot.runtime.scheduling.request import Request, Status

# An accepted token: its request, its id, and the row of logits that it was sampled from, or NO_ROW for a forced token.
# A plain tuple, because a step makes one for each sequence.
Accepted = tuple[Request, int, int]
NO_ROW = -1


def drafted_tokens(
    batch: StepBatch, tokens: Sequence[int], rejected: Sequence[int] | None, denoised: int
) -> Iterator[Accepted]:
    """Yield the accepted tokens of a step with drafts or with block diffusion, until each sequence ends. The caller
    appends each to the outputs before it takes the next. Corrects `in_flight` and `num_computed` of the sequences.

    With drafts, a sequence gets one token for each of its tokens in the step that was not rejected. With block
    diffusion, it gets the tokens of an accepted block that the host did not know.

    tokens     one for each row of logits
    rejected   for each sequence of the step, how many of its last tokens were rejected; None: no tokens
    denoised   block diffusion: the number of positions in a block; 0 for other models
    """
    assert batch.rows is not None
    places = [*range(len(batch.decodes)), *(len(batch.decodes) + i for i, one in enumerate(batch.chunks) if one.rows)]
    first = 0
    for request, rows, place in zip(batch.sampled, batch.rows, places, strict=True):
        dropped = rejected[place] if rejected else 0
        request.in_flight -= rows
        if request.status is Status.RUNNING:
            request.num_computed -= dropped
        known = request.num_known % denoised if denoised else 0
        for row in range(first + known, first + rows - dropped):
            if request.end is not None:
                break
            yield request, tokens[row], row
        first += rows


def forced_tokens(following: StepBatch) -> Iterator[tuple[Request, int]]:
    """Yield the forced tokens of sequences whose first forced token was just accepted, until each sequence ends
    (`ingot.runtime.scheduling.forced`). The caller appends each to the outputs before it takes the next. Corrects
    `in_flight`.

    `following` is the step in flight, which feeds these tokens. Raises InternalError if the token of a sequence is not
    its first forced one.
    """
    for chunk in following.chunks:
        if not chunk.forced:
            continue
        request = chunk.request
        request.in_flight -= len(chunk.forced) - 1
        if request.end is None and (sampled := request.output_ids[-1]) != chunk.forced[0]:
            raise InternalError(
                f"token {sampled} was sampled where the grammar forces {chunk.forced[0]}",
                where=f"request {request.request_id}",
            )
        for token in chunk.forced[1:]:
            if request.end is not None:
                break
            yield request, token
