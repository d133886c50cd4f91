"""Measure a decoder's matmuls of many tokens by matrices that are made of quantized weights, on this GPU.

    python benchmarks/kernels/dequantize.py [--shape 8b] [--formats int4_g128,int8] [--tokens 128,512,2048]

Prints microseconds of a call, and the share of the copy bandwidth that the kernel `dequantize` reaches:

    matrix    the kernel alone
    both      the kernel, and cuBLAS with the matrix
    elements  the matmul that converts elements (`quant_tile`), with the norm, gate or residual of its region
    cublas    cuBLAS alone, in bf16

A CUDA graph of each holds a sequence of calls over different random weights. The graphs take turns. Matrices are
compared with the op's reference.
"""

import argparse
from functools import partial
from statistics import median

import benchmarks_path  # noqa: F401
import quant_linear as quantized
import torch
from copy_bandwidth import copy_bandwidth
from device_times import Recorded, check, take_turns, this_machine
from linear_products import Decoder

from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.quant.dequantize import LOWERINGS
from ingot.backends.triton.schedule import Schedule, Value
from ingot.backends.triton.tune.device import DEVICE, Launcher, Machine, captured
from ingot.ir import ops
from ingot.ir.artifact.plan import GPU_FEW_TOKENS, BucketClass
from ingot.ir.formats import PARTS
from ingot.ir.types import TensorType

_BF16 = torch.bfloat16
_NAMES = ops.dequantize.parameters.names[: ops.dequantize.parameters.positional]


def launcher(machine: Machine, case: quantized.Case) -> Launcher:
    """Return a function that launches the kernel on the inputs of a matmul."""
    types = case.types
    values = {name: Value(types[name], input=1 + PARTS.index(name)) if name in types else None for name in _NAMES}
    result = TensorType(_BF16, (case.problem.rows, case.problem.depth))
    bucket = BucketClass(name="measured", tokens=(GPU_FEW_TOKENS + 1, 8192))
    schedule = Schedule(machine.sm, machine.cores, bucket, dependent=machine.dependent)
    call = Call("dequantize", values, {"format": case.format.name, "dtype": _BF16}, (result,))
    (output,) = LOWERINGS["dequantize"](call, schedule)
    return Launcher(schedule, output, {"T": case.tokens})


def measure(machine: Machine, case: quantized.Case) -> dict[str, list[float]]:
    """Return the seconds of a call in each round of measurement, by way."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    inputs = [quantized.inputs_of(case, generator) for _ in range(case.calls)]
    made = launcher(machine, case)
    made(inputs[-1])
    given = [inputs[-1][1 + PARTS.index(name)] for name in _NAMES]
    matrix = ops.dequantize.reference(*given, format=case.format.name, dtype=_BF16)
    product = torch.empty(case.tokens, case.problem.rows, dtype=_BF16, device=DEVICE)

    def both(one: quantized.Inputs) -> None:
        made(one)
        torch.mm(one[0], made.output.T, out=product)

    both(inputs[-1])
    ways = {
        "matrix": check(
            Recorded(captured(partial(made, one) for one in inputs), len(inputs), made), made.output, matrix
        ),
        "both": Recorded(captured(partial(both, one) for one in inputs), len(inputs), made),
        "elements": quantized.ours(machine, case, inputs, quantized.expected(case, inputs[-1]), None),
        "cublas": quantized.cublas(case),
    }
    return take_turns(ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", help="the decoder whose matmuls are measured")
    parser.add_argument("--formats", default="int4_g128,int8", help="names of formats, separated by commas")
    parser.add_argument("--tokens", default="128,256,512,2048", help="tokens of steps, separated by commas")
    options = parser.parse_args()
    machine, bandwidth = this_machine(), copy_bandwidth("cuda")
    steps = [int(count) for count in options.tokens.split(",")]
    for case in quantized.cases(Decoder.of(options.shape), options.formats.split(","), steps):
        times = {way: median(rounds) for way, rounds in measure(machine, case).items()}
        moved = case.call.bytes + case.problem.rows * case.problem.depth * _BF16.itemsize
        share = moved / times["matrix"] / bandwidth
        listed = ", ".join(f"{way} {seconds * 1e6:.1f} us" for way, seconds in times.items())
        print(f"{case.call.what}: {listed}; matrix at {share:.0%} of copy bandwidth", flush=True)


if __name__ == "__main__":
    main()
