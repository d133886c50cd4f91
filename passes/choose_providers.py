"""choose-providers: every call gets the backend that computes it; every refusal is kept with its reason."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ingot.ir.backend import Claim, No, Yes, alternatives
from ingot.ir.errors import PassError
from ingot.ir.layout import Layout, layouts_of
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
            claims: dict[str, float] = {}
            layouts = layouts_of(node)
            for backend in context.backends:
                answer = backend.claim([node], context.target, context.bucket)
                taking = [yes for yes in alternatives(answer) if yes.takes(layouts)]
                usable = [yes.cost for yes in taking if context.counts(yes)]
                if usable:
                    claims[backend.name] = min(usable)
                else:
                    rewriter.refuse(node, f"{backend.name}: {_reason(answer, taking, layouts)}")
            if not claims:
                raise PassError(
                    f"no backend computes {target_name(node.target)}",
                    where=f"%{node.name}, {node.meta.get('origin', '')}",
                    expected=f"one of {', '.join(backend.name for backend in context.backends)}",
                )
            node.meta["candidates"] = claims
            if rewriter.take(node):
                node.meta["provider"] = min(claims, key=lambda name: claims[name])


def _reason(answer: Claim, taking: list[Yes], layouts: Mapping[str, Layout]) -> str:
    if isinstance(answer, No):
        return answer.reason
    if taking:
        return "not batch-invariant"
    wanted = sorted({f"{name} {layout.value}" for yes in alternatives(answer) for name, layout in yes.layouts.items()})
    lie = ", ".join(f"{name} {layout.value}" for name, layout in sorted(layouts.items()))
    return f"it wants {', '.join(wanted)}, and finds {lie}"
