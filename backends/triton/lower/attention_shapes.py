"""What both attention kernels are given alike."""

from dataclasses import dataclass, replace
from typing import Any

from ingot.backends.triton.kernels.cache_form import Form
from ingot.backends.triton.launches import Expr
from ingot.backends.triton.lower.attention_form_tiles import Held
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.heads import (
    Cache,
    cache_of,
    dim_constants,
    power_of_two,
    static,
    strides_of,
    want_one_dtype,
)
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.cache_form import CacheForm
from ingot.ir.masks import CAUSAL, Mask

# The least that a product of tensor cores sums over in Triton: a narrower head is filled up with zeros.
_LEAST_DEPTH = 16
# The widest tile of keys or values where these are not of one width: what a latent cache of DeepSeek's shape has.
_WIDEST_TILE = 512


@dataclass(frozen=True)
class Attention:
    """A call as its kernel gets it. `group` heads of q share one of `kv_heads`, which is one of the cache or, where
    `divided`, one of several that read the same head of the cache. `form`: how heads lie in tiles."""

    cache: Cache
    kv_heads: int
    group: int
    block_dim: int
    form: Form
    itemsize: int
    tokens: Expr
    sequences: Expr
    arguments: dict[str, "Value | Expr | None"]
    constants: dict[str, Any]

    @property
    def equal(self) -> bool:
        """Whether values lie beside keys of their width."""
        return self.cache.form.equal

    def held(self, sums: int) -> Held:
        """What a kernel with so many sums for each row holds."""
        value = 0 if self.form.same else self.form.block_value
        return Held(self.block_dim + self.form.tail, value, self.form.block_value, sums, self.itemsize)

    def divided(self, most: int) -> "Attention":
        """The same with groups of up to `most` heads of q: several groups then read one head of the cache."""
        sizes = [size for size in range(1, most + 1) if self.group % size == 0]
        sharing = self.group // max(sizes)
        form, kv_heads, group = replace(self.form, sharing=sharing), self.kv_heads * sharing, self.group // sharing
        constants = {**self.constants, "KV_HEADS": kv_heads, "GROUP": group, "FORM": form}
        return replace(self, kv_heads=kv_heads, group=group, form=form, constants=constants)


def _tiles_of(call: Call, form: CacheForm) -> tuple[int, Form]:
    """(the first tile of a key, how the rest of a head lies in tiles). A wide key such as 576 numbers takes tiles of
    512 and 64 in place of one of 1024."""
    if form.equal:
        block = max(_LEAST_DEPTH, dim_constants(call, "q")["BLOCK_DIM"])
        return block, Form(form.row, 0, form.value_width, block)
    block, tail = max(_LEAST_DEPTH, power_of_two(form.key_width)), 0
    if form.key_width > block // 2 >= _LEAST_DEPTH:
        rest = max(_LEAST_DEPTH, power_of_two(form.key_width - block // 2))
        if rest < block // 2:
            block, tail = block // 2, rest
    block_value = max(_LEAST_DEPTH, power_of_two(form.value_width))
    call.want(max(block, block_value) <= _WIDEST_TILE, f"{form}, and tiles hold up to {_WIDEST_TILE}")
    return block, Form(form.row, tail, form.value_width, block_value, same=form.shared and block == block_value)


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
    block_dim, form = _tiles_of(call, cache.form)
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
        "DIM": cache.form.key_width,
        "BLOCK_DIM": block_dim,
        "FORM": form,
        "GROUP": group,
        "SCALE": float(call.attributes["scale"]),
        "MASK": mask.name,
        "SOFT_CAP": None if soft_cap is None else float(soft_cap),
    }
    itemsize = call.value("q").type.dtype.itemsize
    return Attention(cache, cache.kv_heads, group, block_dim, form, itemsize, tokens, sequences, arguments, constants)
