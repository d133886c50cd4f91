"""Search tile sizes of matmuls with quantized weights for one token on this GPU.

    python benchmarks/kernels/sweep_one_token.py [--shape 8b] [--formats fp8,int4_g128] [--parts qkv,down] [--json FILE]

Several processes compile kernels, and this one times them, so nothing else runs on the GPU. Each time is the least of
several replays of a CUDA graph. Calls of a graph read different random weights, two GB of them or 128 calls, which no
cache holds. The last result is compared with the op's reference in float32, in a buffer that held NaN before.

Then the matmuls of 32 layers run in sequence, with a pause in place of attention, because a kernel must leave room for
the next one: with the tile sizes of a compile, with the fastest ones of each matmul, and with others of the fastest.
Tile sizes that do not compile, do not fit or compute a wrong result are reported, and the search goes on.

With --dry, kernels are compiled for sm_90 only, without a GPU. Registers and bytes of spilled registers are printed.
"""

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import benchmarks_path  # noqa: F401
import torch
import triton
from copy_bandwidth import copy_bandwidth
from device_times import Recorded, take_turns, this_machine
from linear_products import MACHINE, Decoder
from linear_stack import pause
from one_token_tiles import one_token_tiles
from quant_linear import Case, Inputs, cases, expected, inputs_of, launcher, ours, schedule_of
from random_checkpoint import SHAPES
from triton import knobs

from ingot.backends.triton.lower.quant.tiles import QuantMatvecTiles
from ingot.backends.triton.tune.device import DEVICE, Launcher, Machine, captured, compile_launches
from ingot.backends.triton.tune.search import compilers

FORMATS = "fp8,fp8_block128,fp8_per_channel_per_token,int4_g128,int8"
ROUNDS = 7  # replays of a graph; the least counts
KEPT = 4  # fastest tile sizes of a matmul that run in layers
LAYERS = 32


@dataclass(frozen=True)
class Usage:
    """The registers of a thread, and the bytes of its spilled registers, of a compiled kernel."""

    registers: int
    spilled: int


@dataclass(frozen=True)
class Found:
    """The time of a matmul with certain tile sizes, or the reason why there is none."""

    case: Case
    tiles: QuantMatvecTiles
    usage: Usage | None = None
    microseconds: float | None = None
    error: str | None = None

    def row(self) -> dict[str, Any]:
        usage = asdict(self.usage) if self.usage else {}
        names = {"format": self.case.format.name, "part": self.case.part, "tiles": asdict(self.tiles)}
        return {**names, "microseconds": self.microseconds, "usage": usage, "error": self.error}


def compile_tiles(machine: Machine, case: Case, tiles: QuantMatvecTiles) -> Usage:
    """Compile a matmul's kernel into Triton's cache on disk, without a GPU, and return what it uses."""
    (kernel,) = compile_launches(schedule_of(machine, case, tiles)[0], {"T": 1})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", printed)
    if used is None:
        raise RuntimeError(f"cuobjdump printed no registers: {printed[:200]}")
    registers, stack, local = map(int, used.groups())
    return Usage(registers, stack + local)


class Sweep:
    """The search of one format: `found` has all times, and `inputs` the random inputs of each matmul."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.found: list[Found] = []
        self.inputs: dict[Case, list[Inputs]] = {}

    def time_case(self, case: Case, compiling: Mapping["Future[Usage]", QuantMatvecTiles], deadline: float) -> None:
        """Time a matmul with each of the tile sizes in the order in which they are compiled, until `deadline`."""
        generator = torch.Generator(DEVICE).manual_seed(1)
        inputs = self.inputs[case] = [inputs_of(case, generator) for _ in range(case.calls)]
        wanted = expected(case, inputs[-1])
        for future in as_completed(compiling):
            found = Found(case, compiling[future])
            try:
                found = replace(found, usage=future.result())
                if time.monotonic() > deadline:
                    raise RuntimeError("no time was left")
                graph = ours(self.machine, case, inputs, wanted, found.tiles)
                seconds = min(take_turns({"triton": graph}, ROUNDS)["triton"])
                found = replace(found, microseconds=round(seconds * 1e6, 3))
            except Exception as error:  # whatever a compiler or driver raises must not end the search
                found = replace(found, error=f"{type(error).__name__}: {error}"[:300])
                print(f"  {case.call.what}: {found.tiles}: {found.error}", flush=True)
            self.found.append(found)

    def best(self, case: Case) -> list[Found]:
        """Return the times of a matmul, the least first."""
        timed = [one for one in self.found if one.case == case and one.microseconds is not None]
        return sorted(timed, key=lambda one: one.microseconds or 0.0)

    def layers(self, chosen: Mapping[Case, QuantMatvecTiles]) -> float:
        """Return the microseconds of the matmuls of a layer in sequence, with these tile sizes, and of a pause."""
        calls: dict[Case, Launcher] = {}
        for case, tiles in chosen.items():
            calls[case] = launcher(self.machine, case, tiles)
            calls[case](self.inputs[case][0])
        pause()
        launches = []
        for layer in range(LAYERS):
            for case, call in calls.items():
                launches.append(partial(call, self.inputs[case][layer % len(self.inputs[case])]))
                if case.part == "qkv":
                    launches.append(pause)
        return min(take_turns({"triton": Recorded(captured(launches), LAYERS, calls)}, ROUNDS)["triton"]) * 1e6

    def best_layers(self, every: Sequence[Case], compiled: Mapping[Case, QuantMatvecTiles]) -> dict[str, Any]:
        """Time layers, change the tile sizes of one matmul after another to the fastest for a layer, and return it."""
        chosen = {case: self.best(case)[0].tiles for case in every}
        found = {"compile": self.layers(compiled), "fastest": self.layers(chosen)}
        least = found["fastest"]
        for case in every:
            for other in self.best(case)[1:KEPT]:
                tried = {**chosen, case: other.tiles}
                if (took := self.layers(tried)) < least:
                    least, chosen = took, tried
        return {**found, "best": least, "tiles": {case.part: asdict(tiles) for case, tiles in chosen.items()}}


def print_table(sweep: Sweep, case: Case, compiled: QuantMatvecTiles, copy: float) -> None:
    """Print the fastest tile sizes of a matmul, and those of a compile."""
    for nth, one in enumerate(ordered := sweep.best(case)):
        if nth < KEPT or one.tiles == compiled:
            share = case.call.bytes / copy / ((one.microseconds or 0.0) * 1e-6)
            sizes = " ".join(f"{name}={size}" for name, size in asdict(one.tiles).items())
            mark = "compile" if one.tiles == compiled else f"{nth + 1}/{len(ordered)}"
            print(f"{case.call.what:28} {one.microseconds:8.2f} us {share:4.0%} {mark:8} {sizes}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--formats", default=FORMATS, help="names of formats, separated by commas")
    parser.add_argument("--parts", default="qkv,o,gate_up,down", help="matmuls, separated by commas")
    parser.add_argument("--seconds", type=float, default=140.0, help="seconds after which nothing more is timed")
    parser.add_argument("--json", type=Path, help="file for all times")
    parser.add_argument("--dry", action="store_true", help="compile only, without a GPU")
    options = parser.parse_args()
    deadline, parts = time.monotonic() + options.seconds, options.parts.split(",")
    machine = MACHINE if options.dry else this_machine()
    decoder, names = Decoder.of(options.shape), options.formats.split(",")
    copy = 0.0 if options.dry else copy_bandwidth("cuda")
    rows: list[dict[str, Any]] = []
    layers: dict[str, Any] = {}
    with compilers() as pool:
        work: dict[str, dict[Case, dict[Future[Usage], QuantMatvecTiles]]] = {name: {} for name in names}
        compiled: dict[Case, QuantMatvecTiles] = {}
        for name in names:
            for case in cases(decoder, [name], [1]):
                if case.part in parts:
                    (choice,) = schedule_of(machine, case)[0].choices
                    compiled[case] = QuantMatvecTiles(**choice.tiles)
                    searched = one_token_tiles(compiled[case], case.problem.product(), case.format)
                    work[name][case] = {pool.submit(compile_tiles, machine, case, tiles): tiles for tiles in searched}
        for name, every in work.items():
            sweep = Sweep(machine)
            for case, compiling in every.items():
                if options.dry:
                    _print_usage(case, compiling)
                else:
                    sweep.time_case(case, compiling, deadline)
                    print_table(sweep, case, compiled[case], copy)
            rows += [one.row() for one in sweep.found]
            if not options.dry and len(parts) > 1 and all(sweep.best(case) for case in every):
                layers[name] = sweep.best_layers(list(every), {case: compiled[case] for case in every})
                print(f"{name}: a layer and a pause, us: {layers[name]}", flush=True)
            del sweep
            if not options.dry:
                torch.cuda.empty_cache()
            if options.json is not None:
                document = {"triton": triton.__version__, "copy": copy, "layers": layers, "all": rows}
                options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _print_usage(case: Case, compiling: Mapping["Future[Usage]", QuantMatvecTiles]) -> None:
    for future in as_completed(compiling):
        error = future.exception()
        print(case.call.what, compiling[future], error or future.result(), flush=True)


if __name__ == "__main__":
    main()
