"""The progress that a step counts for its sequences while it is in flight, and takes back if it is withdrawn."""

from ingot.runtime.scheduling import steady_decode
from ingot.runtime.scheduling.batch import StepBatch


def count(batch: StepBatch) -> None:
    """Count the tokens of a new step as computed, and those that it samples as in flight."""
    for request in batch.decodes:
        request.num_computed += 1
        request.in_flight += 1
        request.sampled_by = batch.step
    for chunk in batch.chunks:
        chunk.request.num_computed += chunk.length
        if chunk.gains:
            chunk.request.in_flight += chunk.gains
            chunk.request.sampled_by = batch.step
        chunk.request.num_scored += len(chunk.scored)
        chunk.request.miscounted = False


def take_back(batch: StepBatch) -> None:
    """Undo `count` for the newest step in flight, which did not run, or ran only in part."""
    for request in batch.decodes:
        request.num_computed -= 1
        request.in_flight -= 1
    for chunk in batch.chunks:
        chunk.request.num_computed = chunk.start
        chunk.request.in_flight -= chunk.gains
        chunk.request.num_scored -= len(chunk.scored)
    for request in batch.requests:
        # Part of the step may have run. Caches are written again, but token counts would count tokens twice.
        request.miscounted = request.params.penalizes
        request.denoises = False
        steady_decode.leave(request)
