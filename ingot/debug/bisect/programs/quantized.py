"""Check a pass that quantizes weights: each weight is within half a quantization step, and nothing else is lost."""

from collections.abc import Sequence

from ingot.debug.bisect.programs.compare import differs
from ingot.debug.bisect.programs.observe import Tensors, observe
from ingot.debug.bisect.programs.params import Params
from ingot.debug.bisect.programs.schedule import Step, is_cached
from ingot.ir.numerics.quantized_weights import (
    has_quantized_weights,
    weight_breaches,
    with_originals,
    with_rounded_weights,
)
from ingot.ir.program import Program


def wrong_weight(params: Params, before: Program, after: Program) -> tuple[str, str] | None:
    """Check the weights that a pass quantized. Return the first wrong weight as a pair: its name and a description.

    A weight is wrong if its error is larger than its storage format explains. Return None if there is none. `before`
    and `after` are the programs before and after the pass.
    """
    found = weight_breaches(before, after, params(before), params(with_originals(after)))
    return (found[0].param, found[0].breach.text) if found else None


def rounded(params: Params, before: Program, after: Program) -> tuple[Program, list[Tensors]]:
    """Return the program before a quantizing pass, with params that are rounded like the quantized weights.

    In float64, this program and the program `after` the pass then compute the same. The second result has a mapping of
    params for each rank.
    """
    program, values = with_rounded_weights(before, after, params(before), params(after))
    return program, list(values)


def broken_quantization(params: Params, before: Program, after: Program, steps: Sequence[Step]) -> str | None:
    """Check the accuracy of a lossy pass. Return what is wrong, in words.

    Return None if the storage formats of the weights explain all errors of its program `after`. `steps` is a list of
    one step with all tokens. A pass that quantizes no weight is not checked, nor a pass over a program with caches.
    """
    if is_cached(before) or not has_quantized_weights(after):
        return None
    if wrong := wrong_weight(params, before, after):
        return f"{wrong[0]}: {wrong[1]}"
    sides = rounded(params, before, after), (after, params(after))
    (old,), (new,) = (observe(program, given, steps, 1, exact=True) for program, given in sides)
    for name, value in old.outputs.items():
        if problem := differs(new.outputs[name], value):
            return f"in float64 {name}, beyond what rounding the weights explains: {problem}"
    return None
