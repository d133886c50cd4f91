"""The tensorrt backend at compile time: claims calls with a translation to ONNX, and builds an engine per region."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from math import prod
from pathlib import Path

from torch import fx

from ingot.backends.onnx.translate import untranslated
from ingot.backends.table import claim_cost
from ingot.backends.tensorrt.library import find_library, missing_here, product_here
from ingot.backends.tensorrt.record import ENGINE, NATIVE, RECORD, Record
from ingot.ir import ops
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.backend import No, Yes
from ingot.ir.errors import BackendError
from ingot.ir.layout import Layout
from ingot.ir.machine.extras import require
from ingot.ir.machine.target import Target
from ingot.ir.ops import op_of
from ingot.ir.parse import parse_type
from ingot.ir.program import Program
from ingot.ir.types import TensorType


class Tensorrt:
    """The tensorrt backend. It computes regions of ops with a translation to ONNX on a GPU, by TensorRT.

    It needs the packages of the extra `ingot[tensorrt]`, and a GPU of the target: the builder times kernels on it.
    `missing` takes a target, such as "sm_90", and returns why this machine cannot build for it, or "". None means
    `missing_here`; tests pass another function.
    """

    name = "tensorrt"
    compiles_calls = True  # so that a region's dims have the bounds of its bucket class

    def __init__(self, *, missing: Callable[[str], str] | None = None) -> None:
        self._missing = cache(missing or missing_here)  # called for every call of a program

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cuda":
            return No(f"not for device '{target.device}'")
        for node in nodes:
            if reason := untranslated(node):
                return No(reason)
        if missing := self._missing(target.name):
            return No(missing)
        # An engine reads weights by rows; others would be copied in each step.
        rows = {"weight": Layout.ROW_MAJOR} if any(op_of(node.target) is ops.linear for node in nodes) else {}
        return Yes(claim_cost(self.name) * len(nodes), rows, timed=False)

    def cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
        return None

    def warm_up(self) -> None:
        import onnx  # noqa: F401

    def sources(self) -> Sequence[Path]:
        """Return the files of this backend, of the translations to ONNX, and of the ops, whose meaning these follow."""
        here = Path(__file__).parent
        folders = (here, here.with_name("onnx"), Path(ops.__file__).parent)
        return [path for folder in folders for path in sorted(folder.glob("*.py"))]

    def toolchain(self) -> dict[str, str]:
        """Return the versions of "tensorrt" and "onnx", and the product name of the "gpu" that engines are tuned for.

        Raises TargetError if one of them is missing, or if TensorRT has a version that was never tried.
        """
        purpose = f"the backend '{self.name}'"
        require("onnx", "onnx", purpose, extra=self.name)
        library = find_library(purpose)
        return {"tensorrt": library.__version__, "onnx": version("onnx"), "gpu": product_here()}

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        from ingot.backends.onnx.build import build_model
        from ingot.backends.tensorrt.build import build_engine
        from ingot.backends.tensorrt.profile import profile_of

        if missing := self._missing(target.name):
            raise BackendError(f"the backend '{self.name}' builds no engine: {missing}", where=f"region {body.name}")
        library = find_library(f"the backend '{self.name}'")
        model = build_model(body, NATIVE)
        engine = build_engine(library, model.content, profile_of(body), body.name)
        record = Record(
            tensorrt=library.__version__,
            gpu=product_here(),
            inputs=tuple(body.input_types()),
            results=tuple(dict(one) for one in model.results),
            memory=engine.memory,
        )
        (directory / ENGINE).write_bytes(engine.content)
        (directory / RECORD).write_text(record.model_dump_json(), encoding="utf-8")
        return Executable(
            id=key,
            backend=self.name,
            inputs=tuple(map(str, body.input_types().values())),
            outputs=tuple(str(node.meta["type"]) for node in body.output_nodes().values()),
            files=(ENGINE, RECORD),
        )

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        """Return the bytes of GPU memory that one call allocates: outputs, the engine's memory, and copies of inputs.

        Inputs with gaps are copied, and integers, which are parts of one buffer of step inputs. Needs no GPU.
        """
        record = Record.model_validate_json((directory / RECORD).read_text(encoding="utf-8"))
        outputs = {one["output"]: parse_type(one["type"]) for one in record.results}
        copied = [
            one for one in body.input_types().values() if one.strides is not None or not one.dtype.is_floating_point
        ]
        return record.memory + sum(_bytes(one, sizes) for one in (*outputs.values(), *copied))


def _bytes(value_type: TensorType, sizes: Mapping[str, int]) -> int:
    return prod(value_type.bind(sizes)) * value_type.dtype.itemsize
