"""Find where the model itself exceeds the range of its dtype, which no rewrite causes."""

from ingot.debug.bisect.case import Case
from ingot.debug.bisect.programs.schedule import Request, whole
from ingot.debug.bisect.verdict import Kind, Verdict
from ingot.ir.numerics.divergence import first_nonfinite


def blame_overflow(case: Case) -> Verdict | None:
    """Return a verdict on the first tensor that overflows in a traced program; None if there is none.

    Such a tensor has infinities or NaN in its own dtype, but is finite in float64.
    """
    for chain in {chain.entry: chain for chain in case.chains}.values():
        program = chain.links[0].program
        requests = [Request(tuple(prompt), len(prompt)) for prompt in case.prompts()]
        (step,) = whole(requests, (1, 1))
        case.runs += 2
        found = first_nonfinite(program, case.params(program), [step.of(program.input_types())])
        if found is not None:
            return Verdict(
                Kind.OVERFLOW,
                blamed=found.origin or found.node,
                entry=chain.entry,
                node=found.node,
                op=found.op,
                tensor=found.node,
                layer=found.layer,
                origin=found.origin,
                found=f"{found}; {found.count} elements are lost",
            )
    return None
