"""Matmuls that read weights from registers are complete before these are written again."""

from pathlib import Path

import pytest
from drawn import drawn
from sm_90 import run_without_interpreter

from ingot.backends.triton.compile import early_writes

LOOP = """
  %sums = ttng.warp_group_dot %a, %b, %before {isAsync = true} : tensor<64x16xbf16, #a> * !ttg.memdesc<16x64xbf16, #b>
  %done:2 = ttng.warp_group_dot_wait %sums, %b {pendings = 3 : i32} : tensor<64x64xf32, #mma>, !ttg.memdesc<16x64xbf16>
"""


def test_waits_are_read() -> None:
    assert early_writes(LOOP)
    assert not early_writes(LOOP.replace("pendings = 3", "pendings = 0"))
    assert not early_writes(LOOP.replace(": tensor<64x16xbf16", ": !ttg.memdesc<64x16xbf16")), "from shared memory"
    assert not early_writes("")


SCRIPT = """
import json
import triton
from ingot.backends.triton.compile import compile_kernel
from ingot.backends.triton.kernels.quant import tile
from ingot.backends.triton.tune.device import Machine
from ingot.backends.triton.tune.experts import Mixture, make_schedule
from ingot.ir.errors import BackendError


@triton.jit
def as_they_are(sums, ELEMENTS):
    return sums


if AT_ONCE:
    tile.complete = as_they_are
found = {}
mixture = Mixture(256, 256, experts=4, top_k=2, formats=(FORMAT, FORMAT))
for launch in make_schedule(Machine(sm=90, cores=132), mixture, 600)[0].launches:
    if launch.kernel.fn.__name__ == "quant_experts_down_tile":
        try:
            compile_kernel(launch, 90)
            found[launch.constants["TOKENS"]] = ""
        except BackendError as error:
            found[launch.constants["TOKENS"]] = str(error)
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("format", "blocks"), drawn(1, [("mxfp4", {"64"}), ("nvfp4", {"64", "128"}), ("int8", {"64", "128"})])
)
def test_quantized_weights(format: str, blocks: set[str], tmp_path: Path) -> None:
    """Without `complete`, Triton's loop has the fault, and the kernel is refused."""
    for at_once in (False, True):
        script = tmp_path / f"{at_once}.py"
        script.write_text(SCRIPT.replace("AT_ONCE", str(at_once)).replace("FORMAT", repr(format)))
        problems = run_without_interpreter(script)
        assert problems.keys() == blocks, "choices of a block"
        for problem in problems.values():
            assert ("that an unfinished matmul still reads" in problem) is at_once
