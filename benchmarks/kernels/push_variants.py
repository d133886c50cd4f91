"""Variants of the kernel that pushes: bytes of a chunk, programs on a multiprocessor, and warps of a program.

They are compiled once, and loaded by each rank. `collectives.py --sweep` measures them.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ingot.backends.peer.emit import compiled, push_launch
from ingot.backends.peer.layout import PUSH_RANKS, VECTOR_BYTES, shared_bytes
from ingot.backends.peer.memory import PeerMemory
from ingot.backends.peer.prepared import PreparedPush, aligned
from ingot.backends.torch_cuda import current_stream
from ingot.backends.triton.launches import WARP, Launch
from ingot.backends.triton.load import load_function, resident_blocks
from ingot.ir.machine.target import Target
from ingot.ir.types import TensorType

# Vectors of a chunk that a thread reads at once, at most. Twice as many need more than 100 registers.
_MOST_VECTORS = 8


@dataclass(frozen=True)
class Variant:
    """One choice. `name` is such as "16384x2x8"."""

    chunk_bytes: int
    per_core: int
    warps: int

    @property
    def name(self) -> str:
        return f"{self.chunk_bytes}x{self.per_core}x{self.warps}"


VARIANTS = tuple(
    Variant(chunk_bytes, per_core, warps)
    for chunk_bytes in (8 << 10, 16 << 10, 32 << 10)
    for per_core in (1, 2, 4)
    for warps in (4, 8, 16)
    if chunk_bytes <= _MOST_VECTORS * warps * WARP * VECTOR_BYTES
)


def compile_variants(folder: Path, target: Target) -> None:
    """Compile all variants for sums of bfloat16, without a residual and with one, into `folder`."""
    assert target.sm is not None
    dependent = "dependent_launch" in target.features
    value_type = TensorType(torch.bfloat16, ("T", 8))
    for chunk_bytes, warps in {(one.chunk_bytes, one.warps): None for one in VARIANTS}:
        for adds in (False, True):
            made = push_launch(value_type, adds=adds, dependent=dependent, chunk_bytes=chunk_bytes, warps=warps)
            launch = compiled(made, target.sm, folder)
            _launch_file(folder, chunk_bytes, warps, adds).write_text(launch.model_dump_json())


def variants_bytes(cores: int) -> int:
    """Return the bytes of shared memory that suffice for each variant, on a GPU of so many multiprocessors."""
    return max(shared_bytes(PUSH_RANKS, one.per_core * cores, one.chunk_bytes) for one in VARIANTS)


def load_variants(folder: Path, peers: PeerMemory, cores: int) -> dict[str, Callable[..., list[torch.Tensor]]]:
    """Return a call for each variant: "push_NAME" adds x, and "push_add_NAME" adds x and a residual.

    A variant is left out, with a line on stderr, if the GPU cannot run all of its programs at once. All variants use
    one memory, so both GPUs must have ended all calls of one before the first call of another.
    """
    found: dict[str, Callable[..., list[torch.Tensor]]] = {}
    for one in VARIANTS:
        for adds in (False, True):
            text = _launch_file(folder, one.chunk_bytes, one.warps, adds).read_text()
            launch = Launch.model_validate_json(text)
            function = load_function(folder / launch.kernel, launch.entry, launch.shared)
            name = f"push_add_{one.name}" if adds else f"push_{one.name}"
            if (resident := resident_blocks(function, launch)) < one.per_core:
                if peers.place == 0:
                    print(f"{name} is left out: a multiprocessor has room for {resident}", file=sys.stderr)
                continue
            push = PreparedPush(peers, launch, function, one.per_core * cores, one.chunk_bytes)
            found[name] = partial(_call, push)
    return found


def _call(push: PreparedPush, *given: torch.Tensor) -> list[torch.Tensor]:
    inputs, result = aligned(*given)
    push(inputs, result, current_stream(result.device))
    return [result]


def _launch_file(folder: Path, chunk_bytes: int, warps: int, adds: bool) -> Path:
    return folder / f"{chunk_bytes}x{warps}{'-add' if adds else ''}.json"
