"""cse: common-subexpression elimination. Merges equal calls, and params with equal specs."""

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
    """Replaces equal calls by the first of them, and params with equal specs by one param.

    Calls that read or write states, such as KV caches, are merged only if that changes nothing. Each write to a state
    returns a new version. So a read before a write and a read after it have different arguments, and are not equal.
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
    """Return a key of a param or call. Two with equal keys can be merged.

    The key is None for a call that must not be merged.
    """
    if node.op == "placeholder":
        spec = program.params[str(node.target)]
        return spec
    if not effect_of(node, program).joinable:
        return None
    return node.target, tuple((name, _frozen(value)) for name, value in named_arguments(node).items())


def _frozen(value: Any) -> Hashable:
    """Return an argument as a hashable key.

    Values that Python treats as equal have different keys: 1, 1.0 and True, or 0.0 and -0.0.
    """
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return type(value), value.hex() if isinstance(value, float) else value
