"""Lowering of `step_latent_attention`: latent attention of the tokens of a step, after a part over cached latents."""

from collections.abc import Mapping

from ingot.backends.triton.kernels.attention.constants import Form, Scores
from ingot.backends.triton.kernels.attention.latent_step import step_latent_attention
from ingot.backends.triton.launches import WARP, Term, cdiv
from ingot.backends.triton.lower.attention.heads import fed_of, static, strides_of, tokens_of, want_one_dtype
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.rows import want_floats
from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.backends.triton.lower.sizes import LEAST, tile_width
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.masks import CAUSAL

# The widest tile of keys or values, and most blocks of keys in flight.
_WIDEST, _STAGES = 256, 3


def _step_latent_attention(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    names = ("q", "q_rotated", "k", "k_rotated", "v", "before")
    want_floats(call, *names)
    want_one_dtype(call, *names)
    call.want_dense_rows(*names)
    heads, dim, rotated = (static(call.value(name), axis) for name, axis in (("q", 1), ("q", 2), ("q_rotated", 2)))
    value_dim = static(call.value("v"), 2)
    block, tail, block_value = map(tile_width, (dim, rotated, value_dim))
    widest = max(block, tail, block_value)
    call.want(widest <= _WIDEST, f"tiles of {widest} elements, and kernels have up to {_WIDEST}")
    call.want(not schedule.bucket.batch_invariant, "the step's tokens are summed apart from the cached ones")
    form = Form(heads, dim, block, value_dim, block_value, tail)
    itemsize = call.value("q").type.dtype.itemsize
    # Tiles are those of `step_attention`: an accumulator of 128 rows of 128 elements in 8 warps.
    wide, narrow = itemsize == 4, max(block, block_value) <= 128
    if wide:
        rows, keys, warps = (32, 32, 4) if narrow else (LEAST, LEAST, 8)
    else:
        rows, keys, warps = (128, 64, 8) if narrow else (64, 32, 8)
    stages = _STAGES
    while stages > 1 and _shared(form, rows, keys, stages) * itemsize > shared_memory(schedule.sm):
        stages -= 1
    needed = _shared(form, rows, keys, stages) * itemsize
    call.want(needed <= shared_memory(schedule.sm), f"tiles take {needed} bytes of shared memory")
    out = schedule.output(call.results[0])
    tokens, sequences = tokens_of(call, "q"), call.value("q_starts").type.shape[0]
    full = cdiv(tokens, rows)
    blocks = Term(op="add", left=full, right=Term(op="min", left=full, right=sequences))
    schedule.launch(
        step_latent_attention,
        (heads, blocks, 1),
        {
            "out": out,
            **{name: call.value(name) for name in (*names, "q_starts", "q_lens", "before_lse")},
            "tokens": tokens,
            "sequences": sequences,
        },
        {
            "ROTATED": rotated,
            "Q_ROTATED": strides_of(call, "q_rotated"),
            "ROTATED_TOKEN": call.value("k_rotated").strides[0],
            "BEFORE": strides_of(call, "before"),
            "FED": fed_of(call),
            "FORM": form,
            "SCORES": Scores(float(call.attributes["scale"]), CAUSAL.name, None),
            "BLOCK_M": rows,
            "BLOCK_N": keys,
            "SCAN": WARP * warps,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps,
        stages=stages,
        dependent=schedule.dependent,
    )
    return (out,)


def _shared(form: Form, rows: int, keys: int, stages: int) -> int:
    """Return the elements that a program has in shared memory: queries, and `stages` blocks of keys and values."""
    key = form.block + form.tail
    return rows * key + stages * keys * (key + form.block_value)


LOWERINGS: Mapping[str, Lowering] = {"step_latent_attention": _step_latent_attention}
