"""Compile a region's program into a shared library, with torch.export and AOTInductor."""

import contextlib
import io
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ingot.backends.inductor.library import LIBRARIES
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import BackendError
from ingot.ir.ops import op_of
from ingot.ir.program import Program
from ingot.ir.types import TensorType


def compile_region(
    body: Program, key: str, directory: Path, *, device: str, example: int, options: Mapping[str, Any], hint: str
) -> Executable:
    """Compile a region (connected calls of a program) with AOTInductor into a shared library in `directory`.

    The returned Executable describes the library; `key` is its id. `body` is the region's program. torch.export traces
    it on fake tensors on `device`. In the trace every symbolic dim has the size `example`, but the library supports all
    sizes. `options` are options of AOTInductor. If the compiler fails, it raises BackendError with `hint`.

    The library takes the program's inputs in order, weights included. It allocates its outputs.
    """
    import torch._inductor  # not at the top: only emitting needs it

    types = list(body.input_types().values())
    dims = {dim.name: torch.export.Dim(dim.name, min=dim.lo, max=max(dim.hi, example)) for dim in body.dims.values()}
    with FakeTensorMode():
        args = tuple(example_of(value_type, dict.fromkeys(dims, example), device) for value_type in types)
    shapes = tuple(
        {axis: dims[size] for axis, size in enumerate(value_type.shape) if isinstance(size, str)}
        for value_type in types
    )
    build = directory / "build"
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            exported = torch.export.export(_Body(body), args, dynamic_shapes=(shapes,), strict=False)
            built = torch._inductor.aot_compile(
                exported.module(), args, options={**options, "aot_inductor.output_path": str(build)}
            )
    except Exception as error:  # the compiler stack raises many types; the user gets one error that names the region
        raise BackendError(
            f"inductor cannot compile region '{body.name}': {type(error).__name__}: {error}", hint=hint
        ) from error
    assert isinstance(built, str)
    shutil.move(built, directory / LIBRARIES[device])
    shutil.rmtree(build)
    return Executable(
        id=key,
        backend="inductor",
        inputs=tuple(map(str, types)),
        outputs=tuple(str(node.meta["type"]) for node in body.output_nodes().values()),
        files=(LIBRARIES[device],),
    )


class _Body(torch.nn.Module):
    """The program of a region (calls compiled together) as a module for torch.export.

    It calls the reference implementation of each op, so the exported graph has aten ops only.
    """

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


def example_of(value_type: TensorType, sizes: Mapping[str, int], device: str) -> torch.Tensor:
    """Return a tensor of zeros on `device`, with the shape, dtype and strides of `value_type`.

    `sizes` maps symbolic dims, such as "T", to sizes.
    """
    shape = value_type.bind(sizes)
    if value_type.strides is None:
        return torch.zeros(shape, dtype=value_type.dtype, device=device)
    return torch.empty_strided(shape, value_type.strides, dtype=value_type.dtype, device=device).zero_()
