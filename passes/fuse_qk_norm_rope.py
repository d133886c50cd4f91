"""fuse-qk-norm-rope: q/k norm, rotary embedding and cache write become one op, where a provider has a kernel for it."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ingot.ir import ops
from ingot.ir.backend import Backend, No, alternatives
from ingot.ir.cache_dtype import CacheScales
from ingot.ir.program import is_call, tensor_type
from ingot.ir.record import Numerics
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter, described


@dataclass(frozen=True)
class FuseQKNormRope(Pass):
    """Fusing takes the three out of the region around them, which pays only with a kernel that beats the region.

    So it waits for a provider other than the references that claims the fused op; `force` fuses all the same.
    """

    name: ClassVar[str] = "fuse-qk-norm-rope"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    force: bool = False

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        for append in list(rewriter.program.calls(ops.kv_append.overload)):
            attentions = [user for user in append.users if is_call(user, ops.paged_attention.overload)]
            found = rotated_append(append, attentions)
            if isinstance(found, str):
                rewriter.refuse(append, found)
                continue
            fused = _fuse(rewriter, append, attentions[0], found)
            kernels = [backend for backend in context.backends if backend.emits_library or backend.compiles_calls]
            no_kernel = "" if self.force else why_no_kernel(fused, kernels, context)
            if no_kernel:
                rewriter.program.graph.erase_node(fused)
                rewriter.refuse(append, f"no provider has a kernel for qk_norm_rope_append: {no_kernel}")
                continue
            if not rewriter.take(append, fused):
                rewriter.program.graph.erase_node(fused)
                continue
            _replace(rewriter, append, attentions[0], fused)


def rotated_append(append: fx.Node, attentions: list[fx.Node]) -> dict[str, Any] | str:
    """Arguments of `qk_norm_rope_append` by name for a `kv_append` that these attentions read, or why it is none."""
    if len(attentions) != 1:
        return f"{len(attentions)} attentions read the cache after this write"
    if any(user.op == "call_function" and user < attentions[0] for user in append.users):
        early = [user.name for user in append.users if user.op == "call_function" and user < attentions[0]]
        return f"the cache is read before attention too, by %{early[0]}"
    written = ops.kv_append.bind(append.args, append.kwargs)
    if written["v"] is None or tensor_type(written["v"]).shape != tensor_type(written["k"]).shape:
        return "keys and values are not of one width: the fused op writes caches of equal widths"
    turned = {"q": attentions[0].args[0], "k": written["k"]}
    bound: dict[str, dict[str, Any]] = {}
    for name, node in turned.items():
        if not is_call(node, ops.rope.overload):
            return f"{name} is not rotated: it is {described(node)}"
        if len(node.users) > 1:
            return f"the rotated {name} is used elsewhere too: {len(node.users)} times in all"
        bound[name] = ops.rope.bind(node.args, node.kwargs)
    for part in ("positions", "table", "interleaved"):
        if (one := bound["q"][part]) != (other := bound["k"][part]):
            return f"q and k are rotated differently: {part} is {described(one)} and {described(other)}"
    norms = [bound[name]["x"] for name in turned]
    normed = [is_call(node, ops.rms_norm.overload) and len(node.users) == 1 for node in norms]
    names = ("kv", "v", "slots", "k_scale", "v_scale")
    result = {**{name: written[name] for name in names}, **bound["q"]}
    del result["x"]
    if not all(normed):
        return {**result, "q": norms[0], "k": norms[1], "q_weight": None, "k_weight": None, "eps": 0.0}
    inner = [ops.rms_norm.bind(node.args, node.kwargs) for node in norms]
    if inner[0]["eps"] != inner[1]["eps"]:
        return f"the norms of q and k differ in eps: {inner[0]['eps']} and {inner[1]['eps']}"
    weights = {"q_weight": inner[0]["weight"], "k_weight": inner[1]["weight"], "eps": inner[0]["eps"]}
    return {**result, "q": inner[0]["x"], "k": inner[1]["x"], **weights}


def _fuse(rewriter: Rewriter, append: fx.Node, attention: fx.Node, found: dict[str, Any]) -> fx.Node:
    names = ("kv", "q", "k", "v", "positions", "table", "slots")
    args = [found[name] for name in names]
    if found["q_weight"] is not None:
        args += [found["q_weight"], found["k_weight"]]
    order: dict[str, Any] = {"interleaved": True} if found["interleaved"] else {}
    order |= CacheScales.of(found).options()
    # In front of attention: q may be made only after the cache was written.
    return rewriter.call(ops.qk_norm_rope_append, *args, before=attention, eps=found["eps"], **order)


def why_no_kernel(fused: fx.Node, backends: Sequence[Backend], context: PassContext) -> str:
    """What each of `backends` says against a fused call; "" when one of them takes it."""
    refusals = []
    for backend in backends:
        answer = backend.claim([fused], context.target, context.any_bucket())
        if any(context.counts(yes) for yes in alternatives(answer)):
            return ""
        refusals.append(f"{backend.name}: {answer.reason if isinstance(answer, No) else 'not batch-invariant'}")
    return "; ".join(refusals) or f"none of {', '.join(backend.name for backend in context.backends)} has kernels"


def _replace(rewriter: Rewriter, append: fx.Node, attention: fx.Node, fused: fx.Node) -> None:
    turned = attention.args[0]
    assert isinstance(turned, fx.Node)
    query = rewriter.call(operator.getitem, fused, 0, before=attention)
    cache = rewriter.call(operator.getitem, fused, 1, before=attention)
    turned.replace_all_uses_with(query)
    rewriter.replace(append, cache)
