"""Compile one Triton kernel to a cubin (machine code). This needs no GPU."""

import hashlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.backends.ptxas import use_ptxas
from ingot.backends.triton.launches import ALIGNMENT, WARP
from ingot.backends.triton.schedule import Argument, KernelLaunch, Value
from ingot.ir.errors import BackendError
from ingot.ir.types import DTYPE_NAMES

# Triton's names of pointer types, by IR dtype.
_POINTERS = {
    "bf16": "*bf16",
    "f16": "*fp16",
    "f32": "*fp32",
    "f64": "*fp64",
    "f8e4m3": "*fp8e4nv",
    "f8e8m0": "*u8",
    "i8": "*i8",
    "u8": "*u8",
    "i32": "*i32",
    "i64": "*i64",
    "bool": "*i1",
}


@dataclass(frozen=True)
class Cubin:
    """The machine code of one kernel, and how to launch it.

    `entry` is the name of the kernel function in `code`. A thread block has `warps` warps and `shared` bytes of shared
    memory.
    """

    code: bytes
    entry: str
    warps: int
    shared: int


def is_aligned(value: Value) -> bool:
    """Return whether the address of a tensor is a multiple of ALIGNMENT (16 bytes) in every call.

    Buffers and weights are aligned. An input may be a slice of a larger tensor, so its strides decide. Inputs that the
    host fills, such as vectors of integers, are only 4-byte aligned. Integers whose sizes are all numbers are the
    elements of a quantized weight. A KV cache is aligned, whatever its dtype and the bytes of its rows: it is a state,
    which is allocated as a whole.
    """
    if value.buffer is not None or value.type.shape[:1] == ("pages",):
        return True
    shape, dtype = value.type.shape, value.type.dtype
    stored = len(shape) > 1 and all(isinstance(size, int) for size in shape)
    if value.type.strides is None and not dtype.is_floating_point and not stored:
        return False
    if value.type.strides is None and len(shape) < 2:
        return len(shape) == 0 or dtype.itemsize < 4
    strides = value.type.strides or ()
    # Slices begin at multiples of strides, and along the axis of adjacent elements at multiples of its size.
    adjacent = max((axis for axis, step in enumerate(strides) if step == 1), default=len(shape) - 1)
    steps = (shape[adjacent], *strides[:adjacent], *strides[adjacent + 1 :])
    return all(isinstance(step, int) and step * dtype.itemsize % ALIGNMENT == 0 for step in steps)


def compile_kernel(launch: KernelLaunch, sm: int) -> Cubin:
    """Compile the kernel of a launch for compute capability `sm` (90 for Hopper).

    Raises BackendError with Triton's message if it does not compile, and TargetError without a sound ptxas.
    """
    import triton  # not at the top: only emitting needs it
    from triton.backends.compiler import GPUTarget

    use_ptxas()
    signature: dict[str, str | tuple[str, ...]] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    names = list(inspect.signature(launch.kernel.fn).parameters)
    if given := (launch.arguments.keys() | launch.constants.keys()) ^ set(names):
        raise BackendError(
            f"the arguments of a launch do not match the parameters of the kernel {launch.kernel.fn.__name__}: "
            f"{sorted(given)}"
        )
    for place, name in enumerate(names):
        value = launch.arguments.get(name, launch.constants.get(name))
        if name in launch.constants or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Value):
            signature[name] = _pointer(value)
            if is_aligned(value):
                attributes[(place,)] = [["tt.divisibility", ALIGNMENT]]
        elif isinstance(value, tuple):
            signature[name] = tuple(map(_pointer, value))
            aligned = (part for part, one in enumerate(value) if is_aligned(one))
            attributes |= {(place, part): [["tt.divisibility", ALIGNMENT]] for part in aligned}
        else:
            signature[name] = "i32"
    source = source_type(launch.kernel)(launch.kernel, signature, constants, attributes)
    try:
        built = triton.compile(source, target=GPUTarget("cuda", sm, WARP), options=launch.options)
    except Exception as error:  # the compiler raises many types; the user gets one error that names the kernel
        raise BackendError(
            f"triton cannot compile {launch.kernel.fn.__name__}: {type(error).__name__}: {error}"[:2000],
            hint="compile with --backend reference, and report this",
        ) from error
    if early_writes(built.asm.get("ttgir", "")):
        raise BackendError(
            f"triton writes registers of {launch.kernel.fn.__name__} that an unfinished matmul still reads",
            expected="a use of the matmul's result in the loop, as by `complete` (kernels/quant/tile.py)",
            hint="compile with --backend reference, and report this",
        )
    metadata = built.metadata
    if metadata.global_scratch_size:
        raise BackendError(f"the kernel {launch.kernel.fn.__name__} needs global scratch", expected="none")
    return Cubin(built.asm["cubin"], metadata.name, metadata.num_warps, metadata.shared)


def source_type(kernel: Any) -> Any:
    """Return the class of Triton's compiler input for a kernel: that of Gluon for a `gluon.jit` function."""
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


# Hopper's matmuls in Triton's IR, and their waits. A first operand is a tensor in registers or a descriptor of shared
# memory. `pendings` is how many matmuls may be unfinished after a wait.
_MATMUL = re.compile(r"ttng\.warp_group_dot %.* : (?P<first>tensor|!ttg\.memdesc)<")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (?P<pendings>\d+)")


def early_writes(ttgir: str) -> bool:
    """Return whether a loop may write the first operand of a matmul before the matmul has read it.

    `ttgir` is Triton's IR for a GPU. Triton 3.6 splits a matmul whose first operand is in registers, and in each part
    waits for the others' registers too late (triton-lang/triton, issue 9433). No wait of such a matmul may leave
    others unfinished.
    """
    registers = False
    for line in ttgir.splitlines():
        if found := _MATMUL.search(line):
            registers = found["first"] == "tensor"
        elif registers and (found := _WAIT.search(line)) and int(found["pendings"]) > 0:
            return True
    return False


def _pointer(value: Value) -> str:
    return _POINTERS[DTYPE_NAMES[value.type.dtype]]


def file_of(cubin: Cubin) -> str:
    """Return the file name of a cubin: a digest of its machine code, and ".cubin"."""
    return f"{hashlib.sha256(cubin.code).hexdigest()[:16]}.cubin"


def launch_key(launch: KernelLaunch) -> tuple[Any, ...]:
    """Return a key that is equal for launches with equal machine code. Each kernel is then compiled once.

    The key holds the kernel, dtype and alignment of its arguments, its constants, and the compiler options.
    """
    kinds: Mapping[str, Any] = {name: _kind(value) for name, value in launch.arguments.items()}
    constants = tuple(sorted((name, repr(value)) for name, value in launch.constants.items()))
    return (launch.kernel.fn, tuple(sorted(kinds.items())), constants, tuple(launch.options.items()))


def _kind(value: Argument) -> Any:
    """Return the properties of a kernel argument that machine code depends on.

    For a tensor, they are (dtype, whether it is aligned). For a tuple, they are the properties of each item. For any
    other argument, the result says whether it is None.
    """
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    return (value.type.dtype, is_aligned(value)) if isinstance(value, Value) else value is None
