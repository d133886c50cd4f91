"""The peer backend at compile time: it claims all-reduces of GPUs with residual adds, and compiles their kernel."""

import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import fx

from ingot.backends.peer.call import ALL_REDUCE, PeerCall
from ingot.backends.peer.layout import (
    PUSH_CHUNK_BYTES,
    PUSH_RANKS,
    PUSH_WARPS,
    TILE_BYTES,
    VECTOR_BYTES,
    WARPS,
    WORD_BYTES,
    WORDS,
)
from ingot.backends.peer.sizes import MOST_BYTES, MOST_PUSHED_BYTES
from ingot.backends.ptxas import ptxas_version
from ingot.backends.table import claim_cost
from ingot.backends.triton.compile import compile_kernel, file_of
from ingot.backends.triton.launches import Launch, Number, Pointer
from ingot.backends.triton.schedule import KernelLaunch, Value
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.backend import No, Yes
from ingot.ir.machine.target import Target
from ingot.ir.ops import all_reduce
from ingot.ir.program import Program, held_type, is_call, target_name, tensor_type
from ingot.ir.types import TensorType

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The numbers of ranks that a kernel is compiled for. NCCL computes the all-reduces of others.
RANKS = tuple(MOST_BYTES)
_ADD = torch.ops.aten.add.Tensor


class Peer:
    """The peer backend. It claims (offers to compute) all-reduces between GPUs that reach each other's memory.

    It also claims the add of a residual to such a sum: both are one launch. It leaves the norm after the add to the
    matmul that reads it. In steps of few tokens, the matmul's kernel norms its input as it loads, so the norm is no
    launch. In larger steps, the add and the norm are one op of another backend, unless the step is batch-invariant.
    """

    name = "peer"
    compiles_calls = True

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cuda" or target.sm is None:
            return No(f"not for device '{target.device}'")
        if target.sm < 80:
            return No(f"kernels need compute capability 8.0, and this is {target.sm // 10}.{target.sm % 10}")
        for node in nodes:
            if reason := _refusal(node, bucket):
                return No(reason)
        # Every rank adds the values in rank order, element by element, whatever the other rows are.
        return Yes(claim_cost(self.name) * len(nodes), batch_invariant=True, timed=False)

    def cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
        inside = set(nodes)
        pairs = ((_sum_of(node), node) for node in nodes if is_call(node, _ADD))
        return [[total, node] for total, node in pairs if total is not None and total in inside]

    def warm_up(self) -> None:
        import triton.compiler  # noqa: F401

        import ingot.backends.peer.kernel
        import ingot.backends.peer.push  # noqa: F401

    def sources(self) -> Sequence[Path]:
        folder = Path(__file__).parent
        shared = ("compile.py", "launches.py", "schedule.py")  # of the triton backend
        own = ("call.py", "emit.py", "kernel.py", "layout.py", "push.py", "sizes.py", "wait.py")
        return [*(folder / name for name in own), *(folder.parent / "triton" / name for name in shared)]

    def toolchain(self) -> dict[str, str]:
        return {"triton": version("triton"), "ptxas": ptxas_version()}

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        """Return the bytes that NCCL's all-reduce of more than two ranks allocates. The kernels allocate a third."""
        value_type = tensor_type(next(iter(body.calls())))
        return 3 * _bytes(value_type, sizes)

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        """Compile the kernels for the type of the calls in `body`, for each number of ranks.

        The calls are an all-reduce, the add of a residual to a sum, or both. It writes the cubins and all_reduce.json
        into `directory`. The kernel for many bytes is there if a step may have so many. `key` becomes the id of the
        returned executable. Raises BackendError if a kernel does not compile.
        """
        assert target.sm is not None
        calls = list(body.calls())
        total = next((node for node in calls if is_call(node, all_reduce.overload)), None)
        adds = is_call(calls[-1], _ADD)
        value_type = tensor_type(calls[-1])
        dependent = "dependent_launch" in target.features
        launches = {}
        # With an add, the kernel of one rank follows an all-reduce by NCCL.
        for ranks in (*((1,) if adds else ()), *(RANKS if total is not None else ())):
            made = kernel_launch(value_type, ranks, adds=adds, dependent=dependent)
            launches[str(ranks)] = compiled(made, target.sm, directory)
        push, largest = None, {name: dim.hi for name, dim in body.dims.items()}
        if total is not None and _bytes(value_type, largest) > MOST_BYTES[PUSH_RANKS]:
            push = compiled(push_launch(value_type, adds=adds, dependent=dependent), target.sm, directory)
        axis = "" if total is None else str(total.kwargs["axis"])
        call = PeerCall(axis=axis, item=value_type.dtype.itemsize, adds=adds, launches=launches, push=push)
        (directory / ALL_REDUCE).write_text(json.dumps(call.model_dump(mode="json"), indent=1) + "\n")
        kernels = {one.kernel for one in (*launches.values(), *([push] if push else []))}
        return Executable(
            id=key,
            backend=self.name,
            inputs=tuple(str(held_type(node)) for node in body.placeholders()),
            outputs=(str(value_type),),
            files=tuple(sorted({ALL_REDUCE, *kernels})),
        )


def _refusal(node: fx.Node, bucket: BucketClass) -> str:
    """Return why the kernel cannot compute a call; "" if it can."""
    if is_call(node, _ADD):
        total = _sum_of(node)
        return "the add is not that of a residual to a sum of ranks" if total is None else _refusal(total, bucket)
    if not is_call(node, all_reduce.overload):
        return f"{target_name(node.target)} is no all-reduce"
    value_type = tensor_type(node)
    if value_type.dtype not in _DTYPES:
        return f"no kernel for {value_type.dtype}"
    row = math.prod(size for size in value_type.shape if isinstance(size, int)) * value_type.dtype.itemsize
    least, most = row * bucket.tokens[0], max(MOST_PUSHED_BYTES, *MOST_BYTES.values())
    if "T" in value_type.shape and least > most:
        return f"a sum of {least} bytes or more is for NCCL: the kernels add up to {most}"
    return ""


def _bytes(value_type: TensorType, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a value. `sizes` maps the names of symbolic dims, such as "T", to sizes."""
    shape = [sizes[size] if isinstance(size, str) else size for size in value_type.shape]
    return math.prod(shape) * value_type.dtype.itemsize


def _sum_of(add: fx.Node) -> fx.Node | None:
    """Return the all-reduce to whose result the call `add` adds a residual of the same type, in whole vectors.

    Return None if there is none, or if another call reads the sum too.
    """
    if len(add.args) != 2 or add.kwargs:
        return None
    left, right = add.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or left is right:
        return None
    for total, residual in ((right, left), (left, right)):
        value_type = tensor_type(add)
        if not is_call(total, all_reduce.overload) or len(total.users) != 1 or residual in total.args:
            continue
        width = value_type.shape[-1] if value_type.shape else 0
        whole = isinstance(width, int) and width * value_type.dtype.itemsize % VECTOR_BYTES == 0
        if whole and value_type.strides is None and tensor_type(total) == tensor_type(residual) == value_type:
            return total
    return None


# What the arguments of the kernels are when they are launched.
_ARGUMENTS: dict[str, Pointer | Number] = {
    "x": Pointer(input=0),
    "residual": Pointer(input=1),
    **{name: Pointer(buffer=name) for name in ("result", "own", "shared", "words")},
    **{name: Number(value=name) for name in ("vectors", "chunk", "place", "timeout")},
}


def kernel_launch(value_type: TensorType, ranks: int, *, adds: bool, dependent: bool) -> KernelLaunch:
    """Return the launch of the kernel for values of a type, before compilation.

    `adds` says whether it adds a residual to the sum. With one rank, it adds only that.
    """
    from ingot.backends.peer.kernel import all_reduce as kernel  # Triton is imported only to compile

    item = value_type.dtype.itemsize
    flat = TensorType(value_type.dtype, (VECTOR_BYTES // item,))
    alone = ranks == 1
    return KernelLaunch(
        kernel,
        ("blocks",),
        {
            "x": Value(flat, buffer="x"),  # `load.py` checks that its address is aligned
            "residual": Value(flat, buffer="residual") if adds else None,
            "result": Value(flat, buffer="result"),
            "own": None if alone else Value(TensorType(torch.int32, (4,)), buffer="own"),
            "shared": None if alone else Value(TensorType(torch.int64, (ranks,)), buffer="shared"),
            "words": None if alone else Value(TensorType(torch.int32, (WORDS,)), buffer="words"),
            "vectors": "vectors",
            "place": None if alone else "place",
            "timeout": None if alone else "timeout",
        },
        {"RANKS": ranks, "BLOCK": TILE_BYTES // WORD_BYTES, "DEPENDENT": dependent},
        warps=WARPS,
        dependent=dependent,
    )


def push_launch(
    value_type: TensorType,
    *,
    adds: bool,
    dependent: bool,
    chunk_bytes: int = PUSH_CHUNK_BYTES,
    warps: int = PUSH_WARPS,
) -> KernelLaunch:
    """Return the launch of the kernel of two ranks for many bytes, before compilation.

    adds          whether it adds a residual to the sum
    chunk_bytes   the most bytes of a chunk: a power of two
    """
    from ingot.backends.peer.push import push as kernel  # Triton is imported only to compile

    item = value_type.dtype.itemsize
    flat = TensorType(value_type.dtype, (VECTOR_BYTES // item,))
    return KernelLaunch(
        kernel,
        ("blocks",),
        {
            "x": Value(flat, buffer="x"),
            "residual": Value(flat, buffer="residual") if adds else None,
            "result": Value(flat, buffer="result"),
            "shared": Value(TensorType(torch.int64, (PUSH_RANKS,)), buffer="shared"),
            "words": Value(TensorType(torch.int32, (WORDS,)), buffer="words"),
            "vectors": "vectors",
            "chunk": "chunk",
            "place": "place",
            "timeout": "timeout",
        },
        {"CHUNK": chunk_bytes // item, "VECTOR": VECTOR_BYTES // item, "DEPENDENT": dependent},
        warps=warps,
        dependent=dependent,
    )


def compiled(made: KernelLaunch, sm: int, directory: Path) -> Launch:
    """Compile a launch for compute capability `sm`, and write its cubin into `directory`."""
    cubin = compile_kernel(made, sm)
    (directory / file_of(cubin)).write_bytes(cubin.code)
    return Launch(
        kernel=file_of(cubin),
        entry=cubin.entry,
        grid=("blocks", 1, 1),
        arguments=tuple(_ARGUMENTS[name] for name, value in made.arguments.items() if value is not None),
        warps=cubin.warps,
        shared=cubin.shared,
        dependent=made.dependent,
    )
