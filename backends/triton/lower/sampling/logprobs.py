"""Lowering of the op top_logprobs: log-probabilities of the sampled and of the most likely tokens."""

import torch
import triton

from ingot.backends.triton.kernels.sampling import logprobs
from ingot.backends.triton.kernels.sampling.groups import GROUP
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.rows import FLOATS
from ingot.backends.triton.schedule import Schedule, Value

# Groups of 32 tokens per iteration of a program, with a thread per 8 tokens.
_BLOCK_GROUPS, _WARPS = 256, 32


def _top_logprobs(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    logits = call.value("logits")
    call.want(logits.type.dtype in FLOATS, f"logits are not f32, bf16 or f16: {logits.type}")
    call.want_dense_rows(*call.values)
    rows, vocab = logits.type.shape
    width = call.results[0].shape[1]
    assert isinstance(vocab, int) and isinstance(width, int)
    groups = triton.cdiv(vocab, GROUP.value)
    results = tuple(schedule.output(result) for result in call.results)
    schedule.launch(
        logprobs.top_logprobs,
        (rows,),
        {
            **call.values,
            **dict(zip(("ids", "logprobs", "ranks"), results, strict=True)),
            "group_tops": schedule.scratch(torch.float32, (rows, groups)),
            "listed_groups": schedule.scratch(torch.int32, (rows, groups)),
        },
        {
            "VOCAB": vocab,
            "LOGITS_ROW": logits.strides[0],
            "WIDTH": width,
            "BLOCK_WIDTH": triton.next_power_of_2(width),
            "GROUPS": groups,
            "BLOCK_ALL": triton.next_power_of_2(groups),
            "BLOCK_GROUPS": min(_BLOCK_GROUPS, triton.next_power_of_2(groups)),
            "DEPENDENT": schedule.dependent,
        },
        warps=_WARPS,
        dependent=schedule.dependent,
    )
    return results


LOWERINGS: dict[str, Lowering] = {"top_logprobs": _top_logprobs}
