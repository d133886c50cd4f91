"""The inductor backend for CPUs at compile time: AOTInductor compiles each region into a shared object."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import fx

from ingot.backends.inductor.compile import compile_region, example_of
from ingot.backends.inductor.workspace import measure
from ingot.backends.table import claim_cost
from ingot.backends.toolchain import check_links_libstdcxx, compiler_path, compiler_version
from ingot.ir import ops
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.backend import No, Yes
from ingot.ir.machine.target import Target
from ingot.ir.ops import op_of
from ingot.ir.program import Program, target_name
from ingot.ir.types import TensorType

# Read the number of threads when a region runs: a library must not contain the core count of the build machine.
OPTIONS = {"cpp.dynamic_threads": True}
# Dtypes without a C++ type that AOTInductor's wrapper can name (torch 2.14 writes at::Float8_e8m0fnu, which PyTorch's
# headers do not have).
_NOT_IN_CXX = frozenset({torch.float8_e8m0fnu})
# The size of dims to trace with: any in range that export does not specialize as a constant.
_EXAMPLE_SIZE = 7


class Inductor:
    """The inductor backend for CPUs. It compiles fusible ops with AOTInductor, for steps of many tokens.

    Fusible ops are matmuls, norms and elementwise ops. Embedding, attention, cache writes, row selection and sampling
    are not fusible.
    """

    name = "inductor"
    compiles_calls = False

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cpu":
            return No(f"not for device '{target.device}'")
        if bucket.few_tokens:
            return No("for few tokens, a call of a region costs more than its computation")
        # Not timed: a region is faster than its calls one by one.
        return unfusible(nodes) or Yes(claim_cost(self.name, "cpu"), timed=False)

    def cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
        return None

    def warm_up(self) -> None:
        import torch._inductor.compile_fx  # noqa: F401

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        args = [example_of(value_type, sizes, "cpu") for value_type in body.input_types().values()]
        return measure(directory / executable.files[0], args, threads)

    def sources(self) -> Sequence[Path]:
        """Return the source files that compiled code depends on, for the cache key.

        These are this backend's files and the references of the ops.
        """
        compile_side = (Path(__file__), Path(__file__).with_name("compile.py"))
        return (*compile_side, *sorted(Path(ops.__file__).parent.glob("*.py")))

    def toolchain(self) -> dict[str, str]:
        check_links_libstdcxx()
        return {"torch": torch.__version__, "c++": compiler_version()}

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        compiler_path()
        return compile_region(
            body,
            key,
            directory,
            device="cpu",
            example=_EXAMPLE_SIZE,
            options=OPTIONS,
            hint="compile with --backend reference, and report this",
        )


def unfusible(nodes: Sequence[fx.Node]) -> No | None:
    """Return None if AOTInductor can compile all `nodes` in a region. Otherwise return a refusal (No) that names the
    first other one."""
    for node in nodes:
        op = op_of(node.target)
        if op is not None and not op.fusible:
            return No(f"{target_name(node.target)} is not fusible")
        for one in (node, *node.all_input_nodes):
            value_type = one.meta.get("type")
            if isinstance(value_type, TensorType) and value_type.dtype in _NOT_IN_CXX:
                return No(f"{target_name(node.target)} has a {value_type.dtype}, which the C++ wrapper cannot name")
    return None
