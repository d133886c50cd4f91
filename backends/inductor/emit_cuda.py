"""The inductor region compiler for GPUs, compile side: one shared object that holds its kernels' machine code."""

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
from ingot.backends.table import claim_cost
from ingot.backends.toolchain import check_links_libstdcxx, compiler_path, compiler_version, cuda_headers
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.backend import No, Yes
from ingot.ir.errors import TargetError
from ingot.ir.machine.target import Target
from ingot.ir.program import Program

OPTIONS = {
    # A library alone: what lies beside it would be opened by the path that it had where it was built.
    "aot_inductor.embed_kernel_binary": True,
    # A worker process compiles one region at a time, and others run beside it.
    "compile_threads": 1,
}
# Tile sizes of kernels are chosen for a step of so many tokens. A prime, so that export takes it for no size of a
# model; large enough to fill a GPU, and so small that rows of logits are no burden while kernels are timed.
_EXAMPLE_SIZE = 61


class InductorCuda(Inductor):
    """Takes every fusible op that nothing else has a kernel for; with `ahead`, those too.

    AOTInductor runs kernels while it compiles, to choose tile sizes: so it compiles only for the GPU of this machine.
    `missing` says why it does not compile here for a target of a name, "" where it does.
    """

    def __init__(self, *, ahead: bool = False, missing: Callable[[str], str] | None = None) -> None:
        self._cost = claim_cost(self.name, "cuda, ahead" if ahead else "cuda")
        self._missing = cache(missing or missing_here)  # every call of a program asks

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cuda":
            return No(f"not for device '{target.device}'")
        if refused := unfusible(nodes):
            return refused
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
        """What is missing stands in it as "none": others compile without, and another artifact comes of it."""
        return {"torch": torch.__version__, "triton": _version("triton"), "c++": _compiler(), "gpu": _gpu()}

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        compiler_path()
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
    """Why this machine compiles no region for a GPU of the kind `target`; "" when it does."""
    if (here := _gpu()) != target:
        return f"it compiles on the GPU that it compiles for, and finds {here} here"
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
