"""What both attention kernels are given alike."""

from dataclasses import dataclass
from typing import Any

from ingot.backends.triton.launches import Expr
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.heads import Cache, cache_of, dim_constants, static, strides_of, want_one_dtype
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.masks import CAUSAL, Mask

# The least that a product of tensor cores sums over in Triton: a narrower head is filled up with zeros.
_LEAST_DEPTH = 16


@dataclass(frozen=True)
class Attention:
    """A call as its kernel gets it. `group` heads of q share one head of the cache."""

    cache: Cache
    group: int
    block_dim: int
    itemsize: int
    tokens: Expr
    sequences: Expr
    arguments: dict[str, "Value | Expr | None"]
    constants: dict[str, Any]


def mask_of(call: Call) -> Mask:
    """What a token of an attention sees."""
    return Mask.named(call.attributes.get("mask", CAUSAL.name))


def results_of(call: Call, schedule: Schedule) -> tuple[Value, Value | None]:
    """The attention, and its log-sum-exp where the call gives that too."""
    out, *lse = (schedule.output(result) for result in call.results)
    return out, lse[0] if lse else None


def attention_of(call: Call) -> Attention:
    cache, mask = cache_of(call), mask_of(call)
    want_one_dtype(call, "kv", "q")
    group = static(call.value("q"), 1) // cache.kv_heads
    dim = dim_constants(call, "q")
    block_dim = max(_LEAST_DEPTH, dim["BLOCK_DIM"])
    soft_cap = call.attributes.get("soft_cap")
    names = ("kv", "q", "page_table", "q_starts", "q_lens", "kv_lens")
    tokens, sequences = call.value("q").type.shape[0], call.value("q_starts").type.shape[0]
    arguments = {
        **{name: call.value(name) for name in names},
        "sinks": call.optional("sinks"),
        "tokens": tokens,
        "sequences": sequences,
        "width": call.value("page_table").type.shape[1],
    }
    constants = {
        **strides_of(call, "q"),
        **cache.constants(),
        **dim,
        "BLOCK_DIM": block_dim,
        "GROUP": group,
        "SCALE": float(call.attributes["scale"]),
        "MASK": mask.name,
        "SOFT_CAP": None if soft_cap is None else float(soft_cap),
    }
    itemsize = call.value("q").type.dtype.itemsize
    return Attention(cache, group, block_dim, itemsize, tokens, sequences, arguments, constants)
