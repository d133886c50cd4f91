"""The base class of compile sides of backends that have ready functions, and emit, build and measure nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import fx

from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.errors import BackendError
from ingot.ir.machine.target import Target
from ingot.ir.program import Program


class EmitsNothing:
    """A compile side that emits nothing. The backend itself defines its claims and `dry_run`."""

    name: str
    compiles_regions = False
    compiles_calls = False
    emits_library = False

    def cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
        return None

    def takes_apart(self, node: fx.Node, target: Target, bucket: BucketClass) -> bool:
        return False

    def warm_up(self) -> None:
        pass

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
