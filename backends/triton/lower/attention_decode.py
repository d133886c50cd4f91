"""Attention of steps of few tokens: how contexts are cut, and the launch."""

from typing import Any

import torch

from ingot.backends.triton.kernels.attention_decode import decode_attention
from ingot.backends.triton.launches import Term, times
from ingot.backends.triton.lower.attention_choice import known_tiles
from ingot.backends.triton.lower.attention_problem import DECODE_ATTENTION, MOST_DECODED, DecodeProblem
from ingot.backends.triton.lower.attention_shapes import Attention, attention_of
from ingot.backends.triton.lower.attention_tiles import DecodeTiles
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.heads import power_of_two, static, strides_of, want_one_dtype
from ingot.backends.triton.lower.rope import norms_of, rotated_head
from ingot.backends.triton.schedule import Schedule, Value

# The most splits of one context, and of all tokens of a step: what they leave behind is that many times its result.
_MAX_SPLITS, _ALL_SPLITS = 64, 2 * MOST_DECODED
# Elements of partial results that are added at once: 128 for each thread of 4 warps, and 64 where more programs run.
_COMBINED = {True: 16384, False: 8192}
# Up to this many tokens, a context is split in two at least.
_HALVED = 16


def _problem(call: Call, attention: Attention, schedule: Schedule, *, append: bool) -> DecodeProblem:
    cache = attention.cache
    most_tokens = schedule.bucket.tokens[1]
    return DecodeProblem(
        cache.kv_heads, attention.group, cache.dim, cache.page, call.dtype_name("q"), most_tokens, append
    )


def schedule_decode(call: Call, schedule: Schedule, *, append: bool) -> tuple[Value, ...]:
    """Attention; with `append` q and k are prepared and k and v written first, in the same launch."""
    attention = attention_of(call)
    most_tokens = schedule.bucket.tokens[1]
    problem = _problem(call, attention, schedule, append=append)
    tiles = schedule.choose(DECODE_ATTENTION, problem.fields(), DecodeTiles, lambda: known_tiles(problem))
    cache, heads = attention.cache, power_of_two(attention.group)
    shares = max(1, tiles.programs * schedule.cores // cache.kv_heads)
    # A step of one token needs no more than the certain items; with many tokens, long contexts get what is to spare.
    max_splits = min(_MAX_SPLITS, _ALL_SPLITS // most_tokens)
    base = 2 if most_tokens <= _HALVED else 1
    if most_tokens == 1:
        base = max_splits = min(_MAX_SPLITS, 1 << (shares.bit_length() - 1))
        shares = 0
    pairs = times(attention.tokens, cache.kv_heads)
    items = Term(op="add", left=times(pairs, base), right=shares * cache.kv_heads)
    left = (attention.tokens, cache.kv_heads, max_splits)
    out = schedule.output(call.results[0])
    prologue: dict[str, Any] = dict.fromkeys(("k", "v", "positions", "table", "slots", "q_weight", "k_weight"))
    fixed: dict[str, Any] = {"EPS": 0.0, "HEAD": None, "POSITIONS": 0}
    fixed |= dict.fromkeys(("K_TOKEN", "K_HEAD", "V_TOKEN", "V_HEAD"), 0)
    if append:
        want_one_dtype(call, "kv", "k", "v")
        prologue = {name: call.value(name) for name in ("k", "v", "positions", "table", "slots")} | norms_of(call)
        fixed = {"EPS": float(call.attributes["eps"]), "HEAD": rotated_head(call, "q", attention.block_dim)}
        fixed |= {"POSITIONS": static(call.value("table"), 0), **strides_of(call, "k", "v")}
    schedule.launch(
        decode_attention,
        (items, 1, 1),
        {
            "out": out,
            "partial": schedule.scratch(torch.float32, (*left, attention.group, cache.dim)),
            "sizes": schedule.scratch(torch.float32, (*left, attention.group)),
            "arrived": schedule.counter((most_tokens, cache.kv_heads)),
            **attention.arguments,
            **prologue,
        },
        {
            **attention.constants,
            **fixed,
            "APPEND": append,
            "BLOCK_GROUP": max(16, heads),
            "CHUNK": tiles.keys,
            "BASE": base,
            "SHARES": shares,
            "MAX_SPLITS": max_splits,
            "BLOCK_HEADS": heads,
            "BLOCK_SPLITS": min(
                power_of_two(max_splits), max(1, _COMBINED[most_tokens == 1] // (heads * attention.block_dim))
            ),
            "AHEAD": tiles.ahead,
            "EARLY_TILE": tiles.early,
            "DEPENDENT": schedule.dependent,
        },
        warps=tiles.warps,
        stages=tiles.stages,
        dependent=schedule.dependent,
    )
    return (out,)
