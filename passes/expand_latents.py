"""expand-latents: in steps of prompts, the step's own tokens have keys and values of each head, and not latents."""

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import call_compilers
from ingot.ir.cache.dtype import CacheScales
from ingot.ir.masks import CAUSAL
from ingot.ir.program import held_type, is_call, named_arguments, tensor_type
from ingot.passes.base import Pass, PassContext
from ingot.passes.fuse_qk_norm_rope import why_no_kernel
from ingot.passes.many_tokens import has_many_tokens
from ingot.passes.rewrite import Rewriter, described

_VIEW, _PERMUTE = torch.ops.aten.view.default, torch.ops.aten.permute.default


@dataclass(frozen=True)
class ExpandLatents(Pass):
    """Divides attention over cached latents into the step's own tokens and the tokens before them.

    For its own tokens, the step computes keys and values of each head. A query and key then take 2 (192 + 128)
    operations for a head of DeepSeek, and over latents 2 (576 + 512). Attention over the tokens before the step reads
    latents as before, since their keys and values are not in the cache. Both parts are merged by their log-sum-exp.

    The pass only runs on a GPU, in bucket classes (ranges of step sizes) whose steps may hold a prompt, not in
    deterministic mode, and if a backend has a kernel for the op `step_latent_attention`. It leaves caches of eight bits
    as they are: there the step's own latents are rounded first. `force` expands in any class and without a kernel.
    """

    name: ClassVar[str] = "expand-latents"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING  # keys and values are rounded, and sums have another order
    force: bool = False

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        prompts = has_many_tokens(context) and context.any_bucket().q_max != 1
        compilers = call_compilers(context.backends)
        if not self.force and not (prompts and compilers):
            return
        for attention in list(rewriter.program.calls(ops.paged_attention.overload)):
            if named_arguments(attention).get("value_width") is None:
                continue
            found = _find(attention)
            if isinstance(found, str):
                rewriter.refuse(attention, found)
                continue
            made = _expand(rewriter, found)
            no_kernel = "" if self.force else why_no_kernel(made[-1], compilers, context)
            if no_kernel:
                rewriter.refuse(attention, f"no backend has a kernel for step_latent_attention: {no_kernel}")
            if no_kernel or not rewriter.take(attention, made[-1]):
                for node in reversed(made):
                    rewriter.program.graph.erase_node(node)
                continue
            rewriter.replace(found.result, made[-1])
            rewriter.program.graph.erase_node(attention)


@dataclass(frozen=True)
class _Found:
    """An attention over latents with the calls around it.

    attention   the call of `paged_attention`
    result      the matmul of each head after it: its result has the values of each head
    by_head     the matmul of each head before it, from which q is joined
    q_rotated   the rotated part of q
    latents     the latents of the step, and `k_rotated` the rotated keys
    k_up, v_up  the weights [heads * size, rank] that make keys and values of latents
    """

    attention: fx.Node
    result: fx.Node
    by_head: fx.Node
    q_rotated: fx.Node
    latents: fx.Node
    k_rotated: fx.Node
    k_up: fx.Node
    v_up: fx.Node


def _find(attention: fx.Node) -> _Found | str:
    """Return the calls around an attention over latents, or the reason why they are not as the pass needs them."""
    call = named_arguments(attention)
    if call["mask"] != CAUSAL.name or any(
        call[name] is not None for name in ("sinks", "ancestors", "slopes", "soft_cap")
    ):
        return f"its mask is {call['mask']}, or it has sinks, slopes or a soft cap"
    if held_type(call["kv"]).dtype != tensor_type(call["q"]).dtype:
        return "the cache rounds latents, and the step's own latents are rounded too"
    readers = list(attention.users)
    if len(readers) != 1 or not is_call(readers[0], ops.head_linear.overload):
        return "its result is not read by one matmul of each head"
    joined, written = call["q"], call["kv"]
    if not is_call(joined, ops.concat.overload) or not is_call(joined.args[0], ops.head_linear.overload):
        return f"q is {described(joined)}, and no matmul of each head joined to a rotated part"
    if not is_call(written, ops.kv_append.overload) or not is_call(named_arguments(written)["k"], ops.concat.overload):
        return f"the cache is {described(written)}, and no write of latents joined to rotated keys"
    by_head, q_rotated = joined.args
    latents, k_rotated = named_arguments(written)["k"].args
    turned = by_head.args[1]
    k_up = _stored(turned.args[0]) if is_call(turned, _PERMUTE) else None
    v_up = _stored(readers[0].args[1])
    if k_up is None or v_up is None:
        return "the matrices of keys and values are no views of weights"
    return _Found(attention, readers[0], by_head, q_rotated, latents, k_rotated, k_up, v_up)


def _stored(view: Any) -> fx.Node | None:
    """Return the weight [heads * size, rank] that `view` [heads, size, rank] is a view of; None if there is none."""
    if not is_call(view, _VIEW) or view.args[0].op != "placeholder":
        return None
    weight: fx.Node = view.args[0]
    return weight if len(tensor_type(weight).shape) == 2 else None


def _expand(rewriter: Rewriter, found: _Found) -> list[fx.Node]:
    """Add the calls that replace an attention over latents, before its matmul of each head. Return them in order.

    The last one is the result.
    """
    call, before = named_arguments(found.attention), found.result
    made: list[fx.Node] = []

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made.append(rewriter.call(target, *args, before=before, origin=found.attention.meta.get("origin"), **kwargs))
        return made[-1]

    heads, rank = tensor_type(found.by_head).shape[1], tensor_type(found.latents).shape[2]
    latents = add(_VIEW, found.latents, [-1, rank])

    def by_heads(weight: fx.Node) -> fx.Node:
        rows = tensor_type(weight).shape[0]
        assert isinstance(rows, int) and isinstance(heads, int)
        return add(_VIEW, add(ops.linear, latents, weight), [-1, heads, rows // heads])

    k, v = by_heads(found.k_up), by_heads(found.v_up)
    lens = [call[name] for name in ("q_starts", "q_lens")]
    args = [call[name] for name in ("q", "kv", "page_table")]
    options = {"scale": call["scale"], "value_width": call["value_width"], **CacheScales.of(call).options()}
    part = add(ops.partial_attention, *args, *lens, call["kv_lens"], mask="bidirectional", cached=True, **options)
    mixed, lse = add(operator.getitem, part, 0), add(operator.getitem, part, 1)
    earlier = add(ops.head_linear, mixed, found.result.args[1])
    q = (found.by_head.args[0], found.q_rotated)
    add(ops.step_latent_attention, *q, k, found.k_rotated, v, *lens, earlier, lse, scale=call["scale"])
    return made
