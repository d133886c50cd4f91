"""The inductor region compiler for CPUs, compile side: a region's body becomes a shared object by AOTInductor."""

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

# Threads are counted when a region runs: a library must not carry the core count of the machine that built it.
OPTIONS = {"cpp.dynamic_threads": True}
# Any size in a dim's range will do to trace with, as long as export cannot take it for a constant.
_EXAMPLE_SIZE = 7


class Inductor:
    """Takes every fusible op; embedding, attention, cache writes, row selection and sampling stay outside."""

    name = "inductor"
    compiles_calls = False

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cpu":
            return No(f"not for device '{target.device}'")
        if bucket.few_tokens:
            return No("for few tokens calling a region costs more than what it computes")
        return unfusible(nodes) or Yes(claim_cost(self.name, "cpu"), timed=False)  # a region is more than its calls

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
        """Its compile side and the references, which are what gets compiled."""
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
    """The refusal of the first call that no region takes."""
    for node in nodes:
        op = op_of(node.target)
        if op is not None and not op.fusible:
            return No(f"{target_name(node.target)} stands outside regions")
    return None
