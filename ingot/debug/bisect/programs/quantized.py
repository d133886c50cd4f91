"""What a lossy pass owes all the same: weights within half a step of their format, and nothing lost but that."""

from collections.abc import Sequence

from ingot.debug.bisect.programs.compare import differs
from ingot.debug.bisect.programs.observe import Tensors, observe
from ingot.debug.bisect.programs.params import Params
from ingot.debug.bisect.programs.schedule import Step, is_cached
from ingot.ir import ops
from ingot.ir.numerics.quantized_weights import weight_breaches, with_rounded_weights
from ingot.ir.program import Program


def wrong_weight(params: Params, before: Program, after: Program) -> tuple[str, str] | None:
    """The first quantized weight that is farther from its original than its format allows, and how; None for none."""
    found = weight_breaches(before, after, params(before), params(after))
    return (found[0].param, found[0].breach.text) if found else None


def rounded(params: Params, before: Program, after: Program) -> tuple[Program, list[Tensors]]:
    """`before` over the weights as `after` stores them: in float64 both mean the same."""
    program, values = with_rounded_weights(before, after, params(before), params(after))
    return program, list(values)


def broken_quantization(params: Params, before: Program, after: Program, steps: Sequence[Step]) -> str | None:
    """How a lossy pass lost more than its formats do, in words; None when it did not. Of a pass that quantizes no
    linear, or of a program that has caches already, nothing can be asked. `steps` is one, of all tokens."""
    if is_cached(before) or not any(True for _ in after.calls(ops.quant_linear.overload)):
        return None
    if wrong := wrong_weight(params, before, after):
        return f"{wrong[0]}: {wrong[1]}"
    sides = rounded(params, before, after), (after, params(after))
    (old,), (new,) = (observe(program, given, steps, 1, exact=True) for program, given in sides)
    for name, value in old.outputs.items():
        if problem := differs(new.outputs[name], value):
            return f"in float64 {name}, beyond what rounding the weights explains: {problem}"
    return None
