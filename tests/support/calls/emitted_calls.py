"""Compiles calls of ops with the triton backend, many at a time in processes of their own."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from call_cases import OF_ONE_DTYPE, cases
from one_call import SYMBOLS, TARGET, OneCall

from ingot.backends.triton.emit import Triton
from ingot.ir.artifact.plan import Executable
from ingot.ir.backend import No

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Every op that is claimed (`lowered` has them from the backend), in every dtype that its arguments may have.
CLAIMED = [(op, dtype) for op in SYMBOLS for dtype in (DTYPES if op not in OF_ONE_DTYPE else DTYPES[:1])]


@dataclass(frozen=True)
class Emitted:
    """What became of a call: an executable and its folder, or why there is none."""

    executable: Executable | None
    folder: Path
    refused: str = ""


def calls(op: str, dtype: torch.dtype) -> list[OneCall]:
    """Of float16 every second one: kernels for it differ from those for bfloat16 in a type alone."""
    return cases(op, dtype)[:: 2 if dtype == torch.float16 else 1]


def emit_call(op: str, dtype: torch.dtype, number: int, folder: Path) -> Emitted:
    """Claim and compile a call as the driver does."""
    call, backend = calls(op, dtype)[number], Triton()
    body = call.body()
    assert body.bucket is not None
    claim = backend.claim([call.call_of(body)], TARGET, body.bucket)
    if isinstance(claim, No):
        return Emitted(None, folder, claim.reason)
    own = folder / f"{op}-{str(dtype).removeprefix('torch.')}-{number}"
    own.mkdir()
    return Emitted(backend.emit(body, own.name, TARGET, own), own)


def lowered() -> set[str]:
    """The ops that have kernels. Only processes that compile import these: see `emitting`."""
    from ingot.backends.triton.lower.table import LOWERINGS

    return set(LOWERINGS)


@dataclass(frozen=True)
class Emitting:
    """Gives the futures of an op's calls, in their order."""

    pool: ProcessPoolExecutor
    folder: Path

    def submit(self, op: str, dtype: torch.dtype, most: int | None = None) -> list[Future[Emitted]]:
        numbers = range(len(calls(op, dtype)))[:most]
        return [self.pool.submit(emit_call, op, dtype, number, self.folder) for number in numbers]


@contextmanager
def emitting(folder: Path) -> Iterator[Emitting]:
    """Processes that compile into `folder`. What is not begun at the end is dropped."""
    # Tests that run kernels without a GPU turn Triton's interpreter on, and what is imported then cannot be compiled.
    interpreter = os.environ.pop("TRITON_INTERPRET", None)
    # Spawned: a process that has used a GPU cannot be forked.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(len(os.sched_getaffinity(0)), context)
    try:
        yield Emitting(pool, folder)
    finally:
        pool.shutdown(cancel_futures=True)
        if interpreter is not None:
            os.environ["TRITON_INTERPRET"] = interpreter
