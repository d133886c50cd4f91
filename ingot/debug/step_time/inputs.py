"""Make the inputs of the step that is timed: sequences of one context length, each with its own pages."""

import numpy as np

from ingot.debug.explained import StepShape
from ingot.ir.features import FedSequence, fed_of
from ingot.runtime.steps.step import StepInputs, StepLayout, StepSizes, filled


def step_inputs(step: StepShape, page_size: int, vocab_size: int, layout: StepLayout) -> StepInputs:
    """Return the inputs of a step to be timed, in the given `layout`.

    The step processes the last tokens of each sequence, and samples one token per sequence greedily. Token ids are
    random. The sequences use the first `step.pages(page_size)` pages of the pool. Positions are inputs, so that the
    step can be launched repeatedly.
    """
    lengths = [step.tokens // step.sequences] * step.sequences
    for index in range(step.tokens % step.sequences):
        lengths[index] += 1
    width = step.pages(page_size) // step.sequences
    draw = np.random.default_rng(1)
    sequences = [
        FedSequence(
            row=row,
            tokens=draw.integers(0, vocab_size, length).tolist(),
            place=step.context - length,
            start=step.context - length,
            pages=range(row * width, (row + 1) * width),
        )
        for row, length in enumerate(lengths)
    ]
    return filled(layout, fed_of(sequences, page_size), StepSizes(step.tokens, step.sequences, step.sequences, width))
