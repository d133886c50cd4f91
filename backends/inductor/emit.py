"""The inductor region compiler, compile side: a region's body becomes a shared object by AOTInductor."""

import contextlib
import io
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ingot.backends.inductor.workspace import measure
from ingot.backends.toolchain import compiler_path, compiler_version
from ingot.ir import ops
from ingot.ir.backend import No, Yes
from ingot.ir.errors import BackendError
from ingot.ir.ops import op_of
from ingot.ir.plan import BucketClass, Executable
from ingot.ir.program import Program, target_name
from ingot.ir.target import Target
from ingot.ir.types import TensorType

LIBRARY = "region.so"
# Threads are counted when a region runs: a library must not carry the core count of the machine that built it.
OPTIONS = {"cpp.dynamic_threads": True}
# Any size in a dim's range will do to trace with, as long as export cannot take it for a constant.
_EXAMPLE_SIZE = 7


class Inductor:
    """Takes every fusible op; embedding, attention, cache writes, row selection and sampling stay outside."""

    name = "inductor"
    compiles_regions = True
    compiles_calls = False
    emits_library = False

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cpu":
            return No(f"not built for device '{target.device}' yet")
        if bucket.few_tokens:
            return No("for few tokens calling a region costs more than what it computes")
        for node in nodes:
            op = op_of(node.target)
            if op is not None and not op.fusible:
                return No(f"{target_name(node.target)} stands outside regions")
        return Yes(1.0)

    def cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
        return None

    def takes_apart(self, node: fx.Node, target: Target, bucket: BucketClass) -> bool:
        return False

    def warm_up(self) -> None:
        import torch._inductor.compile_fx  # noqa: F401

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        raise BackendError(f"backend '{self.name}' computes no single calls", where=f"%{node.name}")

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        args = [_example(value_type, sizes) for value_type in body.input_types().values()]
        return measure(str(directory / executable.files[0]), args, threads)

    def sources(self) -> Sequence[Path]:
        """This file and the references, which are what gets compiled."""
        return (Path(__file__), *sorted(Path(ops.__file__).parent.glob("*.py")))

    def toolchain(self) -> dict[str, str]:
        return {"torch": torch.__version__, "c++": compiler_version()}

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        """Compile `body` for any size of its dims. The library takes the inputs in order and allocates its outputs."""
        import torch._inductor  # not at the top: only emitting needs it

        compiler_path()
        module = _Body(body)
        types = list(body.input_types().values())
        dims = {
            dim.name: torch.export.Dim(dim.name, min=dim.lo, max=max(dim.hi, _EXAMPLE_SIZE))
            for dim in body.dims.values()
        }
        args = tuple(_example(value_type, dict.fromkeys(dims, _EXAMPLE_SIZE)) for value_type in types)
        shapes = tuple(
            {axis: dims[size] for axis, size in enumerate(value_type.shape) if isinstance(size, str)}
            for value_type in types
        )
        noise = io.StringIO()
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(noise):
                warnings.simplefilter("ignore")
                exported = torch.export.export(module, args, dynamic_shapes=(shapes,), strict=False)
                built = torch._inductor.aot_compile(
                    exported.module(), args, options={**OPTIONS, "aot_inductor.output_path": str(directory / "build")}
                )
        except Exception as error:  # whatever the compiler stack raises, the user gets one error that names the region
            raise BackendError(
                f"inductor cannot compile region '{body.name}': {type(error).__name__}: {error}",
                hint="compile with --backend reference, and report this",
            ) from error
        assert isinstance(built, str)
        shutil.move(built, directory / LIBRARY)
        shutil.rmtree(directory / "build")
        return Executable(
            id=key,
            backend=self.name,
            inputs=tuple(str(value_type) for value_type in types),
            outputs=tuple(str(node.meta["type"]) for node in body.output_nodes().values()),
            files=(LIBRARY,),
        )

    def emit_library(self, key: str, target: Target, directory: Path) -> Executable:
        raise BackendError(f"backend '{self.name}' compiles regions and has no library")


class _Body(torch.nn.Module):
    """A region's body as a module that runs the references, so that only aten reaches the compiler."""

    def __init__(self, body: Program) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values: dict[fx.Node, Any] = dict(zip(self.body.placeholders(), args, strict=True))
        for node in self.body.calls():
            op = op_of(node.target)
            call: Any = op.reference if op else node.target
            values[node] = call(
                *fx.node.map_arg(node.args, values.__getitem__), **fx.node.map_arg(node.kwargs, values.__getitem__)
            )
        return tuple(values[node] for node in self.body.output_nodes().values())


def _example(value_type: TensorType, sizes: Mapping[str, int]) -> torch.Tensor:
    """Zeros of the type; a strided input keeps its strides."""
    shape = value_type.bind(sizes)
    if value_type.strides is None:
        return torch.zeros(shape, dtype=value_type.dtype)
    return torch.empty_strided(shape, value_type.strides, dtype=value_type.dtype).zero_()
