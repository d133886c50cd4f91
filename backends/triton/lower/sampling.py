"""sample: a kernel for greedy rows, and two more for rows that are drawn."""

import torch
import triton

from ingot.backends.triton.kernels import sampling
from ingot.backends.triton.launches import cdiv
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.schedule import Schedule, Value

# Logits of a program where a row is split: 63 programs for a vocabulary of 128 k, which one row must fill the device
# with.
_SPLIT_BLOCK, _SPLIT_WARPS = 2048, 8
# Logits that a program which has a row to itself takes at a time, with a thread for each 8.
_ROW_BLOCK, _ROW_WARPS = 8192, 32


def _sample(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    logits, (result,) = call.value("logits"), call.results
    call.want(logits.type.dtype == torch.float32, f"logits are not f32: {logits.type}")
    call.want_dense_rows(*call.values)
    rows, vocab = logits.type.shape
    assert isinstance(vocab, int)
    tokens = schedule.output(result)
    splits = triton.cdiv(vocab, _SPLIT_BLOCK)
    # A row of logits is that of a token: there are no more of them than tokens in a step.
    most_rows = schedule.bucket.tokens[1]
    tops, limits = (schedule.scratch(torch.float32, (rows,)) for _ in range(2))
    last_ids = schedule.scratch(torch.int32, (rows,))
    shape = {"VOCAB": vocab, "LOGITS_ROW": logits.strides[0], "DEPENDENT": schedule.dependent}
    split = {**shape, "SPLITS": splits, "BLOCK_SPLITS": triton.next_power_of_2(splits), "BLOCK": _SPLIT_BLOCK}
    parts = {
        "peaks": schedule.scratch(torch.float32, (rows, splits)),
        "places": schedule.scratch(torch.int32, (rows, splits)),
        "arrived": schedule.counter((most_rows,)),
    }
    schedule.launch(
        sampling.choose_largest,
        (splits, rows),
        {"logits": logits, "tokens": tokens, "tops": tops, **parts},
        split,
        warps=_SPLIT_WARPS,
        dependent=schedule.dependent,
    )
    asked = {name: call.value(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    found = {"tops": tops, "limits": limits, "last_ids": last_ids}
    schedule.launch(
        sampling.find_threshold,
        (rows,),
        {"logits": logits, **asked, **found},
        {**shape, "BLOCK": min(_ROW_BLOCK, triton.next_power_of_2(vocab))},
        warps=_ROW_WARPS,
        dependent=schedule.dependent,
    )
    keys = {name: call.value(name) for name in ("temperature", "min_p", "seeds", "positions")}
    schedule.launch(
        sampling.draw,
        (cdiv(vocab, _SPLIT_BLOCK), rows),
        {"logits": logits, **keys, **found, "tokens": tokens, **parts},
        split,
        warps=_SPLIT_WARPS,
        dependent=schedule.dependent,
    )
    return (tokens,)


LOWERINGS: dict[str, Lowering] = {"sample": _sample}
