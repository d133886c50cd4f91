"""insert-collectives: what is owed between ranks becomes the collective that pays it."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ingot.ir import ops
from ingot.ir.ops import OPS
from ingot.ir.ops.collectives import collective_of
from ingot.ir.record import Numerics
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter


@dataclass(frozen=True)
class InsertCollectives(Pass):
    """Each `redistribute` becomes an all_reduce, all_gather, reduce_scatter or, where nothing is sent, take_part."""

    name: ClassVar[str] = "insert-collectives"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        for node in list(rewriter.program.calls(ops.redistribute.overload)):
            if not rewriter.take(node):
                break
            bound: dict[str, Any] = ops.redistribute.bind(node.args, node.kwargs)
            name = collective_of(bound["src"], bound["dst"])
            assert name is not None  # the shape function refuses others
            attrs = {} if name == "all_reduce" else {"dim": bound["dim"], "parts": bound["parts"]}
            rewriter.replace(node, rewriter.call(OPS[name], bound["x"], before=node, axis=bound["axis"], **attrs))
