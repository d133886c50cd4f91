"""Lowering of `step_attention`: attention without a KV cache, for sequences whose tokens are all in one step."""

from collections.abc import Mapping

from ingot.backends.triton.kernels.attention.constants import Form
from ingot.backends.triton.kernels.attention.step import step_attention
from ingot.backends.triton.launches import WARP, Term, cdiv
from ingot.backends.triton.lower.attention.heads import fed_of, head_width, static, tokens_of, want_one_dtype
from ingot.backends.triton.lower.attention.shapes import scores_of
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.rows import want_floats
from ingot.backends.triton.lower.sizes import LEAST, power_of_two, tile_width
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.artifact.plan import GPU_FEW_TOKENS


def _step_attention(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    want_floats(call, "q", "k", "v")
    want_one_dtype(call, "q", "k", "v")
    heads, kv_heads, dim = static(call.value("q"), 1), static(call.value("k"), 1), head_width(call, "q")
    block = tile_width(dim)
    form = Form(kv_heads, dim, block, dim, block, group=heads // kv_heads, block_group=power_of_two(heads // kv_heads))
    out = schedule.output(call.results[0])
    tokens, sequences = tokens_of(call, "q"), call.value("q_starts").type.shape[0]
    # Tiles are those of `attention_prefill`. In a step of few tokens no sequence would fill one, so these are smaller,
    # except in batch-invariant bucket classes, where tiles are the same in all steps.
    wide = call.value("q").type.dtype.itemsize == 4
    few = schedule.bucket.tokens[1] <= GPU_FEW_TOKENS and not schedule.bucket.batch_invariant
    rows = LEAST if few else 32 if wide else 128 if block <= 128 else 64
    keys = 32 if wide or block > 128 else 64
    warps = 8 if rows == 128 else 4
    full = cdiv(tokens, rows)
    blocks = Term(op="add", left=full, right=Term(op="min", left=full, right=sequences))
    schedule.launch(
        step_attention,
        (heads, blocks, 1),
        {
            "out": out,
            **{name: call.value(name) for name in ("q", "k", "v", "q_starts", "q_lens")},
            "sinks": call.optional("sinks"),
            "slopes": call.optional("slopes"),
            "tokens": tokens,
            "sequences": sequences,
        },
        {
            "FED": fed_of(call),
            "FORM": form,
            "SCORES": scores_of(call),
            "BLOCK_M": rows,
            "BLOCK_N": keys,
            "SCAN": WARP * warps,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps,
        stages=2 if wide and block > 128 else 3,  # as many as fit into shared memory
        dependent=schedule.dependent,
    )
    return (out,)


LOWERINGS: Mapping[str, Lowering] = {"step_attention": _step_attention}
