"""The check that a GPU has instructions for the activations that a quantized matmul rounds."""

from collections.abc import Sequence

from torch import fx

from ingot.ir.backend import No
from ingot.ir.machine.gpus import FEATURES
from ingot.ir.machine.target import Target
from ingot.ir.weights import formats_of_call

# The GPU feature that converts to an element type. Without it, each conversion is a call of torch.
_NEEDS = {"f8e4m3": "fp8"}


def unrounded(nodes: Sequence[fx.Node], target: Target) -> No | None:
    """Return None if the target's instructions round the activations of all quantized matmuls among `nodes`.

    Otherwise return a refusal (No) that names the GPUs that have them. A CPU has them all.
    """
    for node in nodes:
        if target.device != "cuda":
            continue
        for rule in (format.activations for format in formats_of_call(node)):
            needed = None if rule is None else _NEEDS.get(rule.element)
            if rule is not None and needed is not None and needed not in target.features:
                return No(f"rounding activations to {rule.element} needs {FEATURES[needed].needs}")
    return None
