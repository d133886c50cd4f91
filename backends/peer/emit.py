"""The peer backend at compile time: it claims all-reduces of GPUs, and compiles their kernel."""

import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import fx

from ingot.backends.peer.call import ALL_REDUCE, PeerCall
from ingot.backends.peer.layout import MOST_RANKS, TILE_BYTES, VECTOR_BYTES, WARPS, WORDS
from ingot.backends.table import claim_cost
from ingot.backends.triton.compile import compile_kernel, file_of
from ingot.backends.triton.launches import Launch, Number, Pointer
from ingot.backends.triton.schedule import KernelLaunch, Value
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.backend import No, Yes
from ingot.ir.machine.target import Target
from ingot.ir.ops import all_reduce, op_of
from ingot.ir.program import Program, held_type, target_name
from ingot.ir.types import TensorType

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The numbers of ranks that a kernel is compiled for. NCCL computes the all-reduces of others.
RANKS = (2, 4, MOST_RANKS)


class Peer:
    """The peer backend. It claims (offers to compute) all-reduces between GPUs that reach each other's memory.

    It competes only if `--backend` names it, because its kernel has not been timed against NCCL.
    """

    name = "peer"
    compiles_calls = True

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cuda" or target.sm is None:
            return No(f"not for device '{target.device}'")
        if target.sm < 80:
            return No(f"kernels need compute capability 8.0, and this is {target.sm // 10}.{target.sm % 10}")
        for node in nodes:
            if op_of(node.target) is not all_reduce:
                return No(f"{target_name(node.target)} is no all-reduce")
            value_type = node.meta["type"]
            if value_type.dtype not in _DTYPES:
                return No(f"no kernel for {value_type.dtype}")
        # Every rank adds the values in rank order, element by element, whatever the other rows are.
        return Yes(claim_cost(self.name) * len(nodes), batch_invariant=True, timed=False)

    def sources(self) -> Sequence[Path]:
        folder = Path(__file__).parent
        shared = ("compile.py", "launches.py", "schedule.py")  # of the triton backend
        own = [folder / name for name in ("call.py", "emit.py", "kernel.py", "layout.py")]
        return [*own, *(folder.parent / "triton" / name for name in shared)]

    def toolchain(self) -> dict[str, str]:
        return {"triton": version("triton")}

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        """Return the bytes that NCCL's all-reduce of more than two ranks allocates. The kernel allocates a third."""
        (value_type,) = (held_type(node) for node in body.placeholders())
        assert isinstance(value_type, TensorType)
        shape = [sizes[size] if isinstance(size, str) else size for size in value_type.shape]
        return 3 * math.prod(shape) * value_type.dtype.itemsize

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        """Compile the kernel for the type of the call in `body`, for each number of ranks.

        It writes the cubins and all_reduce.json into `directory`. `key` becomes the id of the returned executable.
        Raises BackendError if the kernel does not compile.
        """
        assert target.sm is not None
        (value_type,) = (held_type(node) for node in body.placeholders())
        (node,) = body.calls()
        assert isinstance(value_type, TensorType)
        dependent = "dependent_launch" in target.features
        launches, files = {}, [ALL_REDUCE]
        for ranks in RANKS:
            cubin = compile_kernel(kernel_launch(value_type, ranks, dependent=dependent), target.sm)
            launches[str(ranks)] = Launch(
                kernel=file_of(cubin),
                entry=cubin.entry,
                grid=("blocks", 1, 1),
                arguments=(
                    Pointer(input=0),
                    *(Pointer(buffer=name) for name in ("result", "shared", "words")),
                    *(Number(value=name) for name in ("vectors", "place", "timeout")),
                ),
                warps=cubin.warps,
                shared=cubin.shared,
                dependent=dependent,
            )
            (directory / file_of(cubin)).write_bytes(cubin.code)
            files.append(file_of(cubin))
        call = PeerCall(axis=str(node.kwargs["axis"]), item=value_type.dtype.itemsize, launches=launches)
        (directory / ALL_REDUCE).write_text(json.dumps(call.model_dump(mode="json"), indent=1) + "\n")
        types = (str(value_type),)
        return Executable(id=key, backend=self.name, inputs=types, outputs=types, files=tuple(sorted(set(files))))


def kernel_launch(value_type: TensorType, ranks: int, *, dependent: bool) -> KernelLaunch:
    """Return the launch of the kernel for values of a type, before compilation."""
    from ingot.backends.peer.kernel import all_reduce as kernel  # Triton is imported only to compile

    item = value_type.dtype.itemsize
    flat = TensorType(value_type.dtype, (VECTOR_BYTES // item,))
    return KernelLaunch(
        kernel,
        ("blocks",),
        {
            "x": Value(flat, buffer="x"),  # `load.py` checks that its address is aligned
            "result": Value(flat, buffer="result"),
            "shared": Value(TensorType(torch.int64, (ranks,)), buffer="shared"),
            "words": Value(TensorType(torch.int32, (WORDS,)), buffer="words"),
            "vectors": "vectors",
            "place": "place",
            "timeout": "timeout",
        },
        {"RANKS": ranks, "BLOCK": TILE_BYTES // item, "VECTOR": VECTOR_BYTES // item, "DEPENDENT": dependent},
        warps=WARPS,
        dependent=dependent,
    )
