"""Lowering of the op count_tokens, which counts the tokens of sequences for penalties."""

import triton

from ingot.backends.triton.kernels.sampling import penalties
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.ops.penalties import GENERATED, IN_PROMPT

# Programs per sequence. Each counts a part of the vocabulary: the counts of 128 k ids are 0.5 MB to clear.
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


LOWERINGS: dict[str, Lowering] = {"count_tokens": _count_tokens}
