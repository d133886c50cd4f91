"""cse: common-subexpression elimination. Equal calls become one, and so do params with one recipe."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ingot.ir.artifact.record import Numerics
from ingot.ir.program import Program, named_arguments
from ingot.passes.base import Pass, PassContext
from ingot.passes.effects import effect_of
from ingot.passes.rewrite import Rewriter


@dataclass(frozen=True)
class EliminateCommonSubexpressions(Pass):
    """Of equal calls the first stands for all, if their effect allows it.

    A version of a state is a value like any other, so reads on two sides of a write are not equal.
    """

    name: ClassVar[str] = "cse"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        first: dict[Hashable, fx.Node] = {}
        for node in [*program.placeholders("param"), *program.calls()]:
            key = _key(node, program)
            if key is None or first.setdefault(key, node) is node or not rewriter.take(node):
                continue
            rewriter.replace(node, first[key])
            if node.op == "placeholder":
                del program.params[str(node.target)]


def _key(node: fx.Node, program: Program) -> Hashable:
    """Equal for two nodes where one can stand for both; None where no other node can."""
    if node.op == "placeholder":
        spec = program.params[str(node.target)]
        return spec
    if not effect_of(node, program).joinable:
        return None
    return node.target, tuple((name, _frozen(value)) for name, value in named_arguments(node).items())


def _frozen(value: Any) -> Hashable:
    """An argument as a key: 1, 1.0 and True are equal but not the same argument, nor are 0.0 and -0.0."""
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return type(value), value.hex() if isinstance(value, float) else value
