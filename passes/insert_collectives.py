"""insert-collectives: replaces each `redistribute` by a collective."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.ops import OPS
from ingot.ir.ops.collectives import collective_of
from ingot.ir.program import is_call, named_arguments, tensor_type
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter


@dataclass(frozen=True)
class InsertCollectives(Pass):
    """Replaces each `redistribute` call by all_reduce, all_gather, reduce_scatter or take_part.

    `redistribute` changes how a value is distributed over ranks. take_part sends nothing: each rank has the whole value
    and takes its part. A value that was cast to a wider dtype, such as logits, is gathered before the cast, to send
    fewer bytes.
    """

    name: ClassVar[str] = "insert-collectives"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        for node in list(rewriter.program.calls(ops.redistribute.overload)):
            if not rewriter.take(node):
                break
            bound: dict[str, Any] = named_arguments(node)
            name = collective_of(bound["src"], bound["dst"])
            assert name is not None  # the shape function rejects other moves
            attrs = {} if name == "all_reduce" else {"dim": bound["dim"], "parts": bound["parts"]}
            x, widened = bound["x"], None
            if name == "all_gather" and _only_widens(x):
                x, widened = x.args[0], tensor_type(x).dtype
            moved = rewriter.call(OPS[name], x, before=node, axis=bound["axis"], **attrs)
            if widened is not None:
                moved = rewriter.call(ops.cast, moved, before=node, dtype=widened)
            rewriter.replace(node, moved)


def _only_widens(x: fx.Node) -> bool:
    """Return whether `x` is a cast to a wider dtype, and only one call reads it."""
    if not is_call(x, ops.cast.overload) or len(x.users) != 1:
        return False
    source = x.args[0]
    assert isinstance(source, fx.Node)
    given, made = tensor_type(source), tensor_type(x)
    return made != given and made.holds(given)
