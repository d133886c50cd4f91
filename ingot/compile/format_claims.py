"""The check that a target runs the formats of a compile's quantized weights."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from ingot.backends.table import claim_cost
from ingot.compile.competing import competing
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir import build, ops
from ingot.ir.artifact.plan import BucketClass, owed_features
from ingot.ir.backend import Backend
from ingot.ir.errors import IngotError, TargetError
from ingot.ir.formats import ELEMENTS, FORMATS, PARTS, Format, find_format
from ingot.ir.machine.gpus import TYPICAL
from ingot.ir.machine.target import Target
from ingot.ir.program import Program, Stage
from ingot.ir.recipe import Recipe
from ingot.ir.types import TensorType
from ingot.passes.adopt_quantized import AdoptQuantized
from ingot.passes.base import Pass, PassContext
from ingot.passes.choose_backends import claims_of
from ingot.passes.quantize import Quantize

# The tokens of the sample call, and the least sizes of its weight.
_TOKENS, _SIZE = 16, 512


def check_formats(
    passes: Collection[Pass],
    checkpoint: Checkpoint,
    target: Target,
    backends: Sequence[Backend],
    *,
    deterministic: bool,
) -> None:
    """Raise TargetError if no backend runs a format of the weights that a compile of these passes has.

    The error names the targets that run it, and the nearest format that runs on this target.
    """
    quantizes = [name for one in passes if isinstance(one, Quantize) for name in one.formats()]
    adopts = any(isinstance(one, AdoptQuantized) for one in passes)
    stored = sorted(formats_of(checkpoint.logical.recipes.values())) if adopts else []
    for name in (*quantizes, *stored):
        cost, reasons = _claimed(find_format(name), target, backends, deterministic=deterministic)
        if cost is not None:
            continue
        near = nearest(find_format(name), target, backends, deterministic=deterministic)
        if name in quantizes:
            hint = f"the nearest format that runs on {target.name} is --quantize {near}"
        else:
            hint = (
                f"compile the original checkpoint with --quantize {near}, the nearest format that runs on {target.name}"
                f', or dequantize these weights: --passes "default,-{AdoptQuantized.name}"'
            )
        raise TargetError(
            f"the format '{name}' does not run on {target.name}: {'; '.join(_distinct(reasons))}",
            where="quantize" if name in quantizes else str(checkpoint.folder),
            expected=f"a target that runs it: {', '.join(targets(find_format(name), deterministic=deterministic))}",
            hint=f"{hint}; --backend reference computes it slowly",
        )


def formats_of(recipes: Iterable[Recipe]) -> set[str]:
    """Return the names of the formats in which checkpoints store the weights that `recipes` make."""
    found: set[str] = set()
    for recipe in recipes:
        if recipe.step == "dequantize":
            found.add(str(recipe.attr("format")))
        found |= formats_of(recipe.inputs)
    return found


def targets(format: Format, *, deterministic: bool) -> list[str]:
    """Return the names of the known targets on which a backend runs a format."""
    found = []
    for name in ("cpu", *TYPICAL):
        machine = Target.named(name)
        if _claimed(format, machine, _usual(machine), deterministic=deterministic)[0] is not None:
            found.append(name)
    return found


def nearest(format: Format, target: Target, backends: Sequence[Backend], *, deterministic: bool) -> str:
    """Return the name of the registered format that is most similar to `format` among those that run on the target.

    Formats that only the references compute come last. Then the bits of elements count most, then whether activations
    are rounded, then the size of groups, then the type of elements.
    """

    def distance(one: Format) -> tuple[float, ...]:
        cost, _ = _claimed(one, target, backends, deterministic=deterministic)
        slow = math.inf if cost is None else float(cost >= claim_cost("reference"))
        groups = (abs(ours - theirs) for ours, theirs in zip(_groups(one), _groups(format), strict=True))
        bits, rounds = abs(_bits(one) - _bits(format)), (one.activations is None) != (format.activations is None)
        return slow, bits, rounds, *groups, one.element != format.element

    return min((one for one in FORMATS.values() if not one.lossless), key=distance).name


def _distinct(reasons: Iterable[str]) -> Iterable[str]:
    """Return the reasons of backends with kernels for the op, each once and without the backend's name."""
    texts = (reason.partition(": ")[2] for reason in reasons)
    return dict.fromkeys(text for text in texts if not text.startswith("no kernel for ingot."))


def _usual(target: Target) -> tuple[Backend, ...]:
    """Return the backends of a target; none if this machine lacks the packages that compile for it."""
    try:
        return competing("auto", target)
    except IngotError:
        return ()


def _bits(format: Format) -> int:
    return ELEMENTS[format.element].bits if format.element in ELEMENTS else 16


def _groups(format: Format) -> Iterator[float]:
    """Yield the logarithm of the columns that share a scale, and whether rows share one."""
    level = format.levels[0] if format.levels else None
    yield math.log2(level.columns or 1 << 16) if level else 0.0
    yield float(level is not None and level.rows != 1)


def _claimed(
    format: Format, target: Target, backends: Sequence[Backend], *, deterministic: bool
) -> tuple[float | None, list[str]]:
    """Return the lowest cost of the backends that compute a matmul with a weight in `format`, and why others refuse.

    The cost is None if all refuse.
    """
    program = Program("format", Stage.FUSED, {})
    rows, columns = (math.lcm(_SIZE, format.granule(dim)) for dim in (0, 1))
    dtype = torch.bfloat16 if target.device == "cpu" or "bf16" in target.features else torch.float16
    types = format.types((rows, columns), dtype)
    x = program.add_input("x", TensorType(dtype, (_TOKENS, columns)))
    weight, scales, zeros, *others = (program.add_input(part, types[part]) if part in types else None for part in PARTS)
    node = build.call(
        program, ops.quant_linear.overload, [x, weight, scales, zeros, None, *others], {"format": format.name}
    )
    context = PassContext(
        target=target,
        max_seq_len=_TOKENS,
        max_batch=_TOKENS,
        max_tokens=_TOKENS,
        backends=tuple(backends),
        deterministic=deterministic,
        bucket=BucketClass(name="few", tokens=(1, _TOKENS), features=owed_features(deterministic=deterministic)),
    )
    claims, reasons = claims_of(node, context)
    return min((one.cost for one in claims.values()), default=None), reasons
