"""Lowering of `sample`: one kernel for greedy rows, and two more for rows with a temperature."""

from dataclasses import fields

import torch
import triton

from ingot.backends.triton.kernels.sampling import sample as sampling
from ingot.backends.triton.kernels.sampling.groups import GROUP
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.rows import FLOATS
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.artifact.plan import GPU_FEW_TOKENS, BucketClass
from ingot.ir.edit_limits import MAX_BAD_WORDS, MAX_BIASES
from ingot.ir.ops.logit_edits import ANY_TOKEN, EditParts
from ingot.ir.ops.penalties import GENERATED, Penalties

# Logits per program if a row is split: 63 programs for a vocabulary of 128 k, since one row must fill the device.
_SPLIT_BLOCK, _SPLIT_WARPS = 2048, 8
# Logits per program for more than 64 rows. There the cost is in starting programs (`wave` of `choose_largest` in
# ir/machine/gpu_times.py), above all programs that have nothing to draw.
_MANY_ROWS_SHARE = 8192
# Groups of 32 tokens per iteration of a program that takes a whole row, with a thread per 8 tokens.
_BLOCK_GROUPS, _ROW_WARPS = 256, 32
# Logits per iteration of such a program that searches a whole row, for typical sampling.
_ROW_BLOCK = 2048


def _sample(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    logits, counts, banned = call.value("logits"), call.value("token_counts"), call.value("banned")
    edits = call.value("edits")
    call.want(logits.type.dtype in FLOATS, f"logits are not f32, bf16 or f16: {logits.type}")
    call.want_dense_rows(*call.values)
    call.want(banned.type.strides is None, f"banned is strided: {banned.type}")
    rows, vocab = logits.type.shape
    most_banned = banned.type.shape[1]
    assert isinstance(vocab, int) and isinstance(most_banned, int)
    tokens = schedule.output(call.results[0])
    share = min(_share(schedule.bucket), max(GROUP.value, triton.next_power_of_2(vocab)))
    block = min(_SPLIT_BLOCK, share)
    splits = triton.cdiv(vocab, share)
    # A row of logits belongs to a token, so a step has at most as many rows as tokens.
    most_rows = schedule.bucket.tokens[1]
    tops, masses, limits, centres, spreads = (schedule.scratch(torch.float32, (rows,)) for _ in range(5))
    last_ids = schedule.scratch(torch.int32, (rows,))
    groups = splits * (share // GROUP.value)
    group_tops = schedule.scratch(torch.float32, (rows, groups))
    split_masses = schedule.scratch(torch.float32, (rows, splits))
    listed_groups = schedule.scratch(torch.int32, (rows, groups))
    # Only rows with penalties, bans or edits, which `changed` marks, use `penalized`.
    changed = {
        "changed": schedule.scratch(torch.int32, (rows,)),
        "penalized": schedule.scratch(torch.float32, (rows, vocab)),
    }
    shape = {
        "VOCAB": vocab,
        "LOGITS_ROW": logits.strides[0],
        "DEPENDENT": schedule.dependent,
    }
    split = {**shape, "SPLITS": splits, "BLOCK_SPLITS": triton.next_power_of_2(splits)}
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
            **{one.name: call.value(one.name) for one in fields(Penalties)},
            **changed,
            "tokens": tokens,
            "tops": tops,
            "masses": masses,
            "group_tops": group_tops,
            "split_masses": split_masses,
            **parts,
        },
        {
            **split,
            "COUNTS_ROW": counts.strides[0],
            "GENERATED": GENERATED,
            "MOST_BANNED": most_banned,
            "BLOCK_BANNED": triton.next_power_of_2(most_banned),
            "EDITS_ROW": edits.strides[0],
            "ALLOWED": EditParts(vocab).allowed_words,
            "BIASES": MAX_BIASES,
            "PAIRS": MAX_BAD_WORDS,
            "ANY_TOKEN": ANY_TOKEN,
            "BLOCK_PENALIZED": min(share, 32 * _SPLIT_WARPS),
            "BLOCK": share,
        },
        warps=_SPLIT_WARPS,
        dependent=schedule.dependent,
    )
    cuts = {name: call.value(name) for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")}
    found = {"tops": tops, "limits": limits, "last_ids": last_ids, "centres": centres, "spreads": spreads}
    schedule.launch(
        sampling.find_threshold,
        (rows,),
        {
            "logits": logits,
            **cuts,
            **changed,
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
            "BLOCK": min(_ROW_BLOCK, triton.next_power_of_2(vocab)),
        },
        warps=_ROW_WARPS,
        dependent=schedule.dependent,
    )
    keys = {name: call.value(name) for name in ("temperature", "min_p", "seeds", "positions")}
    schedule.launch(
        sampling.draw,
        (splits, rows),
        {"logits": logits, **keys, **changed, **found, "tokens": tokens, **parts},
        {**split, "SHARE": share, "BLOCK": block},
        warps=_SPLIT_WARPS,
        dependent=schedule.dependent,
    )
    return (tokens,)


def _share(bucket: BucketClass) -> int:
    """Return how many logits of a row each program of a sampling kernel takes.

    `bucket` is a range of step sizes. The number sets the order in which probabilities are summed. It is therefore
    equal for all batch-invariant bucket classes.
    """
    many_rows = bucket.q_max == 1 and bucket.tokens[0] > GPU_FEW_TOKENS and not bucket.batch_invariant
    return _MANY_ROWS_SHARE if many_rows else _SPLIT_BLOCK


LOWERINGS: dict[str, Lowering] = {"sample": _sample}
