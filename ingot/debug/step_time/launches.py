"""The kernel launches of a call, and how they distribute its work over the multiprocessors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError
from torch import fx

from ingot.backends.triton.launches import LAUNCHES, Launch, Launches, evaluate
from ingot.backends.triton.lower.attention.problem import DECODE_ATTENTION
from ingot.debug.step_time.programs import Contexts, Launched, Prompts, launched
from ingot.ir.artifact.manifest import EXE_FOLDER
from ingot.ir.artifact.plan import Executable, Instruction
from ingot.ir.artifact.tuning import Choice
from ingot.ir.machine.gpus import Gpu
from ingot.ir.masks import CAUSAL
from ingot.ir.ops import op_of
from ingot.ir.program import VIEWS, held_type, named_arguments, target_name
from ingot.runtime.loading.artifact import Artifact, malformed

# Tokens of an attention tile, by kernel and head size; 0 is any size that is not listed. Sources:
# lower/attention_prefill.py for two bytes an element; backends/flashinfer/kernels/fa3.cu. A size that is listed here
# has its own measured times.
_PROMPT_ROWS = {"prefill_attention": {0: 128}, "flashinfer paged_attention": {0: 128, 64: 192}}


@dataclass(frozen=True)
class Shape:
    """The shape of a step on a GPU.

    `unpadded` maps symbolic dims, such as T, to the sizes that the step needs. `padded` maps them to the sizes that
    kernels run with. `context` is the number of cached positions per sequence.
    """

    unpadded: Mapping[str, int]
    padded: Mapping[str, int]
    context: int
    gpu: Gpu


def compiled_launches(
    artifact: Artifact, target: str, executables: Sequence[Executable]
) -> dict[str, tuple[Launch, ...]]:
    """Return the kernel launches that the artifact records for its executables. Keys are ids of executables.

    Executables without such a record are left out. Raises ArtifactError for a malformed record.
    """
    found: dict[str, tuple[Launch, ...]] = {}
    for one in executables:
        if LAUNCHES in one.files:
            relpath = f"{EXE_FOLDER}{target}/{one.id}/{LAUNCHES}"
            try:
                found[one.id] = Launches.model_validate_json(artifact.read_text(relpath)).launches
            except ValidationError as error:
                raise malformed(relpath, error) from None
    return found


def launches_of(
    node: fx.Node,
    instruction: Instruction,
    shape: Shape,
    known: Mapping[str, tuple[Launch, ...]],
    chosen: Sequence[Choice],
) -> tuple[Launched, ...]:
    """Return the kernel launches of an instruction in a step. A view has none.

    `node` is the call of the instruction. `known` maps ids of executables to their recorded launches. `chosen` are the
    tile sizes of the call.
    """
    if instruction.calls in known:
        run = (one for one in known[str(instruction.calls)] if all(evaluate(size, shape.padded) for size in one.grid))
        found = [launched(one, shape.padded, shape.gpu) for one in run]
    else:
        found = [] if node.target in VIEWS else [Launched(f"{instruction.backend} {op_name(node)}")]
    return tuple(_by_contexts(one, node, shape, chosen) for one in found)


def _by_contexts(launch: Launched, node: fx.Node, shape: Shape, chosen: Sequence[Choice]) -> Launched:
    """Add to the launch of an attention kernel how unevenly the multiprocessors share its work.

    This depends on the context length. Any other launch is returned unchanged.
    """
    if rows := _PROMPT_ROWS.get(launch.name):
        dim = held_type(named_arguments(node)["q"]).bind(shape.unpadded)[2]
        name = f"{launch.name}, heads of {dim}" if dim in rows else launch.name
        return _prompts(node, shape).launched(name, rows.get(dim, rows[0]), shape.gpu.cores)
    tiles = next((one for one in chosen if one.kernel == DECODE_ATTENTION == launch.name), None)
    if tiles is None:
        return launch
    return Contexts(shape.unpadded["T"], shape.context, tiles).launched(launch.name, shape.gpu.cores)


def _prompts(node: fx.Node, shape: Shape) -> Prompts:
    """Return the numbers of sequences, tokens, positions and heads in a prefill attention call, `node`."""
    call = named_arguments(node)
    heads, sequences = held_type(call["q"]).bind(shape.unpadded)[1], shape.unpadded["B"]
    return Prompts(sequences, -(-shape.unpadded["T"] // sequences), shape.context, heads, call.get("mask", CAUSAL.name))


def op_name(node: fx.Node) -> str:
    """Return the name of the op that a node calls, such as "linear". A target that is no Ingot op has its printed
    name."""
    op = op_of(node.target)
    return op.name if op is not None else target_name(node.target)
