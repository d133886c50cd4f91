"""sample: a kernel for greedy rows, and two more for rows that are drawn."""

import torch
import triton

from ingot.backends.triton.kernels import sampling
from ingot.backends.triton.kernels.groups import GROUP
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.schedule import Schedule, Value

# Logits of a program where a row is split: 63 programs for a vocabulary of 128 k, which one row must fill the device
# with.
_SPLIT_BLOCK, _SPLIT_WARPS = 2048, 8
# Groups of 32 tokens that a program which has a row to itself takes at a time, with a thread for each 8 tokens.
_BLOCK_GROUPS, _ROW_WARPS = 256, 32


def _sample(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    logits, (result,) = call.value("logits"), call.results
    call.want(logits.type.dtype == torch.float32, f"logits are not f32: {logits.type}")
    call.want_dense_rows(*call.values)
    rows, vocab = logits.type.shape
    assert isinstance(vocab, int)
    tokens = schedule.output(result)
    block = min(_SPLIT_BLOCK, max(GROUP.value, triton.next_power_of_2(vocab)))
    splits = triton.cdiv(vocab, block)
    # A row of logits is that of a token: there are no more of them than tokens in a step.
    most_rows = schedule.bucket.tokens[1]
    tops, masses, limits = (schedule.scratch(torch.float32, (rows,)) for _ in range(3))
    last_ids = schedule.scratch(torch.int32, (rows,))
    groups = splits * (block // GROUP.value)
    group_tops = schedule.scratch(torch.float32, (rows, groups))
    split_masses = schedule.scratch(torch.float32, (rows, splits))
    listed_groups = schedule.scratch(torch.int32, (rows, groups))
    shape = {"VOCAB": vocab, "LOGITS_ROW": logits.strides[0], "DEPENDENT": schedule.dependent}
    split = {**shape, "SPLITS": splits, "BLOCK_SPLITS": triton.next_power_of_2(splits), "BLOCK": block}
    parts = {
        "peaks": schedule.scratch(torch.float32, (rows, splits)),
        "places": schedule.scratch(torch.int32, (rows, splits)),
        "arrived": schedule.counter((most_rows,)),
    }
    schedule.launch(
        sampling.choose_largest,
        (splits, rows),
        {
            "logits": logits,
            "temperature": call.value("temperature"),
            "tokens": tokens,
            "tops": tops,
            "masses": masses,
            "group_tops": group_tops,
            "split_masses": split_masses,
            **parts,
        },
        split,
        warps=_SPLIT_WARPS,
        dependent=schedule.dependent,
    )
    asked = {name: call.value(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    found = {"tops": tops, "limits": limits, "last_ids": last_ids}
    schedule.launch(
        sampling.find_threshold,
        (rows,),
        {
            "logits": logits,
            **asked,
            **found,
            "masses": masses,
            "group_tops": group_tops,
            "listed_groups": listed_groups,
        },
        {
            **shape,
            "GROUPS": groups,
            "BLOCK_ALL": triton.next_power_of_2(groups),
            "BLOCK_GROUPS": min(_BLOCK_GROUPS, triton.next_power_of_2(groups)),
        },
        warps=_ROW_WARPS,
        dependent=schedule.dependent,
    )
    keys = {name: call.value(name) for name in ("temperature", "min_p", "seeds", "positions")}
    schedule.launch(
        sampling.draw,
        (splits, rows),
        {"logits": logits, **keys, **found, "tokens": tokens, **parts},
        split,
        warps=_SPLIT_WARPS,
        dependent=schedule.dependent,
    )
    return (tokens,)


LOWERINGS: dict[str, Lowering] = {"sample": _sample}
