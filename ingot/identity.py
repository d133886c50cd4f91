"""The identities that name work before it is done: `exe_key` of an executable, `request_key` of a compile."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ingot.frontend.checkpoint import Checkpoint
from ingot.ir import ops
from ingot.ir.backend import Backend
from ingot.ir.digest import digest_files
from ingot.ir.json_text import dump_json
from ingot.ir.ops import OPS, Op, op_of
from ingot.ir.plugins import load_user_ops
from ingot.ir.program import Program, Region
from ingot.ir.target import Target
from ingot.ir.text import print_program, print_region_body
from ingot.passes.pipeline import Phase

# What a program's text means, and how it becomes another: any change in these rooms is another compile.
_ROOMS = ("ir", "passes", "backends")


def _digest(value: Any) -> str:
    return hashlib.sha256(dump_json(value).encode()).hexdigest()


def _digest_sources(files: list[Path]) -> str:
    """SHA-256 over source files by name and text."""
    return _digest([[file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file in sorted(files)])


def _user_sources(ops: Iterable[Op]) -> list[Path]:
    """The files that define those of the ops which other packages bring."""
    files = {Path(op.reference.__code__.co_filename) for op in ops if not op.reference.__module__.startswith("ingot.")}
    return sorted(file for file in files if file.is_file())


def exe_key(region: Region | None, backend: Backend, target: Target) -> str:
    """What an executable depends on, and nothing else; free of weights and names, so fine-tunes share it.

    None stands for the backend's library of kernels.
    """
    called = [] if region is None else [op_of(node.target) for node in region.body.calls()]
    sources = [*backend.sources(), *_user_sources(op for op in called if op is not None)]
    return _digest(
        {
            "body": None if region is None else print_region_body(region.body),
            "backend": backend.name,
            "sources": _digest_sources(sources),
            "toolchain": backend.toolchain(),
            "target": target.identity(),
        }
    )


def request_key(
    checkpoint: Checkpoint,
    entries: Mapping[str, Program],
    pipeline: tuple[Phase, ...],
    backends: tuple[Backend, ...],
    target: Target,
    options: Mapping[str, Any],
) -> str:
    """All that decides an artifact, known before anything is compiled.

    The traced programs hold the recipes. Hashing the checkpoint reads every byte of it once.
    """
    load_user_ops()
    package = Path(ops.__file__).parents[2]
    sources = [file for room in _ROOMS for file in (package / room).rglob("*") if file.suffix in (".py", ".cpp")]
    tokenizer = sorted(checkpoint.tokenizer_files.items())
    return _digest(
        {
            "programs": {name: print_program(program) for name, program in entries.items()},
            "checkpoint": checkpoint.digest(),
            "tokenizer": {
                name: chunks
                for (name, _), chunks in zip(tokenizer, digest_files([path for _, path in tokenizer]), strict=True)
            },
            "pipeline": [
                [phase.stage.name, [[one.name, one.options(), one.source_hash()] for one in phase.passes]]
                for phase in pipeline
            ],
            "sources": _digest_sources([*sources, *_user_sources(OPS.values())]),
            "toolchain": {backend.name: backend.toolchain() for backend in backends},
            "target": target.identity(),
            "options": dict(options),
        }
    )
