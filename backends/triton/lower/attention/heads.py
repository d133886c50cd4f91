"""Read and check the layouts of q, k, v and the KV cache, for the lowerings of attention, rope and cache writes."""

from dataclasses import dataclass, replace

import torch

from ingot.backends.triton.kernels.attention.constants import Fed, Layout, Strides
from ingot.backends.triton.launches import Expr
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.schedule import Value
from ingot.ir.cache.dtype import SCALE_DEFAULTS, CacheScales, is_narrow
from ingot.ir.cache.form import CacheForm
from ingot.ir.machine.gpus import FEATURES

# The widest head that kernels hold in registers (Gemma's).
WIDEST = 256


def static(value: Value, axis: int) -> int:
    """Return the size of an axis of a tensor. It must be a number, not a symbolic dim such as "T"."""
    size = value.type.shape[axis]
    assert isinstance(size, int), f"{value.type} along axis {axis}"
    return size


@dataclass(frozen=True)
class Cache:
    """The KV cache of a call: its number of k/v heads, widths of keys and values (`form`), and strides (`layout`)."""

    kv_heads: int
    form: CacheForm
    layout: Layout


def cache_of(call: Call) -> Cache:
    """Return the heads, widths and strides of the KV cache that a call reads or writes.

    Raises Refused if the elements of a head are not contiguous.
    """
    kv, v = call.value("kv"), call.optional("v")
    page, kv_heads = static(kv, 2), static(kv, 3)
    scales = CacheScales.of({**SCALE_DEFAULTS, **call.attributes})
    if "k" in call.values:
        form = CacheForm.of(call.value("k").type, None if v is None else v.type, per_token=scales.per_token)
    else:
        width = call.attributes.get("value_width")
        form = CacheForm.of_cache(kv.type.shape, static(call.value("q"), 2), width, per_token=scales.per_token)
    page_stride, part_stride, slot_stride, head_stride, step = kv.strides
    call.want((head_stride, step) == (form.row, 1), f"the heads of the cache are not contiguous: {kv.type}")
    offset = part_stride if form.equal else form.value_offset(page, kv_heads)
    layout = Layout(page, page_stride, offset, slot_stride, form.row, float(scales.k), float(scales.v))
    if scales.per_token:
        value_scale = offset + form.key_scale_offset if form.equal else form.value_scale_offset(page, kv_heads)
        layout = replace(layout, per_token=True, key_scale=form.key_scale_offset, value_scale=value_scale)
    return Cache(kv_heads, form, layout)


def want_equal(call: Call, cache: Cache) -> None:
    """Raise Refused if keys and values of the call's cache have different widths."""
    call.want(cache.form.equal, f"{cache.form}, and the kernel needs keys and values of one width")


def strides_of(call: Call, name: str) -> Strides | None:
    """Return the strides of the call's tensor `name` [T, H, D], or None if the call does not have it.

    Raises Refused if its last axis is strided.
    """
    call.want_dense_rows(name)
    value = call.optional(name)
    return None if value is None else Strides(*value.strides[:2])


def fed_of(call: Call) -> Fed:
    """Return the strides of q, k and v of a call. None stands for a tensor that the call does not have."""
    return Fed(*(strides_of(call, name) for name in ("q", "k", "v")))


def head_width(call: Call, name: str) -> int:
    """Return the number of elements of a head of the tensor `name`.

    Raises Refused if a head does not fit into one tile.
    """
    dim = static(call.value(name), 2)
    call.want(dim <= WIDEST, f"heads of {dim} elements, more than {WIDEST}")
    return dim


def want_one_dtype(call: Call, *names: str) -> None:
    """Raise Refused if these tensors of a call differ in dtype. Absent ones are skipped."""
    dtypes = {name: call.dtype_name(name) for name in names if call.optional(name) is not None}
    call.want(len(set(dtypes.values())) == 1, "dtypes differ: " + ", ".join(f"{n} {d}" for n, d in dtypes.items()))


def want_cache_dtype(call: Call, sm: int, name: str) -> None:
    """Raise Refused if the kernels do not support the dtype of the call's KV cache.

    They support the dtype of the tensor `name`, i8, and f8e4m3 on GPUs that convert it. `sm` is the compute
    capability.
    """
    dtype = call.value("kv").type.dtype
    if dtype is torch.float8_e4m3fn:
        needed = FEATURES["fp8"]
        call.want(sm in needed, f"a cache of {call.dtype_name('kv')}, and kernels for it need {needed.needs}")
    elif not is_narrow(dtype):
        want_one_dtype(call, "kv", name)


def tokens_of(call: Call, name: str) -> Expr:
    """Return the number of tokens of a call, the first size of its tensor `name` [T, …]."""
    return call.value(name).type.shape[0]
