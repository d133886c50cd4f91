"""The inputs of a step that is asked about: sequences of one length, each with pages of its own."""

import numpy as np

from ingot.debug.explained import Step
from ingot.runtime.batch import NOTHING_ASKED
from ingot.runtime.step import StepBuffer, StepInputs, StepSizes


def step_inputs(step: Step, page_size: int, vocab_size: int) -> StepInputs:
    """A step that feeds the last tokens of each sequence and samples one more of each, greedily.

    Positions are given, so the same inputs may be launched again and again. The pages are the first
    `step.pages(page_size)` of a pool. Token ids are any.
    """
    lengths = np.full(step.sequences, step.tokens // step.sequences, np.int32)
    lengths[: step.tokens % step.sequences] += 1
    pages = step.pages(page_size) // step.sequences
    sizes = StepSizes(T=step.tokens, B=step.sequences, L=step.sequences, P=pages)
    inputs = StepBuffer(sizes).views(sizes)
    arrays = inputs.arrays
    order, ends = np.arange(step.sequences, dtype=np.int32), np.cumsum(lengths)
    arrays["tokens"][:] = np.random.default_rng(1).integers(0, vocab_size, step.tokens)
    arrays["token_seqs"][:] = np.repeat(order, lengths)
    arrays["q_starts"][:] = ends - lengths
    arrays["q_lens"][:] = lengths
    arrays["starts"][:] = step.context - lengths
    for name in ("rows", "state_read", "state_write", "sample_index"):
        arrays[name][:] = order
    arrays["prompt_ends"][:] = -1
    arrays["page_table"][:] = np.arange(step.sequences * pages, dtype=np.int32).reshape(step.sequences, pages)
    arrays["logit_rows"][:] = ends - 1
    for name, value in NOTHING_ASKED.items():
        arrays[name][:] = value
    return inputs
