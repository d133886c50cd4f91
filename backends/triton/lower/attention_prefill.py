"""Attention of sequences that feed many tokens: the launch."""

from ingot.backends.triton.kernels.attention_prefill import prefill_attention
from ingot.backends.triton.launches import WARP, Term, cdiv
from ingot.backends.triton.lower.attention_form_tiles import form_tiles
from ingot.backends.triton.lower.attention_shapes import Attention
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.schedule import Schedule, Value


def schedule_prefill(
    call: Call,
    attention: Attention,
    schedule: Schedule,
    out: Value,
    lse: Value | None,
    *,
    least: int,
    ancestors: Value | None = None,
) -> None:
    """Adds the rows of `out` [T, heads, dim], and of `lse` [T, heads] where it is given, of sequences that feed `least`
    tokens or more, and what those have that no sequence owns. `ancestors` [T] go with the mask `tree`."""
    # Tiles by what registers and shared memory hold, as ptxas says for compute capability 9.0: a total of 128 rows of
    # 128 elements in 8 warps, and without tensor cores, which float32 does not use, a quarter of that.
    wide = attention.itemsize == 4
    rows = 32 if wide else 128 if attention.form.block <= 128 else 64
    keys = 32 if wide or attention.form.block > 128 else 64
    warps, stages = 8 if rows == 128 else 4, 3 if wide else 5
    if not attention.equal:
        tiles = form_tiles(attention.held(1), schedule.sm, call.want, most_rows=64)
        rows, keys, warps, stages = tiles.rows, tiles.keys, tiles.warps, tiles.stages
    full = cdiv(attention.tokens, rows)
    # A block for each `rows` tokens, and one that is not full for each sequence: of these as many as full ones at most,
    # since more come of many short prompts alone. Programs go round where there are more blocks.
    blocks = Term(op="add", left=full, right=Term(op="min", left=full, right=attention.sequences))
    schedule.launch(
        prefill_attention,
        (attention.form.kv_heads * attention.form.group, blocks, 1),
        {"out": out, "lse": lse, "ancestors": ancestors, **attention.arguments},
        {
            **attention.constants,
            "BLOCK_M": rows,
            "BLOCK_N": keys,
            "LEAST": least,
            "SCAN": WARP * warps,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps,
        # Half of a multiprocessor's, so that two blocks run side by side. Only there none has to be moved to memory.
        registers=128 if schedule.sm == 90 and rows == 128 and attention.form.block <= 64 else None,
        stages=stages,
        dependent=schedule.dependent,
    )
