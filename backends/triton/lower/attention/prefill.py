"""Add the launch of prefill attention."""

from ingot.backends.triton.kernels.attention.prefill import prefill_attention
from ingot.backends.triton.launches import WARP, Term, cdiv
from ingot.backends.triton.lower.attention.form_tiles import form_tiles
from ingot.backends.triton.lower.attention.shapes import Attention
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
    """Add the launch of prefill attention for sequences with at least `least` tokens in the step.

    The launch writes the rows of these sequences in `out` [T, heads, dim]. If `lse` [T, heads] is given, it also writes
    their log-sum-exp. It clears the rows of padding tokens. `ancestors` [T] are bit sets of a draft tree: the tokens of
    the step that each token sees.
    """
    # Tiles by the capacity of registers and shared memory, as ptxas reports for compute capability 9.0: an accumulator
    # of 128 rows of 128 elements in 8 warps. Float32 does not use tensor cores and takes a quarter of that.
    wide = attention.itemsize == 4
    rows = 32 if wide else 128 if attention.form.block <= 128 else 64
    keys = 32 if wide or attention.form.block > 128 else 64
    warps, stages = 8 if rows == 128 else 4, 3 if wide else 5
    if not attention.equal:
        tiles = form_tiles(attention.tile_widths(1), schedule.sm, call.want, most_rows=64)
        rows, keys, warps, stages = tiles.rows, tiles.keys, tiles.warps, tiles.stages
    full = cdiv(attention.tokens, rows)
    # One program per `rows` tokens, and one per sequence for its partial block, up to the same number again. Only many
    # short prompts have more partial blocks, and then the programs loop.
    blocks = Term(op="add", left=full, right=Term(op="min", left=full, right=attention.sequences))
    schedule.launch(
        prefill_attention,
        (attention.form.kv_heads * attention.form.group, blocks, 1),
        {"out": out, "lse": lse, "ancestors": ancestors, **attention.arguments},
        {
            **attention.constants,
            "ASSEMBLY": attention.assembly,
            "BLOCK_M": rows,
            "BLOCK_N": keys,
            "LEAST": least,
            "SCAN": WARP * warps,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps,
        # With at most 128 registers per thread, a block takes half of a multiprocessor's, and two blocks run at once.
        # Only with these tiles does the limit cause no spills.
        registers=128 if schedule.sm == 90 and rows == 128 and attention.form.block <= 64 else None,
        stages=stages,
        dependent=schedule.dependent,
    )
