"""The cpu provider, compile side: builds the library of C++ kernels once for a target."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from torch import fx

from ingot.backends.toolchain import compiler_path, compiler_version
from ingot.ir.backend import No, Yes
from ingot.ir.errors import BackendError
from ingot.ir.ops import kv_append, op_of, paged_attention
from ingot.ir.plan import BucketClass, Executable
from ingot.ir.program import Program, target_name
from ingot.ir.target import Target

LIBRARY = "kernels.so"
KERNELS = Path(__file__).with_name("kernels.cpp")
# The instruction sets of this machine, and what vector code needs of the freedom that IEEE leaves: sums in any order,
# no traps, no errno. Not -ffast-math, under which NaN and infinity would mean nothing.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-shared",
    "-fPIC",
)
_OPS = (kv_append, paged_attention)


class Cpu:
    """Attention over the paged cache, and writing to it."""

    name = "cpu"
    compiles_regions = False
    emits_library = True

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cpu":
            return No(f"not for device '{target.device}'")
        for node in nodes:
            if op_of(node.target) not in _OPS:
                return No(f"no kernel for {target_name(node.target)}")
        # A cache write copies; attention takes another way for many tokens of a sequence than for few.
        return Yes(1.0, batch_invariant=all(op_of(node.target) is kv_append for node in nodes))

    def sources(self) -> Sequence[Path]:
        return (Path(__file__), KERNELS)

    def toolchain(self) -> dict[str, str]:
        return {"c++": compiler_version()}

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        raise BackendError(f"backend '{self.name}' computes single calls and compiles no regions", where=body.name)

    def emit_library(self, key: str, target: Target, directory: Path) -> Executable:
        """Build the kernels for this machine into `directory`."""
        command = [compiler_path(), *FLAGS, "-o", str(directory / LIBRARY), str(KERNELS)]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            raise BackendError("the C++ compiler cannot build the kernels", where=built.stderr.strip()[-2000:])
        return Executable(id=key, backend=self.name, inputs=(), outputs=(), files=(LIBRARY,))
