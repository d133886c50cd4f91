"""The work that a GPU does for each call of a step: flops, bytes and kernel launches."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ingot.backends.triton.launches import Launch
from ingot.debug.step_time.launches import Shape, launches_of, op_name
from ingot.debug.step_time.programs import Launched
from ingot.debug.step_time.stage_calls import instructions_of
from ingot.ir.artifact.plan import BucketPlan, Instruction
from ingot.ir.artifact.tuning import Choice
from ingot.ir.costs import call_cost
from ingot.ir.infer import sized_meta_tensor
from ingot.ir.ops.registry import Cost, bytes_of
from ingot.ir.program import VIEWS, Program, RegionCall, named_arguments
from ingot.ir.types import DTYPE_NAMES, TensorType, TupleType

# Kinds of calls, for totals, in order: a call counts as the first kind that one of its ops belongs to.
KINDS = ("products", "attention", "norms", "sampling", "rest")
_PRODUCTS = ("linear", "quant_linear")
_KIND_OF = {
    **dict.fromkeys((*_PRODUCTS, "dequantize", "head_linear", "experts", "rounded_linear"), "products"),
    **dict.fromkeys(
        (
            "append_attention",
            "paged_attention",
            "paged_choose_positions",
            "sparse_attention",
            "step_attention",
            "qk_norm_rope_append",
            "kv_append",
            "rope",
            "attention",
        ),
        "attention",
    ),
    **dict.fromkeys(("rms_norm", "layer_norm", "add_rms_norm"), "norms"),
    **dict.fromkeys(("sample", "count_tokens", "top_logprobs"), "sampling"),
}


@dataclass(frozen=True)
class Work:
    """The work of a call in a step. The time of the call is predicted from it.

    name       the name of the call's node
    what       a description of the call, such as its ops
    kind       its group in totals, such as "attention"
    least      the minimal flops and bytes
    done       the actual flops and bytes, with padding rows and all written results
    dtype      the dtype of its operands
    backend    the backend that computes it
    launches   its kernel launches; none for a view
    compiled   False if a library has the kernels
    product    [rows, columns, depth] of a library's matmul, else None
    choice     the tile sizes of a matmul or attention kernel, None if it has none
    """

    name: str
    what: str
    kind: str
    least: Cost
    done: Cost
    dtype: str
    backend: str
    launches: tuple[Launched, ...]
    compiled: bool
    product: tuple[int, int, int] | None = None
    choice: Choice | None = None


def works(
    program: Program,
    plans: Sequence[BucketPlan],
    shape: Shape,
    choices: Mapping[str, Sequence[Choice]],
    kernels: Mapping[str, tuple[Launch, ...]],
) -> list[Work]:
    """Return the work of each call of a lowered program in a step of the given `shape`.

    `plans` are the plans of all pipeline stages, or the one plan of the program. `choices` maps the names of nodes and
    regions to tile sizes. `kernels` maps ids of executables to recorded kernel launches. Raises ArtifactError if the
    plans' instructions do not match the program's calls.
    """
    return [
        _work(node, instruction, program, shape, choices, kernels)
        for node, instruction in instructions_of(program, plans).items()
    ]


def _work(
    node: fx.Node,
    instruction: Instruction,
    program: Program,
    shape: Shape,
    choices: Mapping[str, Sequence[Choice]],
    kernels: Mapping[str, tuple[Launch, ...]],
) -> Work:
    inner = inner_calls(node, program)
    names = [op_name(one) for one in inner]
    kind = min((_KIND_OF.get(name, KINDS[-1]) for name in names), key=KINDS.index)
    product = next((one for one in inner if op_name(one) in _PRODUCTS), None)
    chosen = choices.get(node.target.name if isinstance(node.target, RegionCall) else node.name, ())
    return Work(
        name=node.name,
        what=_what(names, product),
        kind=kind,
        least=call_cost(node, program, shape.unpadded),
        # Padding rows have nothing cached.
        done=_done(node, program, shape.unpadded if kind == "attention" else shape.padded),
        dtype=_dtype(product if product is not None else node),
        backend=instruction.backend,
        launches=launches_of(node, instruction, shape, kernels, chosen),
        compiled=instruction.calls is not None,
        product=_product(node, shape) if instruction.calls is None and node is product else None,
        choice=chosen[0] if chosen else None,
    )


def inner_calls(node: fx.Node, program: Program) -> list[fx.Node]:
    """Return the calls that a node runs. For a region these are the calls in its body, without views.

    For any other node it is only the node itself.
    """
    if not isinstance(node.target, RegionCall):
        return [node]
    return [one for one in program.regions[node.target.name].body.calls() if one.target not in VIEWS]


def _what(names: Sequence[str], product: fx.Node | None) -> str:
    """Describe a call for reports: a matmul by the shape of its weight, any other call by its ops.

    `names` are the ops of the call or region. `product` is its matmul; None if it has none. Ops that are fused with a
    matmul or experts follow after "with".
    """
    if product is not None:
        weight, main = _weight(product), op_name(product)
        what = f"product of {'x'.join(map(str, weight)) if weight else '?'}"
    elif "experts" in names:
        what = main = "experts"
    else:
        return " + ".join(dict.fromkeys(names))
    around = [name.removeprefix("aten.").removesuffix(".Tensor") for name in names if name != main]
    return what + (f" with {' and '.join(dict.fromkeys(around))}" if around else "")


def _weight(product: fx.Node) -> tuple[int, ...] | None:
    weight = named_arguments(product)["weight"]
    value_type = weight.meta["type"]
    return tuple(int(size) for size in value_type.shape) if isinstance(value_type, TensorType) else None


def _product(node: fx.Node, shape: Shape) -> tuple[int, int, int] | None:
    """Return [rows, columns, depth] of the matmul `node`, with padded rows; None if its weight is not a matrix."""
    weight, result = _weight(node), node.meta["type"]
    if weight is None or len(weight) != 2 or not isinstance(result, TensorType):
        return None
    return math.prod(result.bind(shape.padded)[:-1]), *weight


def _dtype(node: fx.Node) -> str:
    """Return the dtype of the first floating-point operand of a call; "f32" if it has none.

    For a matmul this is the dtype of x, and for attention the dtype of q.
    """
    for source in node.all_input_nodes:
        value_type = source.meta["type"]
        if isinstance(value_type, TensorType) and value_type.dtype.is_floating_point:
            return DTYPE_NAMES[value_type.dtype]
    return "f32"


def _done(node: fx.Node, program: Program, sizes: Mapping[str, int]) -> Cost:
    """Return the actual flops and bytes of a call in a step. `sizes` maps symbolic dims to their sizes.

    The bytes are at least the bytes of the results, since the minimal cost may leave these out.
    """
    if node.target in VIEWS:
        return Cost()
    cost = call_cost(node, program, sizes)
    return Cost(cost.flops, max(cost.bytes, _written(node, sizes)))


def _written(node: fx.Node, sizes: Mapping[str, int]) -> int:
    value_type = node.meta["type"]
    items = value_type.items if isinstance(value_type, TupleType) else (value_type,)
    return bytes_of(*(sized_meta_tensor(item, sizes) for item in items if isinstance(item, TensorType)))
