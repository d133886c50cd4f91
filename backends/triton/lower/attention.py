"""Lowerings of attention over the paged cache: one kernel for steps of few tokens, another one for prefill, both for
steps that feed prompts beside sequences that decode, and one for all steps where a row's bits may not depend on its
step."""

from collections.abc import Mapping

from ingot.backends.triton.lower.attention_decode import schedule_decode, schedule_single
from ingot.backends.triton.lower.attention_invariant import schedule_invariant
from ingot.backends.triton.lower.attention_prefill import schedule_prefill
from ingot.backends.triton.lower.attention_problem import MOST_DECODED
from ingot.backends.triton.lower.attention_shapes import attention_of, mask_of, results_of
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.artifact.plan import GPU_FEW_TOKENS, BucketClass


def _decodes(bucket: BucketClass) -> bool:
    """Whether the steps of a bucket class are for the kernel of few tokens. Where each sequence feeds one, it is for
    more of them, which all the same read as many contexts."""
    return bucket.tokens[1] <= (MOST_DECODED if bucket.q_max == 1 else GPU_FEW_TOKENS)


def _paged_attention(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    if (ancestors := call.optional("ancestors")) is not None:
        call.want(
            not schedule.bucket.batch_invariant, "no kernel adds up a tree in an order that does not depend on it"
        )
        out, _ = results_of(call, schedule)
        # Of few tokens too: the kernel for these takes what a token sees as one range, and a tree has gaps.
        schedule_prefill(call, attention_of(call, schedule.sm), schedule, out, None, least=1, ancestors=ancestors)
        return (out,)
    if schedule.bucket.batch_invariant:
        return schedule_invariant(call, schedule)
    if _decodes(schedule.bucket):
        return schedule_decode(call, schedule, append=False)
    attention = attention_of(call, schedule.sm)
    out, lse = results_of(call, schedule)
    # A sequence that feeds one token would fill a row of a tile of prompts. One of few tokens does not come often
    # enough for a tile of its own size. Alone in a step of many tokens, a sequence feeds more than one.
    beside = schedule.most_sequences > 1
    schedule_prefill(call, attention, schedule, out, lse, least=2 if beside else 1)
    if beside:
        schedule_single(call, attention, schedule, out, lse)
    return (out,) if lse is None else (out, lse)


def _append_attention(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    most = schedule.bucket.tokens[1]
    call.want(
        not schedule.bucket.batch_invariant,
        "the kernel adds up what a step feeds apart from what is cached, so that its bits depend on the step",
    )
    call.want(
        _decodes(schedule.bucket), f"the kernel is for steps of up to {GPU_FEW_TOKENS} tokens, and these have {most}"
    )
    call.want(
        not mask_of(call).looks_ahead,
        f"by the mask {mask_of(call).name} a token sees what is fed after it, and the kernel what is fed before it",
    )
    return schedule_decode(call, schedule, append=True)


LOWERINGS: Mapping[str, Lowering] = {
    "append_attention": _append_attention,
    "paged_attention": _paged_attention,
    "partial_attention": _paged_attention,
}
