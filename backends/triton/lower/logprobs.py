"""top_logprobs."""

import torch
import triton

from ingot.backends.triton.kernels import logprobs
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.schedule import Schedule, Value

# Logits that a program takes at a time, with a thread for each 8.
_BLOCK, _WARPS = 8192, 32


def _top_logprobs(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    logits = call.value("logits")
    call.want(logits.type.dtype == torch.float32, f"logits are not f32: {logits.type}")
    call.want_dense_rows(*call.values)
    rows, vocab = logits.type.shape
    width = call.results[0].shape[1]
    assert isinstance(vocab, int) and isinstance(width, int)
    results = tuple(schedule.output(result) for result in call.results)
    schedule.launch(
        logprobs.top_logprobs,
        (rows,),
        {**call.values, **dict(zip(("ids", "logprobs", "ranks"), results, strict=True))},
        {
            "VOCAB": vocab,
            "LOGITS_ROW": logits.strides[0],
            "WIDTH": width,
            "BLOCK_WIDTH": triton.next_power_of_2(width),
            "BLOCK": min(_BLOCK, triton.next_power_of_2(vocab)),
            "DEPENDENT": schedule.dependent,
        },
        warps=_WARPS,
        dependent=schedule.dependent,
    )
    return results


LOWERINGS: dict[str, Lowering] = {"top_logprobs": _top_logprobs}
