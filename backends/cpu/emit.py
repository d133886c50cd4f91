"""The cpu backend at compile time: claims calls that have C++ kernels, and builds the kernels once per target."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ingot.backends.cpu.calls.quant import unsupported
from ingot.backends.cpu.interface import KERNELS, MACRO, interface_digest
from ingot.backends.cpu.workspace import costliest
from ingot.backends.table import claim_cost
from ingot.backends.toolchain import compiler_path, compiler_version
from ingot.ir import ops
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.backend import No, Yes
from ingot.ir.errors import BackendError
from ingot.ir.formats import find_format
from ingot.ir.layout import Layout
from ingot.ir.machine.target import Target
from ingot.ir.ops import op_of
from ingot.ir.program import named_values, target_name, tensor_type
from ingot.ir.types import DTYPE_NAMES, TensorType

LIBRARY = "kernels.so"
# The instruction sets of this machine, and the relaxations of IEEE that vector code needs: no traps, no errno. Not
# -ffast-math: it would assume no NaN and no infinity, and reorder sums.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp-simd",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fPIC",
)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Cpu:
    """The cpu backend: C++ kernels for paged attention, cache writes, and the first and last ops of a step.

    The first op of a step is `feed`. The last ones are `sample` and `advance`. In steps of few tokens, this backend
    computes all ops of a dense decoder layer. It computes linears with quantized weights in all steps.
    """

    name = "cpu"

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cpu":
            return No(f"not for device '{target.device}'")
        cost, batch_invariant = 0.0, True
        for node in nodes:
            op = op_of(node.target)
            if op is None or op.name not in _CLAIMS:
                return No(f"no kernel for {target_name(node.target)}")
            if reason := _CLAIMS[op.name](node):
                return No(reason)
            # Only this backend has kernels for ops that are not fusible.
            few = bucket.few_tokens or not op.fusible
            case = "quantized" if op is ops.quant_linear else "few tokens" if few else "many tokens"
            cost += claim_cost(self.name, case)
            # Attention of many tokens per sequence runs in torch, that of few in a kernel. The bits of torch's
            # attention may depend on the place of a sequence in its step.
            batch_invariant &= op not in (ops.paged_attention, ops.step_attention)
        rows = {"weight": Layout.ROW_MAJOR} if any(op_of(node.target) is ops.linear for node in nodes) else {}
        return Yes(cost, rows, batch_invariant)

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        return costliest(node.target, len(os.sched_getaffinity(0)))

    def sources(self) -> Sequence[Path]:
        return (Path(__file__), KERNELS.with_name("interface.py"), *sorted(KERNELS.iterdir()))

    def toolchain(self) -> dict[str, str]:
        return {"c++": compiler_version()}

    def emit_library(self, key: str, target: Target, directory: Path) -> Executable:
        """Build the library of C++ kernels for this machine into `directory`.

        The returned Executable describes the library; `key` is its id. Raises BackendError, with the compiler's
        messages, if the build fails.
        """
        sources, exported = sorted(KERNELS.glob("*.cpp")), f'-D{MACRO}="{interface_digest()}"'
        with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            built = [str(Path(objects, f"{source.stem}.o")) for source in sources]
            tasks = [
                threads.submit(_compiler, *FLAGS, exported, "-c", "-o", to, str(source))
                for source, to in zip(sources, built, strict=True)
            ]
            for task in tasks:
                task.result()
            _compiler(*FLAGS, "-shared", "-o", str(directory / LIBRARY), *built)
        return Executable(id=key, backend=self.name, inputs=(), outputs=(), files=(LIBRARY,))


def _compiler(*arguments: str) -> None:
    """Run the C++ compiler. Raises BackendError with its last messages if it fails."""
    done = subprocess.run([compiler_path(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendError("the C++ compiler cannot build the kernels", where=done.stderr.strip()[-2000:])


def _argument_type(node: fx.Node, name: str) -> TensorType:
    return tensor_type(named_values(node)[name])


def _same_dtype(node: fx.Node, *names: str) -> str | None:
    """Return why the C++ kernels do not support the arguments `names` of a call, or None if they do.

    All these arguments must have one dtype, and a kernel for it must exist. Their stride along the last axis must be 1.
    """
    found = {name: tensor_type(item) for name, item in named_values(node).items() if name in names}
    dtypes = {value_type.dtype for value_type in found.values()}
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        return "no kernel for " + " with ".join(sorted(DTYPE_NAMES[dtype] for dtype in dtypes))
    for name, value_type in found.items():
        if value_type.strides is not None and value_type.strides[-1] != 1:
            return f"{name} is strided along its last axis: {value_type}"
    return None


def _linear(node: fx.Node) -> str | None:
    x, weight = _argument_type(node, "x"), _argument_type(node, "weight")
    if len(x.shape) != 2:
        return f"x is {x}, not [T, K]"
    if weight.strides is not None:
        return f"the weight is not row-major: {weight}"
    return _same_dtype(node, "x", "weight", "bias")


def _quant_linear(node: fx.Node) -> str | None:
    arguments = named_values(node)
    if reason := unsupported(find_format(str(node.kwargs["format"]))):
        return reason
    if len(tensor_type(arguments["x"]).shape) != 2:
        return f"x is {tensor_type(arguments['x'])}, not [T, K]"
    for name in ("weight", "scales", "zeros"):
        if name in arguments and tensor_type(arguments[name]).strides is not None:
            return f"{name} is not row-major: {tensor_type(arguments[name])}"
    return _same_dtype(node, "x", "bias")


def _norm(node: fx.Node) -> str | None:
    arguments = named_values(node)
    x, weight = tensor_type(arguments["x"]), tensor_type(arguments["weight"])
    if weight.dtype not in (x.dtype, torch.float32):
        return f"no kernel for a weight in {DTYPE_NAMES[weight.dtype]} with x in {DTYPE_NAMES[x.dtype]}"
    if weight.strides is not None:
        return f"the weight is not row-major: {weight}"
    if len(x.shape) not in (2, 3) or len(weight.shape) >= len(x.shape):
        return f"no kernel for {x} with a weight {weight}"
    if "bias" in arguments and tensor_type(arguments["bias"]) != weight:
        return f"the weight is {weight}, and the bias {tensor_type(arguments['bias'])}"
    return _same_dtype(node, "x", "residual")


def _activation(node: fx.Node) -> str | None:
    x = _argument_type(node, "x")
    return f"x is {x}, not [T, F]" if len(x.shape) != 2 else _same_dtype(node, "x")


# For each op with a kernel: a function of its call that returns why the kernel does not support it, or None.
_CLAIMS: Mapping[str, Callable[[fx.Node], str | None]] = {
    "linear": _linear,
    "quant_linear": _quant_linear,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "add_rms_norm": _norm,
    "silu_mul": lambda node: _same_dtype(node, "gate", "up"),
    "gelu_mul": lambda node: _same_dtype(node, "gate", "up"),
    "activate": _activation,
    "rope": lambda node: _same_dtype(node, "x"),
    "qk_norm_rope_append": lambda node: _same_dtype(node, "q", "k", "v", "q_weight", "k_weight"),
    "kv_append": lambda node: _same_dtype(node, "k", "v"),
    "paged_attention": lambda node: _same_dtype(node, "q"),
    "step_attention": lambda node: _same_dtype(node, "q", "k", "v"),
    "feed": lambda node: None,  # integers of one type each
    "sample": lambda node: None if _argument_type(node, "logits").dtype is torch.float32 else "logits must be f32",
    "advance": lambda node: None,
}
