"""Attention of steps of many tokens: the launch."""

from ingot.backends.triton.kernels.attention_prefill import prefill_attention
from ingot.backends.triton.launches import Term, cdiv
from ingot.backends.triton.lower.attention_shapes import attention_of
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.schedule import Schedule, Value


def schedule_prefill(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    attention = attention_of(call)
    # Tiles by what registers and shared memory hold, as ptxas says for compute capability 9.0: a total of 128 rows of
    # 128 elements in 8 warps, and without tensor cores, which float32 does not use, a quarter of that.
    wide = attention.itemsize == 4
    rows = 32 if wide else 128 if attention.block_dim <= 128 else 64
    keys = 32 if wide or attention.block_dim > 128 else 64
    out = schedule.output(call.results[0])
    blocks = Term(op="add", left=cdiv(attention.tokens, rows), right=attention.sequences)
    schedule.launch(
        prefill_attention,
        (attention.cache.kv_heads * attention.group, blocks, 1),
        {"out": out, **attention.arguments},
        {**attention.constants, "BLOCK_M": rows, "BLOCK_N": keys, "DEPENDENT": schedule.dependent},
        warps=8 if rows == 128 else 4,
        stages=3 if wide else 5,
        dependent=schedule.dependent,
    )
    return (out,)
