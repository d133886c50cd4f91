"""fuse-append-attention: fuses q/k norm, rope, cache write and attention, if a backend has a kernel for it."""

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import call_compilers
from ingot.ir.ops.attention import stated_options
from ingot.ir.program import is_call, named_arguments
from ingot.passes.base import Pass, PassContext
from ingot.passes.fuse_qk_norm_rope import attentions_over, rotated_append, why_no_kernel
from ingot.passes.rewrite import Rewriter, described, trimmed


@dataclass(frozen=True)
class FuseAppendAttention(Pass):
    """Fuses a layer's cache write and attention into the op `append_attention`, if a backend has a kernel for it.

    Backends decide it for each bucket class (a range of step sizes), because the gain depends on the tokens per step.
    The backend must compile single calls. `force` fuses in any case.
    """

    name: ClassVar[str] = "fuse-append-attention"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    force: bool = False

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        writes = (ops.kv_append.overload, ops.qk_norm_rope_append.overload)
        for write in [node for node in rewriter.program.calls() if node.target in writes]:
            found = _from_parts(write) if is_call(write, ops.kv_append.overload) else _from_fused(write)
            if not isinstance(found, str) and "tree" in found.attention.kwargs.values():
                found = "the tokens of a tree are not stored in the cache in position order"
            if isinstance(found, str):
                rewriter.refuse(write, found)
                continue
            fused = _fuse(rewriter, found)
            makers = call_compilers(context.backends)
            no_kernel = "" if self.force else why_no_kernel(fused, makers, context)
            if no_kernel:
                rewriter.refuse(write, f"no backend has a kernel for append_attention: {no_kernel}")
            if no_kernel or not rewriter.take(write, fused):
                rewriter.program.graph.erase_node(fused)
                continue
            _replace(rewriter, found, fused)


@dataclass(frozen=True)
class _Found:
    """A cache write and an attention that can be fused.

    append      arguments of the op `qk_norm_rope_append`, by name
    attention   the attention call
    cache       the written cache, which the attention reads; removed by the fusion
    dead        further nodes that the fusion removes. Each node comes before the nodes that it reads.
    """

    append: dict[str, Any]
    attention: fx.Node
    cache: fx.Node
    dead: tuple[fx.Node, ...] = ()


def _from_parts(write: fx.Node) -> _Found | str:
    """Find the attention, and the rope of q and k, to fuse with the `kv_append` call `write`.

    Return what can be fused, or the reason why nothing can.
    """
    attentions = attentions_over(write)
    append = rotated_append(write, attentions)
    return append if isinstance(append, str) else _Found(append, attentions[0], write)


def _from_fused(write: fx.Node) -> _Found | str:
    """Find the attention to fuse with the `qk_norm_rope_append` call `write`.

    Return what can be fused, or the reason why nothing can.
    """
    results = {user.args[1]: user for user in write.users if user.target is operator.getitem}
    q, cache = results.get(0), results.get(1)
    if q is None or cache is None or len(results) < len(write.users):
        return "its results are not read one by one"
    attentions = attentions_over(cache)
    if not attentions:
        return "no attention reads the cache after this write"
    attention = attentions[0]
    if list(q.users) != [attention] or attention.args[0] is not q:
        return f"that attention is not the only reader of the rotated q, and reads {described(attention.args[0])}"
    early = [user.name for user in cache.users if user.op == "call_function" and user < attention]
    if early:
        return f"the cache is read before attention too, by %{early[0]}"
    append = named_arguments(write)
    return _Found(append, attention, cache, dead=(q, write))


def _fuse(rewriter: Rewriter, found: _Found) -> fx.Node:
    append = found.append
    attention = named_arguments(found.attention)
    from_append = ("kv", "q", "k", "v", "positions", "table", "slots")
    from_attention = ("page_table", "q_starts", "q_lens", "kv_lens")
    args = [append[name] for name in from_append] + [attention[name] for name in from_attention]
    args += [append["q_weight"], append["k_weight"]]
    args += [attention[name] for name in ("sinks", "sharing", "slopes")]
    options: dict[str, Any] = {name: True for name in ("interleaved", "norm_last") if append[name]}
    options |= stated_options(attention)
    return rewriter.call(
        ops.append_attention,
        *trimmed(args),
        before=found.attention,
        eps=append["eps"],
        scale=attention["scale"],
        **options,
    )


def _replace(rewriter: Rewriter, found: _Found, fused: fx.Node) -> None:
    attended = rewriter.call(operator.getitem, fused, 0, before=found.attention)
    written = rewriter.call(operator.getitem, fused, 1, before=found.attention)
    rewriter.replace(found.attention, attended)
    rewriter.replace(found.cache, written)
    for node in found.dead:  # dce never removes a state write
        rewriter.program.graph.erase_node(node)
