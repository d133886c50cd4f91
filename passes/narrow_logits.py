"""narrow-logits: removes a cast that only widens the logits; its users read the narrow logits."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import No, alternatives
from ingot.ir.program import is_call, tensor_type
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter

# Ops of endings that compute in float32 for any input dtype.
_READERS = (ops.sample, ops.top_logprobs, ops.fill_block)


@dataclass(frozen=True)
class NarrowLogits(Pass):
    """Removes a cast of the logits to a wider dtype. Calls such as `sample` then read the narrow logits.

    These calls compute in float32 for any input dtype. Without the cast, the logits are not written twice, and half as
    many bytes are read. A cast inside a region (calls compiled together) costs nothing and stays. So this pass runs
    after regions are formed.
    """

    name: ClassVar[str] = "narrow-logits"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        cast = program.output_nodes().get("logits")
        if cast is None or not is_call(cast, ops.cast.overload):
            return
        source = cast.args[0]
        assert isinstance(source, fx.Node)
        if reason := _pinned(cast, source, list(program.output_nodes().values())):
            rewriter.refuse(cast, reason)
            return
        readers = [user for user in cast.users if user.op == "call_function"]
        for reader in readers:
            if reason := _refusal(rewriter, reader, cast, source, context):
                rewriter.refuse(cast, reason)
                return
        if rewriter.take(cast):
            rewriter.replace(cast, source)


def _pinned(cast: fx.Node, source: fx.Node, outputs: list[fx.Node]) -> str | None:
    """Return why the cast of the logits must stay, whichever calls read it; None if it may be removed.

    `source` is the value that is cast, and `outputs` are the program's outputs.
    """
    given, made = tensor_type(source), tensor_type(cast)
    if not made.holds(given):
        return f"it does not only widen its operand, {given}"
    if source.op == "placeholder" or source in outputs:
        return "its operand is a placeholder or already an output, so it cannot be returned as the logits"
    return None


def _refusal(rewriter: Rewriter, reader: fx.Node, cast: fx.Node, source: fx.Node, context: PassContext) -> str | None:
    """Return why the call `reader` cannot read `source`, the value before the cast; None if it can.

    It can if its backend accepts the dtype of `source`.
    """
    if not any(is_call(reader, op.overload) for op in _READERS):
        return f"%{reader.name} reads it too"
    name = reader.meta["backend"]
    (backend,) = (one for one in context.backends if one.name == name)
    args = [source if argument is cast else argument for argument in reader.args]
    attributes: dict[str, Any] = dict(reader.kwargs)
    tried = rewriter.call(reader.target, *args, before=reader, **attributes)
    answer = backend.claim([tried], context.target, context.any_bucket())
    rewriter.program.graph.erase_node(tried)
    if any(context.counts(yes) for yes in alternatives(answer)):
        return None
    return f"%{reader.name}: {name}: {answer.reason if isinstance(answer, No) else 'not batch-invariant'}"
