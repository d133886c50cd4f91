"""Add the launch of decode attention, for steps of few tokens and for the decoding sequences of mixed steps."""

from typing import Any

import torch

from ingot.backends.triton.kernels.attention.constants import Early, Splits
from ingot.backends.triton.kernels.attention.decode import decode_attention
from ingot.backends.triton.launches import WARP, Expr, Term, times
from ingot.backends.triton.lower.attention.choice import known_tiles, most_heads
from ingot.backends.triton.lower.attention.decode_latents import (
    HEADS,
    LATENTS_ON_HOPPER,
    schedule_latents,
    takes_latents,
)
from ingot.backends.triton.lower.attention.form_tiles import form_tiles
from ingot.backends.triton.lower.attention.heads import static, want_equal, want_one_dtype
from ingot.backends.triton.lower.attention.merge import schedule_merge, split_results
from ingot.backends.triton.lower.attention.problem import (
    AUTO,
    DECODE_ATTENTION,
    MOST_DECODED,
    DecodeProblem,
    form_name,
)
from ingot.backends.triton.lower.attention.shapes import Attention, attention_of, results_of
from ingot.backends.triton.lower.attention.shared import Prefixes, schedule_shared, sharing_of, when
from ingot.backends.triton.lower.attention.split_limits import heads_at_once, split_limits, splits_at_once
from ingot.backends.triton.lower.attention.tiles import DecodeTiles
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.rope import norms_of, rotated_head
from ingot.backends.triton.lower.sizes import LEAST, power_of_two
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.artifact.plan import GPU_FEW_TOKENS


def schedule_decode(call: Call, schedule: Schedule, *, append: bool) -> tuple[Value, ...]:
    """Add the launch of decode attention for a call to `schedule`, and return its results.

    The results are (attention,) or (attention, log-sum-exp). With `append`, the kernel also norms and rotates q and k,
    and writes k and v into the cache.
    """
    attention = attention_of(call, schedule.sm)
    out, lse = results_of(call, schedule)
    _launch(
        call, attention, schedule, (out, lse), schedule.bucket.tokens[1], sharing_of(call, attention, schedule),
        append=append, single=False,
    )  # fmt: skip
    return (out,) if lse is None else (out, lse)


def schedule_single(call: Call, attention: Attention, schedule: Schedule, out: Value, lse: Value | None) -> None:
    """Add a launch of decode attention for the sequences of a mixed step that have only one token in it.

    The launch writes the rows of these sequences in `out` [T, heads, dim]. If `lse` [T, heads] is given, it also writes
    their log-sum-exp.
    """
    _launch(call, attention, schedule, (out, lse), schedule.most_sequences, None, append=False, single=True)


def _scan(tokens: int, warps: int, *, single: bool) -> int:
    """Return how many sequences the kernel's loops over sequences take per iteration: a power of two.

    The loops load sequence lengths. `warps` are those of the kernel, also a power of two.
    A step has at most `tokens` tokens. With `single`, the kernel computes only sequences with one token in the step.
    """
    if tokens <= GPU_FEW_TOKENS:
        return WARP  # sums stay within each warp
    # A mixed step may have any number of sequences; a decode step has at most one per token.
    return WARP * warps if single else power_of_two(tokens)


def _launch(
    call: Call,
    attention: Attention,
    schedule: Schedule,
    results: tuple[Value, Value | None],
    most_tokens: int,
    sharing: Value | None,
    *,
    append: bool,
    single: bool,
) -> None:
    """Add the launch of decode attention to `schedule`, for steps of up to `most_tokens` tokens.

    `results` are the buffers (attention, log-sum-exp or None). With `append`, the kernel also norms and rotates q and
    k, and writes k and v. With `single`, it computes only sequences with one token in the step.

    `sharing` is the table of shared prefixes, or None. With a table, the function adds three launches. One runs in
    steps without shared prefixes, the other two in steps with them. If splits have large results, another launch merges
    them.
    """
    dtype, cache_dtype = call.dtype_name("q"), call.dtype_name("kv")
    on_hopper = not append and sharing is None and takes_latents(attention, dtype, cache_dtype, schedule.sm)
    if on_hopper:
        attention = attention.divided(HEADS)
    elif not attention.equal:
        held = min(most_heads(most_tokens), max(LEAST, attention.form.block_group))
        attention = attention.divided(form_tiles(attention.tile_widths(1), schedule.sm, call.want, held).rows)
    form = attention.form
    kv_heads = form.kv_heads
    problem = DecodeProblem(
        kv_heads, form.group, form.dim, attention.cache.layout.page, dtype, min(most_tokens, MOST_DECODED), append,
        AUTO if cache_dtype == dtype else cache_dtype, form_name(attention.cache.form), form.sharing,
    )  # fmt: skip
    if on_hopper:
        tiles = LATENTS_ON_HOPPER
    else:
        tiles = schedule.choose(
            DECODE_ATTENTION, problem.fields(), DecodeTiles, lambda: known_tiles(problem, schedule.sm)
        )
    limits = split_limits(problem, tiles, schedule.cores)
    rows = attention.sequences if single else attention.tokens
    items = Term(op="add", left=times(times(rows, kv_heads), limits.base), right=limits.shares * kv_heads)
    splits = Splits(
        chunk=tiles.keys,
        base=limits.base,
        shares=limits.shares,
        most=limits.most,
        at_once=min(power_of_two(limits.most), splits_at_once(problem)),
        heads_at_once=heads_at_once(problem),
        scan=_scan(problem.tokens, tiles.warps, single=single),
        single=single,
        fed_apart=append,
        apart=limits.apart,
    )
    if on_hopper:
        schedule_latents(attention, schedule, results, rows, items, splits)
        return
    prologue: dict[str, Any] = dict.fromkeys(("k", "v", "positions", "table", "slots", "q_weight", "k_weight"))
    head, positions = None, 0
    if append:
        want_equal(call, attention.cache)
        want_one_dtype(call, "q", "k", "v")
        prologue = {name: call.value(name) for name in ("k", "v", "positions", "table", "slots")} | norms_of(call)
        head, positions = rotated_head(call, "q", form.block), static(call.value("table"), 0)
    constants = {
        **attention.constants,
        "ASSEMBLY": attention.assembly,
        "HEAD": head,
        "SPLITS": splits,
        "EARLY": Early(tile=bool(tiles.early), ahead=tiles.ahead, positions=positions),
        "DEPENDENT": schedule.dependent,
    }
    merged = {"out": results[0], "lse": results[1], **split_results(schedule, rows, form, splits)}
    used = schedule.scratch(torch.int32, (rows, kv_heads)) if limits.apart else None
    arguments = {
        **merged,
        "arrived": used or schedule.counter((most_tokens, kv_heads)),
        **attention.arguments,
        **prologue,
    }

    def launch(grid: Expr, prefixes: Prefixes | None) -> None:
        given = prefixes or Prefixes()
        schedule.launch(
            decode_attention,
            (grid, 1, 1),
            {
                **arguments,
                "sharing": given.sharing,
                "prefixes": given.attention,
                "prefix_sizes": given.sizes,
                "prefix_splits": given.splits,
            },
            {**constants, "PREFIXES": given.cut},
            warps=tiles.warps,
            stages=tiles.stages,
            dependent=schedule.dependent,
        )

    if sharing is None:
        launch(items, None)
    else:
        launch(times(items, when(sharing, shared=False)), None)
        prefixes = schedule_shared(call, attention, schedule, sharing, head)
        launch(times(items, when(sharing, shared=True)), prefixes)
    if used is not None:
        schedule_merge(
            schedule, rows, form, splits, {**merged, "used": used, "q_starts": attention.arguments["q_starts"]}
        )
