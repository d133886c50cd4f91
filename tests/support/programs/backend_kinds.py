"""What makes a backend of a test one that compiles calls or has a library, as far as its claims are concerned."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ingot.ir.artifact.plan import Executable
from ingot.ir.machine.target import Target
from ingot.ir.program import Program


class Builds:
    """It builds from no sources, with no compiler."""

    name: str

    def sources(self) -> Sequence[Path]:
        return ()

    def toolchain(self) -> dict[str, str]:
        return {}


class CompilesCalls(Builds):
    """It would compile calls; a test that lets it is wrong."""

    compiles_calls = True

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        raise AssertionError("nothing is compiled here")

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        raise AssertionError("nothing is compiled here")


class HasLibrary(Builds):
    """Its library is an empty file."""

    def emit_library(self, key: str, target: Target, directory: Path) -> Executable:
        (directory / "library").touch()
        return Executable(id=key, backend=self.name, inputs=(), outputs=(), files=("library",))
