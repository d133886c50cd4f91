"""The inductor backend for GPUs at compile time: compiles each region into one shared object, GPU code included."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import fx

from ingot.backends.inductor.compile import compile_region, example_of
from ingot.backends.inductor.emit import Inductor, unfusible
from ingot.backends.inductor.workspace import measure_cuda
from ingot.backends.ptxas import ptxas_version, use_ptxas
from ingot.backends.rounded_activations import unrounded
from ingot.backends.table import claim_cost
from ingot.backends.toolchain import check_links_libstdcxx, compiler_path, compiler_version, cuda_headers
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.backend import No, Yes
from ingot.ir.errors import TargetError
from ingot.ir.machine.target import Target
from ingot.ir.ops import op_of
from ingot.ir.program import Program, target_name

OPTIONS = {
    # One file: separate kernel files would be opened by their paths on the build machine.
    "aot_inductor.embed_kernel_binary": True,
    # A worker process compiles one region at a time, and several workers run at once.
    "compile_threads": 1,
}
# The tokens of the step for which Inductor chooses tile sizes. It is a prime, so that export does not confuse it with a
# size of the model; large enough to fill a GPU; and small enough that rows of logits fit while kernels are timed.
_EXAMPLE_SIZE = 61


class InductorCuda(Inductor):
    """The inductor backend for GPUs. It claims fusible ops at a higher cost than backends with kernels of their own.

    With `ahead`, its cost is lower than every other, so its claims win. `missing` takes a target, such as "sm_90", and
    returns why this machine cannot compile for it, or "". None means `missing_here`; tests pass another function.

    AOTInductor runs kernels while it compiles, to choose tile sizes. It therefore compiles only for the GPU of this
    machine.
    """

    def __init__(self, *, ahead: bool = False, missing: Callable[[str], str] | None = None) -> None:
        self._cost = claim_cost(self.name, "cuda, ahead" if ahead else "cuda")
        self._missing = cache(missing or missing_here)  # called for every call of a program

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cuda":
            return No(f"not for device '{target.device}'")
        if refused := unfusible(nodes) or unrounded(nodes, target):
            return refused
        for node in nodes:
            if (op := op_of(node.target)) is not None and op.needs_kernel:
                return No(f"on a GPU {target_name(node.target)} needs a kernel that was measured there")
        missing = self._missing(target.name)
        return No(missing) if missing else Yes(self._cost * len(nodes), timed=False)

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        types = body.input_types().values()
        return measure_cuda(
            directory / executable.files[0], lambda: [example_of(value_type, sizes, "cuda") for value_type in types]
        )

    def sources(self) -> Sequence[Path]:
        return (*super().sources(), Path(__file__))

    def toolchain(self) -> dict[str, str]:
        """Return what compiled code depends on: versions of "torch", "triton", "ptxas" and "c++", and the name of the
        "gpu".

        The value is "none" for a part that this machine lacks.
        """
        versions = {"torch": torch.__version__, "triton": _version("triton"), "ptxas": ptxas_version()}
        return {**versions, "c++": _compiler(), "gpu": _gpu()}

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        compiler_path()
        use_ptxas()
        return compile_region(
            body,
            key,
            directory,
            device="cuda",
            example=_EXAMPLE_SIZE,
            options=OPTIONS,
            hint="compile with --backend triton, and report this",
        )


def missing_here(target: str) -> str:
    """Return why this machine cannot compile regions for `target`, such as "sm_90", or "" if it can.

    A region is calls that are compiled together.
    """
    if (here := _gpu()) != target:
        return f"it compiles for {target} only on such a GPU; the GPU of this machine: {here}"
    if importlib.util.find_spec("triton") is None:
        return "it needs Triton, which is not installed"
    try:
        check_links_libstdcxx()
        cuda_headers()
    except TargetError as error:
        return f"{error.what} ({error.where}): {error.hint}"
    return ""


def _gpu() -> str:
    try:
        return Target.detect("cuda").name
    except TargetError:
        return "none"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _compiler() -> str:
    try:
        check_links_libstdcxx()
        cuda_headers()
        return compiler_version()
    except TargetError:
        return "none"
