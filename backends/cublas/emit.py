"""The cublas provider, compile side: claims matrix products. There is nothing to compile."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from ingot.ir.backend import No, Yes
from ingot.ir.errors import BackendError
from ingot.ir.ops import linear, op_of
from ingot.ir.plan import BucketClass, Executable
from ingot.ir.program import Program, target_name, tensor_type
from ingot.ir.target import Target
from ingot.ir.types import DTYPE_NAMES

# Behind kernels that fuse what stands around a product, in front of the reference.
_COST = 1.0


class Cublas:
    """Products of many tokens."""

    name = "cublas"
    compiles_regions = False
    compiles_calls = False
    emits_library = False

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cuda":
            return No(f"not for device '{target.device}'")
        for node in nodes:
            if op_of(node.target) is not linear:
                return No(f"it has no {target_name(node.target)}")
            dtypes = {tensor_type(source).dtype for source in node.all_input_nodes}
            if len(dtypes) > 1:
                return No("no product of " + " and ".join(sorted(DTYPE_NAMES[dtype] for dtype in dtypes)))
        return Yes(_COST * len(nodes))

    def cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
        return None

    def takes_apart(self, node: fx.Node, target: Target, bucket: BucketClass) -> bool:
        return False

    def warm_up(self) -> None:
        pass  # it emits nothing

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        return linear.costliest

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        raise BackendError(f"backend '{self.name}' compiles no regions", where=body.name)

    def sources(self) -> Sequence[Path]:
        return ()

    def toolchain(self) -> dict[str, str]:
        return {}

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        raise BackendError(f"backend '{self.name}' computes single calls and compiles no regions", where=body.name)

    def emit_library(self, key: str, target: Target, directory: Path) -> Executable:
        raise BackendError(f"backend '{self.name}' has no library")
