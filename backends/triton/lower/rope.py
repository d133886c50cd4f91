"""Lowerings of rotary embedding and of writes to the KV cache."""

from collections.abc import Mapping

from ingot.backends.triton.kernels import rope as kernels
from ingot.backends.triton.kernels.attention.constants import Form
from ingot.backends.triton.launches import cdiv
from ingot.backends.triton.lower.attention.heads import (
    cache_of,
    fed_of,
    head_width,
    static,
    strides_of,
    tokens_of,
    want_cache_dtype,
    want_equal,
    want_one_dtype,
)
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.sizes import power_of_two
from ingot.backends.triton.schedule import Schedule, Value

# Elements of a tile: 16 per thread of 4 warps, which leaves registers for partners and angles.
_TILE = 2048


def rotated_head(call: Call, name: str, block: int | None = None) -> kernels.Head:
    """Return how a call norms and rotates the heads of its tensor `name`, as constants of the kernels.

    `block` is the number of columns of the tile that holds a head. None means the least power of two that is large
    enough.
    """
    table, dim = call.value("table"), head_width(call, name)
    call.want(call.dtype_name("table") == "f32", f"a table of {call.dtype_name('table')}")
    call.want_dense_rows("table")
    return kernels.Head(
        dim,
        block or power_of_two(dim),
        rotary=static(table, 1),
        interleaved=bool(call.attributes["interleaved"]),
        eps=float(call.attributes.get("eps", 0.0)),
        norm_last=bool(call.attributes.get("norm_last", False)),
    )


def _block_heads(heads: int, block_dim: int) -> int:
    return min(power_of_two(heads), max(1, _TILE // block_dim))


def _rope(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    x = call.value("x")
    head = rotated_head(call, "x")
    heads = static(x, 1)
    block = _block_heads(heads, head.block)
    out = schedule.output(call.results[0])
    schedule.launch(
        kernels.rope,
        (tokens_of(call, "x"), cdiv(heads, block), 1),
        {"out": out, "x": x, "positions": call.value("positions"), "table": call.value("table")},
        {
            "HEADS": heads,
            "X": strides_of(call, "x"),
            "HEAD": head,
            "BLOCK_HEADS": block,
            "DEPENDENT": schedule.dependent,
        },
        dependent=schedule.dependent,
    )
    return (out,)


def _kv_append(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    cache = cache_of(call)
    want_one_dtype(call, "k", "v")
    want_cache_dtype(call, schedule.sm, "k")
    key, value = cache.form.key_width, cache.form.value_width
    form = Form(cache.kv_heads, key, power_of_two(key), value, power_of_two(value))
    block = _block_heads(cache.kv_heads, form.block)
    schedule.launch(
        kernels.kv_append,
        (tokens_of(call, "k"), cdiv(cache.kv_heads, block), 1),
        {name: call.optional(name) for name in ("kv", "k", "v", "slots")},
        {
            "FED": fed_of(call),
            "CACHE": cache.layout,
            "FORM": form,
            "BLOCK_HEADS": block,
            "DEPENDENT": schedule.dependent,
        },
        dependent=schedule.dependent,
    )
    return ()


def _qk_norm_rope_append(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    cache = cache_of(call)
    want_equal(call, cache)
    want_one_dtype(call, "q", "k", "v")
    want_cache_dtype(call, schedule.sm, "k")
    head = rotated_head(call, "k")
    heads = static(call.value("q"), 1)
    block = _block_heads(max(heads, cache.kv_heads), head.block)
    out = schedule.output(call.results[0])
    names = ("kv", "q", "k", "v", "positions", "table", "slots")
    schedule.launch(
        kernels.qk_norm_rope_append,
        (tokens_of(call, "q"), cdiv(heads, block) + cdiv(cache.kv_heads, block), 1),  # type: ignore[operator]
        {"out": out, **{name: call.value(name) for name in names}, **norms_of(call)},
        {
            "HEADS": heads,
            "KV_HEADS": cache.kv_heads,
            "FED": fed_of(call),
            "CACHE": cache.layout,
            "HEAD": head,
            "BLOCK_HEADS": block,
            "DEPENDENT": schedule.dependent,
        },
        dependent=schedule.dependent,
    )
    return (out,)


def norms_of(call: Call) -> dict[str, Value | None]:
    """Return the weights of the q/k norm as {"q_weight": …, "k_weight": …}. Both are None if there is no norm.

    A call with only one of the two weights has no norm, as in the op's reference.
    """
    gains = {name: call.optional(name) for name in ("q_weight", "k_weight")}
    return gains if all(gain is not None for gain in gains.values()) else dict.fromkeys(gains)


LOWERINGS: Mapping[str, Lowering] = {
    "rope": _rope,
    "kv_append": _kv_append,
    "qk_norm_rope_append": _qk_norm_rope_append,
}
