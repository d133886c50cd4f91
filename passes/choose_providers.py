"""choose-providers: every call gets the backend that computes it; every refusal is kept with its reason."""

import operator
from dataclasses import dataclass
from typing import ClassVar

from ingot.ir.backend import Yes
from ingot.ir.errors import PassError
from ingot.ir.program import target_name
from ingot.ir.record import Numerics
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter


@dataclass(frozen=True)
class ChooseProviders(Pass):
    """The cheapest claim wins. In deterministic mode only batch-invariant claims count."""

    name: ClassVar[str] = "choose-providers"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        assert context.bucket is not None
        for node in rewriter.program.calls():
            if node.target is operator.getitem:
                continue
            claims: dict[str, Yes] = {}
            for backend in context.backends:
                answer = backend.claim([node], context.target, context.bucket)
                if isinstance(answer, Yes) and (answer.batch_invariant or not context.deterministic):
                    claims[backend.name] = answer
                else:
                    reason = "not batch-invariant" if isinstance(answer, Yes) else answer.reason
                    rewriter.refuse(node, f"{backend.name}: {reason}")
            if not claims:
                raise PassError(
                    f"no backend computes {target_name(node.target)}",
                    where=f"%{node.name}, {node.meta.get('origin', '')}",
                    expected=f"one of {', '.join(backend.name for backend in context.backends)}",
                )
            node.meta["provider"] = min(claims, key=lambda name: claims[name].cost)
            rewriter.matched()
