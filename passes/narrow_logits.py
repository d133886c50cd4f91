"""narrow-logits: where logits are only cast to a wider dtype, what follows the cast reads what is in front of it."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import No, alternatives
from ingot.ir.program import is_call, tensor_type
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter

# Ops of endings that compute in float32 whatever they are given.
_READERS = (ops.sample, ops.top_logprobs, ops.fill_block)


@dataclass(frozen=True)
class NarrowLogits(Pass):
    """The output `logits` becomes what its `cast` reads, and so does the argument of `sample`, `top_logprobs` and
    `fill_block`, which compute in float32 whatever they are given.

    A region that ends in the cast gives wide logits for nothing: it rounds once. A cast that is a call of its own
    writes all logits of a step once more, and doubles what is read of them; only such a one goes. So this pass runs
    when regions are formed, by bucket class.
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
    """Why the cast has to stay, whatever reads it."""
    given, made = tensor_type(source), tensor_type(cast)
    if not made.holds(given):
        return f"it does not only widen what it reads: {given}"
    if source.op == "placeholder" or source in outputs:
        return "what it reads is no value of the program's own that could be returned"
    return None


def _refusal(rewriter: Rewriter, reader: fx.Node, cast: fx.Node, source: fx.Node, context: PassContext) -> str | None:
    """Why the backend of a call that reads the cast does not take what the cast reads; None when it does."""
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
