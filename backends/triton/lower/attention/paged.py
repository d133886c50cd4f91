"""Lowerings of attention over the paged KV cache: they choose the kernels for a step.

Steps of few tokens get the decode kernel, steps of prompts the prefill kernel, and mixed steps both. In batch-invariant
bucket classes, one kernel serves all steps.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ingot.backends.triton.kernels.attention.cached_lens import cached_lens
from ingot.backends.triton.launches import cdiv
from ingot.backends.triton.lower.attention.decode import schedule_decode, schedule_single
from ingot.backends.triton.lower.attention.invariant import schedule_invariant
from ingot.backends.triton.lower.attention.prefill import schedule_prefill
from ingot.backends.triton.lower.attention.problem import MOST_DECODED
from ingot.backends.triton.lower.attention.shapes import attention_of, mask_of, results_of
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.artifact.plan import GPU_FEW_TOKENS, BucketClass

_LENS = 128  # sequences of a program that counts cached positions


def decodes(bucket: BucketClass) -> bool:
    """Return whether the decode kernel alone computes attention in the steps of a bucket class (a range of step sizes).

    It does in steps of up to GPU_FEW_TOKENS tokens. If every sequence has one token, it does up to MOST_DECODED tokens.
    No two tokens then share a context, so a larger tile of queries would save no reads.
    """
    return bucket.tokens[1] <= (MOST_DECODED if bucket.q_max == 1 else GPU_FEW_TOKENS)


def _paged_attention(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    if (ancestors := call.optional("ancestors")) is not None:
        call.want(
            not schedule.bucket.batch_invariant, "no kernel sums a tree in an order that is independent of the tree"
        )
        out, _ = results_of(call, schedule)
        # Use the prefill kernel even for few tokens: the decode kernel reads one range per token, and a tree has gaps.
        schedule_prefill(call, attention_of(call, schedule.sm), schedule, out, None, least=1, ancestors=ancestors)
        return (out,)
    if schedule.bucket.batch_invariant:
        return schedule_invariant(call, schedule)
    if decodes(schedule.bucket):
        return schedule_decode(call, schedule, append=False)
    attention = attention_of(call, schedule.sm)
    out, lse = results_of(call, schedule)
    # A sequence of one token would fill only one row of a prefill tile, so the decode kernel computes it. Sequences of
    # a few tokens are too rare for another tile size. A step with only one sequence has more than one token of it.
    mixed = schedule.most_sequences > 1
    schedule_prefill(call, attention, schedule, out, lse, least=2 if mixed else 1)
    if mixed:
        schedule_single(call, attention, schedule, out, lse)
    return (out,) if lse is None else (out, lse)


def _partial_attention(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    """Lower attention over a part of the positions. `cached` are those before the step's own tokens."""
    if not call.attributes.get("cached", False):
        return _paged_attention(call, schedule)
    sequences = call.value("kv_lens").type.shape[0]
    lens = schedule.scratch(torch.int32, (sequences,))
    schedule.launch(
        cached_lens,
        (cdiv(sequences, _LENS),),
        {"kv_lens": call.value("kv_lens"), "q_lens": call.value("q_lens"), "out": lens, "sequences": sequences},
        {"BLOCK": _LENS, "DEPENDENT": schedule.dependent},
        dependent=schedule.dependent,
    )
    return _paged_attention(replace(call, values={**call.values, "kv_lens": lens}), schedule)


def _append_attention(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    most = schedule.bucket.tokens[1]
    call.want(
        not schedule.bucket.batch_invariant,
        "the kernel sums the step's tokens apart from the cached ones, so its bits depend on the step",
    )
    call.want(
        decodes(schedule.bucket), f"the kernel is for steps of up to {GPU_FEW_TOKENS} tokens, and these have {most}"
    )
    call.want(
        not mask_of(call).looks_ahead,
        f"with the mask {mask_of(call).name} a token sees later tokens of the step; the kernel reads only earlier ones",
    )
    return schedule_decode(call, schedule, append=True)


LOWERINGS: Mapping[str, Lowering] = {
    "append_attention": _append_attention,
    "paged_attention": _paged_attention,
    "partial_attention": _partial_attention,
}
