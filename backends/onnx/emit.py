"""The onnx backend at compile time: claims calls that have a translation, and writes an ONNX model per region."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from torch import fx

from ingot.backends.onnx.model import MODEL
from ingot.backends.onnx.translate import untranslated
from ingot.backends.table import claim_cost
from ingot.ir import ops
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.backend import No, Yes
from ingot.ir.layout import Layout
from ingot.ir.machine.extras import require
from ingot.ir.machine.target import Target
from ingot.ir.ops import op_of
from ingot.ir.program import Program


class Onnx:
    """The onnx backend. It computes regions of ops with a translation on a CPU, by ONNX Runtime.

    It needs the packages of the extra `ingot[onnx]`. Regions in 16-bit dtypes compute in float32, and round where the
    ops round.
    """

    name = "onnx"
    compiles_calls = True  # so that a call alone can be timed against other backends

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cpu":
            return No(f"not for device '{target.device}'")
        for node in nodes:
            if reason := untranslated(node):
                return No(reason)
        # A weight by columns would be copied in each step.
        rows = {"weight": Layout.ROW_MAJOR} if any(op_of(node.target) is ops.linear for node in nodes) else {}
        return Yes(claim_cost(self.name) * len(nodes), rows)

    def cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
        return None

    def warm_up(self) -> None:
        import onnx  # noqa: F401

    def sources(self) -> Sequence[Path]:
        """Return the files of this backend, and those of the ops, whose meaning the translations follow."""
        own = Path(__file__).parent.glob("*.py")
        return (*sorted(own), *sorted(Path(ops.__file__).parent.glob("*.py")))

    def toolchain(self) -> dict[str, str]:
        for package in ("onnx", "onnxruntime"):
            require(package, package, "the backend 'onnx'", extra="onnx")
        return {package: version(package) for package in ("onnx", "onnxruntime")}

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        from ingot.backends.onnx.build import build_model

        (directory / MODEL).write_bytes(build_model(body).content)
        return Executable(
            id=key,
            backend=self.name,
            inputs=tuple(map(str, body.input_types().values())),
            outputs=tuple(str(node.meta["type"]) for node in body.output_nodes().values()),
            files=(MODEL,),
        )

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        from ingot.backends.onnx.memory import peak_bytes

        copies = [one.bind(sizes) for one in body.input_types().values() if one.strides is not None]
        types = [one for one in body.input_types().values() if one.strides is not None]
        copied = sum(_bytes(shape, one.dtype.itemsize) for shape, one in zip(copies, types, strict=True))
        return copied + peak_bytes((directory / MODEL).read_bytes(), sizes)


def _bytes(shape: Sequence[int], itemsize: int) -> int:
    total = itemsize
    for size in shape:
        total *= size
    return total
