"""normalize: removes views that change nothing."""

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ingot.ir.artifact.record import Numerics
from ingot.ir.program import VIEWS
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter


@dataclass(frozen=True)
class Normalize(Pass):
    """Removes views that change neither shape nor strides. Calls then read the viewed value."""

    name: ClassVar[str] = "normalize"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        for node in list(rewriter.program.calls()):
            if node.target not in VIEWS or node.target is operator.getitem:
                continue
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if source.meta["type"] == node.meta["type"] and rewriter.take(node):
                rewriter.replace(node, source)
