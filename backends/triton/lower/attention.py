"""Lowerings of attention over the paged cache: one kernel for steps of few tokens, another one for prefill, and both
for steps that feed prompts beside sequences that decode."""

from collections.abc import Mapping

from ingot.backends.triton.lower.attention_decode import schedule_decode, schedule_single
from ingot.backends.triton.lower.attention_prefill import schedule_prefill
from ingot.backends.triton.lower.attention_problem import DECODE_TOKENS, MOST_DECODED
from ingot.backends.triton.lower.attention_shapes import attention_of
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.plan import BucketClass


def _decodes(bucket: BucketClass) -> bool:
    """Whether the steps of a bucket class are for the kernel of few tokens. Where each sequence feeds one, it is for
    more of them, which all the same read as many contexts."""
    return bucket.tokens[1] <= (MOST_DECODED if bucket.q_max == 1 else DECODE_TOKENS)


def _paged_attention(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    if _decodes(schedule.bucket):
        return schedule_decode(call, schedule, append=False)
    attention, out = attention_of(call), schedule.output(call.results[0])
    # A sequence that feeds one token would fill a row of a tile of prompts. One of few tokens does not come often
    # enough for a tile of its own size. Alone in a step of many tokens, a sequence feeds more than one.
    beside = schedule.most_sequences > 1
    schedule_prefill(attention, schedule, out, least=2 if beside else 1)
    if beside:
        schedule_single(call, attention, schedule, out)
    return (out,)


def _append_attention(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    most = schedule.bucket.tokens[1]
    call.want(
        _decodes(schedule.bucket), f"the kernel is for steps of up to {DECODE_TOKENS} tokens, and these have {most}"
    )
    return schedule_decode(call, schedule, append=True)


LOWERINGS: Mapping[str, Lowering] = {
    "append_attention": _append_attention,
    "paged_attention": _paged_attention,
}
