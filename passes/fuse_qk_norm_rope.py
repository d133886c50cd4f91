"""fuse-qk-norm-rope: fuses q/k norm, rotary embedding and cache write, if a backend has a kernel for it."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import Backend, No, alternatives, has_call_kernels
from ingot.ir.cache.dtype import SCALE_DEFAULTS, CacheScales
from ingot.ir.program import is_call, named_arguments, tensor_type
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter, described


@dataclass(frozen=True)
class FuseQKNormRope(Pass):
    """Fuses q/k norm, rope and cache write into the op `qk_norm_rope_append`, if a backend has a kernel for it.

    Without such a kernel, these calls are faster in a region, compiled with the calls around them. `force` fuses in any
    case.
    """

    name: ClassVar[str] = "fuse-qk-norm-rope"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    force: bool = False

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        for append in list(rewriter.program.calls(ops.kv_append.overload)):
            attentions = attentions_over(append)
            found = rotated_append(append, attentions)
            if isinstance(found, str):
                rewriter.refuse(append, found)
                continue
            fused = _fuse(rewriter, append, attentions[0], found)
            kernels = [one for one in context.backends if has_call_kernels(one)]
            no_kernel = "" if self.force else why_no_kernel(fused, kernels, context)
            if no_kernel:
                rewriter.program.graph.erase_node(fused)
                rewriter.refuse(append, f"no backend has a kernel for qk_norm_rope_append: {no_kernel}")
                continue
            if not rewriter.take(append, fused):
                rewriter.program.graph.erase_node(fused)
                continue
            _replace(rewriter, append, attentions[0], fused)


def attentions_over(cache: fx.Node) -> list[fx.Node]:
    """Return the attention calls that read `cache`, one version of a KV cache, in program order.

    If several layers share the cache, the attention of the layer that writes it comes first.
    """
    return sorted(user for user in cache.users if is_call(user, ops.paged_attention.overload))


def rotated_append(append: fx.Node, attentions: list[fx.Node]) -> dict[str, Any] | str:
    """Find the rope and norm calls of q and k to fuse with the `kv_append` call `append`.

    Return the arguments of the fused op `qk_norm_rope_append` by name, or the reason why fusing is impossible.
    `attentions` are the calls that read the cache. The q of the first one is rotated by the fused op.
    """
    if not attentions:
        return "no attention reads the cache after this write"
    if any(user.op == "call_function" and user < attentions[0] for user in append.users):
        early = [user.name for user in append.users if user.op == "call_function" and user < attentions[0]]
        return f"the cache is read before attention too, by %{early[0]}"
    written = named_arguments(append)
    if written["v"] is None:
        return "values are the first numbers of keys: the fused op writes keys and values of equal width"
    if tensor_type(written["v"]).shape != tensor_type(written["k"]).shape:
        return "keys and values differ in width: the fused op writes caches of equal widths"
    q, k = _rotation("q", attentions[0].args[0]), _rotation("k", written["k"])
    if isinstance(q, str) or isinstance(k, str):
        return q if isinstance(q, str) else str(k)
    for part in ("positions", "table", "interleaved"):
        if (one := q.rope[part]) != (other := k.rope[part]):
            return f"q and k are rotated differently: {part} is {described(one)} and {described(other)}"
    if q.norm_last != k.norm_last:
        return f"{'q' if q.norm_last else 'k'} alone is normed after its rotation"
    names = ("kv", "v", "slots", *SCALE_DEFAULTS)
    result = {**{name: written[name] for name in names}, **q.rope, "norm_last": q.norm_last}
    del result["x"]
    if q.norm is None or k.norm is None:
        return {**result, "q": q.rope["x"], "k": k.rope["x"], "q_weight": None, "k_weight": None, "eps": 0.0}
    if q.norm["eps"] != k.norm["eps"]:
        return f"the norms of q and k differ in eps: {q.norm['eps']} and {k.norm['eps']}"
    weights = {"q_weight": q.norm["weight"], "k_weight": k.norm["weight"], "eps": q.norm["eps"]}
    return {**result, "q": q.x, "k": k.x, **weights}


@dataclass(frozen=True)
class _Rotation:
    """The rope and norm calls of q or k.

    x           the value before norm and rope
    rope        arguments of the rope call, by name
    norm        arguments of the norm call, by name; None: there is no norm
    norm_last   whether the norm comes after the rope
    """

    x: Any
    rope: dict[str, Any]
    norm: dict[str, Any] | None = None
    norm_last: bool = False


def _rotation(name: str, node: Any) -> _Rotation | str:
    """Find the rope call, and the norm call if there is one, that compute `node`, the final q or k.

    Return them, or the reason why they cannot be fused. `name` is "q" or "k", for the reason.
    """
    turn, last = node, None
    if is_call(node, ops.rms_norm.overload):
        last = named_arguments(node)
        turn = last["x"]
    if not is_call(turn, ops.rope.overload):
        return f"{name} is not rotated: it is {described(node)}"
    uses = max(len(node.users), len(turn.users))
    if uses > 1:
        return f"the rotated {name} has other uses: {uses} in all"
    rope = named_arguments(turn)
    x = rope["x"]
    if last is not None:
        return _Rotation(x, rope, last, norm_last=True)
    if not is_call(x, ops.rms_norm.overload) or len(x.users) > 1:
        return _Rotation(x, rope)
    norm = named_arguments(x)
    return _Rotation(norm["x"], rope, norm)


def _fuse(rewriter: Rewriter, append: fx.Node, attention: fx.Node, found: dict[str, Any]) -> fx.Node:
    names = ("kv", "q", "k", "v", "positions", "table", "slots")
    args = [found[name] for name in names]
    if found["q_weight"] is not None:
        args += [found["q_weight"], found["k_weight"]]
    order: dict[str, Any] = {name: True for name in ("interleaved", "norm_last") if found[name]}
    order |= CacheScales.of(found).options()
    # Before attention: q may be computed only after the cache write.
    return rewriter.call(ops.qk_norm_rope_append, *args, before=attention, eps=found["eps"], **order)


def why_no_kernel(fused: fx.Node, backends: Sequence[Backend], context: PassContext) -> str:
    """Return why none of `backends` can compute the fused call; "" if one of them can."""
    refusals = []
    for backend in backends:
        answer = backend.claim([fused], context.target, context.any_bucket())
        if any(context.counts(yes) for yes in alternatives(answer)):
            return ""
        refusals.append(f"{backend.name}: {answer.reason if isinstance(answer, No) else 'not batch-invariant'}")
    return "; ".join(refusals) or f"none of {', '.join(backend.name for backend in context.backends)} has kernels"


def _replace(rewriter: Rewriter, append: fx.Node, attention: fx.Node, fused: fx.Node) -> None:
    rotated = attention.args[0]
    assert isinstance(rotated, fx.Node)
    query = rewriter.call(operator.getitem, fused, 0, before=attention)
    cache = rewriter.call(operator.getitem, fused, 1, before=attention)
    rotated.replace_all_uses_with(query)
    rewriter.replace(append, cache)
