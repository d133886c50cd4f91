"""count_tokens and penalize."""

import torch
import triton

from ingot.backends.triton.kernels import penalties
from ingot.backends.triton.launches import cdiv
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.ops.penalties import GENERATED, IN_PROMPT

# Programs that a sequence's counts are shared among: 0.5 MB to clear for a vocabulary of 128 k.
_SHARES = 16
_BLOCK = 1024


def _count_tokens(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    counts = call.value("token_counts")
    call.want_dense_rows(*call.values)
    vocab = counts.type.shape[1]
    assert isinstance(vocab, int)
    tokens = call.value("ids").type.shape[0]
    most = schedule.bucket.tokens[1]
    schedule.launch(
        penalties.count_tokens,
        (call.value("rows").type.shape[0], _SHARES),
        {**call.values, "num_tokens": tokens},
        {
            "VOCAB": vocab,
            "COUNTS_ROW": counts.strides[0],
            "SHARE": triton.cdiv(vocab, _SHARES * _BLOCK) * _BLOCK,
            "IN_PROMPT": IN_PROMPT,
            "GENERATED": GENERATED,
            "BLOCK_TOKENS": min(_BLOCK, max(32, triton.next_power_of_2(most))),
            "BLOCK": _BLOCK,
            "DEPENDENT": schedule.dependent,
        },
        dependent=schedule.dependent,
    )
    return ()


def _penalize(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    logits, counts, banned = call.value("logits"), call.value("token_counts"), call.value("banned")
    call.want(logits.type.dtype == torch.float32, f"logits are not f32: {logits.type}")
    call.want_dense_rows(*call.values)
    vocab, most_banned = logits.type.shape[1], banned.type.shape[1]
    assert isinstance(vocab, int) and isinstance(most_banned, int)
    call.want(banned.type.strides is None, f"banned is strided: {banned.type}")
    result = schedule.output(call.results[0])
    schedule.launch(
        penalties.penalize,
        (logits.type.shape[0], cdiv(vocab, _BLOCK)),
        {**call.values, "result": result},
        {
            "VOCAB": vocab,
            "LOGITS_ROW": logits.strides[0],
            "COUNTS_ROW": counts.strides[0],
            "MOST_BANNED": most_banned,
            "GENERATED": GENERATED,
            "BLOCK_BANNED": triton.next_power_of_2(most_banned),
            "BLOCK": _BLOCK,
            "DEPENDENT": schedule.dependent,
        },
        dependent=schedule.dependent,
    )
    return (result,)


LOWERINGS: dict[str, Lowering] = {"count_tokens": _count_tokens, "penalize": _penalize}
