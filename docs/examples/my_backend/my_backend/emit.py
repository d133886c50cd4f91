"""The compile side: claims `silu_mul`, and compiles C code for the shapes and strides of each call."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import fx

from ingot.backends.toolchain import compiler_path, compiler_version
from ingot.ir import ops
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.backend import No, Yes
from ingot.ir.errors import BackendError
from ingot.ir.machine.target import Target
from ingot.ir.ops import op_of
from ingot.ir.program import Program, tensor_type
from ingot.ir.types import DTYPE_NAMES, TensorType

LIBRARY = "gate.so"
_DTYPES = (torch.float32, torch.bfloat16)
_CODE = """\
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float f32;
typedef uint16_t bf16;  /* the upper half of a float */

static inline float read_f32(f32 x) { return x; }
static inline f32 round_f32(float x) { return x; }
static inline float read_bf16(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static inline bf16 round_bf16(float x) {  /* to the nearest, ties to even */
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return isnan(x) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

void gate(DTYPE *out, const DTYPE *gate, const DTYPE *up, int64_t tokens) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < WIDTH; ++i) {
      float g = read_DTYPE(gate[t * GATE_STRIDE + i]), u = read_DTYPE(up[t * UP_STRIDE + i]);
      out[t * WIDTH + i] = round_DTYPE(g / (1 + expf(-g)) * u);
    }
}
"""


class CGates:
    """The backend `c_gates`: `silu_mul` in C, in steps of any size."""

    name = "c_gates"
    compiles_calls = False  # it compiles regions, here of one call each

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        for node in nodes:
            if op_of(node.target) is not ops.silu_mul:
                return No("it has silu_mul only")
            for one in node.all_input_nodes:
                if reason := _unreadable(tensor_type(one)):
                    return No(reason)
        # Half of what `cpu` states for few tokens. The bits of a row do not depend on other rows.
        return Yes(cost=0.25 * len(nodes), batch_invariant=True)

    def cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
        return [[node] for node in nodes]

    def warm_up(self) -> None:
        """Nothing to import: a C compiler is a process of its own."""

    def sources(self) -> Sequence[Path]:
        return (Path(__file__),)

    def toolchain(self) -> dict[str, str]:
        return {"c++": compiler_version()}

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        (node,) = body.calls()
        gate, up = (tensor_type(one) for one in node.all_input_nodes)
        values = {"DTYPE": DTYPE_NAMES[gate.dtype], "WIDTH": gate.shape[1]}
        values |= {"GATE_STRIDE": _row_stride(gate), "UP_STRIDE": _row_stride(up)}
        code = _CODE
        for name, value in sorted(values.items(), reverse=True):
            code = code.replace(name, str(value))
        command = [compiler_path(), "-x", "c", "-", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC"]
        done = subprocess.run(
            [*command, "-lm", "-o", str(directory / LIBRARY)], input=code.encode(), capture_output=True
        )
        if done.returncode:
            raise BackendError("the C compiler refuses the code", where=done.stderr.decode()[-500:])
        return Executable(
            id=key,
            backend=self.name,
            inputs=tuple(map(str, body.input_types().values())),
            outputs=tuple(str(node.meta["type"]) for node in body.output_nodes().values()),
            files=(LIBRARY,),
        )

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        """The code allocates its result alone."""
        (result,) = (tensor_type(node) for node in body.output_nodes().values())
        rows, width = result.bind(sizes)
        return rows * width * result.dtype.itemsize


def _unreadable(value_type: TensorType) -> str:
    """Return why the C code cannot read a tensor, or "" if it can: rows of f32 or bf16, each contiguous."""
    if value_type.dtype not in _DTYPES or len(value_type.shape) != 2:
        return f"no code for {value_type}"
    return "" if value_type.strides is None or value_type.strides[1] == 1 else f"no code for {value_type}"


def _row_stride(value_type: TensorType) -> object:
    return value_type.shape[1] if value_type.strides is None else value_type.strides[0]
