"""The arguments and constants of a paged attention call, as all its kernels take them."""

from dataclasses import dataclass, replace
from typing import Any

from ingot.backends.triton.kernels.attention.constants import Fed, Form, Scores
from ingot.backends.triton.launches import Expr
from ingot.backends.triton.lower.attention.form_tiles import TileWidths
from ingot.backends.triton.lower.attention.heads import (
    Cache,
    cache_of,
    fed_of,
    head_width,
    static,
    want_cache_dtype,
)
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.sizes import LEAST, power_of_two, tile_width
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.cache.dtype import is_narrow
from ingot.ir.cache.form import CacheForm
from ingot.ir.machine.gpus import FEATURES
from ingot.ir.masks import CAUSAL, Mask

# The widest tile of keys or values for caches of unequal widths, as the latent cache of DeepSeek models needs it.
_WIDEST_TILE = 512


@dataclass(frozen=True)
class Attention:
    """A paged attention call, translated to the arguments of its kernels.

    `cache` has the heads and the memory layout of the KV cache. `fed` has the strides of q, k and v. `form` has the
    head and tile sizes, and `scores` the scale, mask and soft cap. `itemsize` is the bytes of an element of q. `tokens`
    and `sequences` are the sizes of the dims T and B. `arguments` are the run-time arguments that all kernels take, by
    name. `assembly` says whether kernels convert elements of an 8-bit cache by instructions of compute capability 8.9.
    """

    cache: Cache
    fed: Fed
    form: Form
    scores: Scores
    itemsize: int
    tokens: Expr
    sequences: Expr
    arguments: dict[str, "Value | Expr | None"]
    assembly: bool

    @property
    def constants(self) -> dict[str, Any]:
        """Return the compile-time constants that all paged attention kernels take, by name."""
        return {"FED": self.fed, "CACHE": self.cache.layout, "FORM": self.form, "SCORES": self.scores}

    @property
    def equal(self) -> bool:
        """Return whether keys and values have the same width in the cache."""
        return self.cache.form.equal

    def tile_widths(self, sums: int) -> TileWidths:
        """Return the widths of a kernel's tiles. The kernel has `sums` accumulators per row of queries."""
        return tile_widths_of(self.form, sums, self.itemsize)

    def divided(self, most: int) -> "Attention":
        """Return this attention with at most `most` q heads in a tile.

        If more q heads share a k/v head, the result counts that head as several k/v heads. They read one head of the
        cache.
        """
        group = max(size for size in range(1, most + 1) if self.form.group % size == 0)
        sharing = self.form.group // group
        kv_heads = self.form.kv_heads * sharing
        form = replace(self.form, kv_heads=kv_heads, group=group, block_group=power_of_two(group), sharing=sharing)
        return replace(self, form=form)


def tile_widths_of(form: Form, sums: int, itemsize: int) -> TileWidths:
    """Return the widths of a kernel's tiles, for heads of the sizes in `form`.

    The kernel has `sums` accumulators per row of queries. `itemsize` is the bytes of an element of q.
    """
    return TileWidths(form.block + form.tail, 0 if form.same else form.block_value, form.block_value, sums, itemsize)


def tiled(form: CacheForm, kv_heads: int, group: int) -> Form:
    """Return the head sizes of an attention, with the sizes of the tiles that hold a head.

    `form` has the widths of keys and values in the cache. `group` q heads share each of `kv_heads` k/v heads. If keys
    and values differ in width, a key may take two tiles. For example, 576 elements take tiles of 512 and 64, not one of
    1024.
    """
    block, tail = tile_width(form.key_width), 0
    if not form.equal and form.key_width > block // 2 >= LEAST:
        rest = tile_width(form.key_width - block // 2)
        if rest < block // 2:
            block, tail = block // 2, rest
    block_value = tile_width(form.value_width)
    same = form.shared and block == block_value
    found = Form(kv_heads, form.key_width, block, form.value_width, block_value, tail, same)
    return replace(found, group=group, block_group=power_of_two(group))


def _form_of(call: Call, cache: Cache) -> Form:
    """Return the head and tile sizes of an attention call. Raises Refused if its heads are too wide for tiles."""
    if cache.form.equal:
        head_width(call, "q")
    form = tiled(cache.form, cache.kv_heads, static(call.value("q"), 1) // cache.kv_heads)
    widest = max(form.block, form.block_value)
    call.want(cache.form.equal or widest <= _WIDEST_TILE, f"{cache.form}, and tiles hold up to {_WIDEST_TILE}")
    return form


def mask_of(call: Call) -> Mask:
    """Return the attention mask of a call, from its attribute "mask". Without that attribute, it is causal."""
    return Mask.named(call.attributes.get("mask", CAUSAL.name))


def results_of(call: Call, schedule: Schedule) -> tuple[Value, Value | None]:
    """Add the output buffers of an attention call to `schedule`. Return (attention, log-sum-exp or None)."""
    out, *lse = (schedule.output(result) for result in call.results)
    return out, lse[0] if lse else None


def scores_of(call: Call) -> Scores:
    """Return the scale, mask and soft cap of an attention call. The scale includes the cache's k_scale."""
    soft_cap = call.attributes.get("soft_cap")
    # The cache holds keys divided by k_scale.
    scale = float(call.attributes["scale"]) * float(call.attributes.get("k_scale", 1.0))
    return Scores(scale, mask_of(call).name, None if soft_cap is None else float(soft_cap))


def attention_of(call: Call, sm: int) -> Attention:
    """Return a paged attention call, translated to the arguments of its kernels.

    `sm` is the compute capability, 90 for Hopper. Raises Refused if the kernels do not support its cache or heads.
    """
    cache = cache_of(call)
    want_cache_dtype(call, sm, "q")
    form = _form_of(call, cache)
    names = ("kv", "q", "page_table", "q_starts", "q_lens")
    tokens, sequences = call.value("q").type.shape[0], call.value("q_starts").type.shape[0]
    arguments: dict[str, Value | Expr | None] = {
        **{name: call.value(name) for name in names},
        "kv_lens": call.optional("kv_lens"),
        "sinks": call.optional("sinks"),
        "slopes": call.optional("slopes"),
        "tokens": tokens,
        "sequences": sequences,
        "width": call.value("page_table").type.shape[1],
    }
    itemsize = call.value("q").type.dtype.itemsize
    assembly = is_narrow(call.value("kv").type.dtype) and sm in FEATURES["fp8"]
    return Attention(cache, fed_of(call), form, scores_of(call), itemsize, tokens, sequences, arguments, assembly)
