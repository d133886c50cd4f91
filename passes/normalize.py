"""normalize: one form for one meaning. Equal calls become one, views that change nothing go, unused calls go."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ingot.ir.record import Numerics
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter


@dataclass(frozen=True)
class Normalize(Pass):
    name: ClassVar[str] = "normalize"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        seen: dict[Any, fx.Node] = {}
        for node in list(rewriter.program.calls()):
            if node.target == torch.ops.aten.view.default:
                source = node.args[0]
                assert isinstance(source, fx.Node)
                if source.meta["type"] == node.meta["type"]:
                    rewriter.replace(node, source)
                    rewriter.matched()
                    continue
            key = (node.target, _hashable(node.args), _hashable(node.kwargs))
            if key in seen:
                rewriter.replace(node, seen[key])
                rewriter.matched()
            else:
                seen[key] = node


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    return type(value), value  # 1, 1.0 and True are equal but not the same argument
