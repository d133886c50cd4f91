"""Compute the keys that identify work before it is done: `exe_key` of an executable, `request_key` of a compile.

A key is the SHA-256 of the canonical JSON of a document that lists everything that determines the result, by field. The
artifact stores these documents, and `ingot why-miss` compares them.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.compile.outside_backend import package_document
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir import ops
from ingot.ir.artifact.digest import digest_files, digest_json
from ingot.ir.artifact.manifest import SCHEMA_VERSION
from ingot.ir.artifact.tuning import Choice
from ingot.ir.backend import Backend, Tunable, sources_of, toolchain_of
from ingot.ir.formats import PACKINGS
from ingot.ir.machine.target import Target
from ingot.ir.ops import OPS, Op, op_of
from ingot.ir.plugins import load_user_ops
from ingot.ir.program import Program, Region
from ingot.ir.text import print_program, print_region_body
from ingot.passes.base import Pass
from ingot.passes.pipeline import Phase

Document = dict[str, Any]

# The rooms that define the meaning of a program's text and its rewriting. Any change in them changes the compile.
_ROOMS = ("ir", "passes", "backends")
# The files outside the rooms that determine an artifact's content: packing weights, merging plans, timing calls.
_DRIVER = (
    "compile/buckets.py",
    "compile/compiled_target.py",
    "compile/contents.py",
    "compile/driver.py",
    "compile/merged_plans.py",
    "compile/packing.py",
    "compile/timing/call_clock.py",
    "compile/timing/call_inputs.py",
    "compile/timing/call_timer.py",
    # The rounding check, which decides the fusions that are skipped.
    "rounding/check.py",
    "rounding/forms.py",
    "rounding/samples.py",
    "rounding/score.py",
    "rounding/sites.py",
    "rounding/tensors.py",
)
_PACKAGE = Path(ops.__file__).parents[2]  # holds the rooms
_OURS = "ingot."


def exe_document(region: Region | None, backend: Backend, target: Target) -> Document:
    """Return a JSON document of everything that determines the code of a region (calls compiled together).

    Its digest is the `exe_key`, the cache key of the executable. The document has no weights or names, so fine-tunes of
    a model share executables. If `region` is None, it describes the backend's kernel library. For a backend of another
    package, it has the version and all files of that package.
    """
    called = [] if region is None else [op_of(node.target) for node in region.body.calls()]
    document = {
        "body": None if region is None else print_region_body(region.body).splitlines(),
        "backend": backend.name,
        "sources": {
            **_digests(sources_of(backend)),
            **_op_sources(op for op in called if op is not None),
            **(_format_sources() if {ops.quant_linear, ops.dequantize, ops.experts} & {*called} else {}),
        },
        "toolchain": toolchain_of(backend),
        "target": target.code_identity(),
        "tiles": [choice.decides() for choice in choices_of(region, backend, target)],
        **({"package": package} if (package := package_document(backend)) else {}),
    }
    return _plain(document)


def choices_of(region: Region | None, backend: Backend, target: Target) -> tuple[Choice, ...]:
    """Return the tile sizes with which `backend` compiles a region.

    The result is empty for a backend without tile sizes. It is also empty for a kernel library (`region` is None).
    """
    return backend.choices(region.body, target) if region is not None and isinstance(backend, Tunable) else ()


def exe_key(region: Region | None, backend: Backend, target: Target) -> str:
    """Return the cache key of a region's executable, or of the backend's kernel library if `region` is None."""
    return digest_json(exe_document(region, backend, target))


def request_document(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    entries: Mapping[str, Program],
    pipeline: tuple[Phase, ...],
    backends: tuple[Backend, ...],
    target: Target,
    options: Mapping[str, Any],
    skipped_fusions: Sequence[Mapping[str, Any]],
    calibration_text: str | None = None,
) -> Document:
    """Return a JSON document of everything that determines an artifact, before anything is compiled.

    `config` holds the fields of config.json that were read. `entries` are the traced programs with their recipes.
    `skipped_fusions` (from `RoundingCheck.decision`) are the fusions that the compile leaves out because of the
    weights. `calibration_text` is the digest of a text with which weights are quantized; None: there is none. Each byte
    of the checkpoint is read once, for digests.
    """
    load_user_ops()
    tokenizer = sorted(checkpoint.tokenizer_files.items())
    chunks = digest_files([path for _, path in tokenizer])
    document = {
        "schema_version": SCHEMA_VERSION,
        "options": {**options, "backends": [backend.name for backend in backends]},
        "config": dict(config),
        "checkpoint": checkpoint.digests(),
        "tokenizer": {name: digests for (name, _), digests in zip(tokenizer, chunks, strict=True)},
        "programs": {name: _digest(print_program(program)) for name, program in entries.items()},
        "pipeline": _pipeline(pipeline),
        "skipped_fusions": list(skipped_fusions),
        "calibration": calibration_text,
        "sources": {
            **_digests(file for room in _ROOMS for file in _PACKAGE.joinpath(room).rglob("*") if _is_source(file)),
            **_digests(_PACKAGE / name for name in _DRIVER),
            **({} if calibration_text is None else _digests(_PACKAGE.joinpath("quantizing").glob("*.py"))),
            **_op_sources(OPS.values()),
            **_format_sources(),
            **_pass_sources(one for phase in pipeline for one in phase.passes),
        },
        "toolchain": {backend.name: toolchain_of(backend) for backend in backends},
        "packages": {one.name: package for one in backends if (package := package_document(one))},
        "target": target.code_identity(),
    }
    return _plain(document)


def _plain(document: Document) -> Document:
    """Return the document as plain JSON values, as if it had been written to a file and read again.

    Infinity becomes a string. JSON lacks it, and some config.json files contain it.
    """
    plain: Document = json.loads(json.dumps(document), parse_constant=str)
    return plain


def _pipeline(pipeline: tuple[Phase, ...]) -> Document:
    """Return a JSON document of the pass pipeline: the options of each pass by its name, and the order of passes.

    The key "order" has a list for each stage of a program: the stage, and the passes that lead to it.
    """
    passes: Document = {}
    for phase in pipeline:
        for one in phase.passes:
            if passes.setdefault(one.name, one.options()) != one.options():  # the options differ between phases
                passes[f"{one.name}@{phase.stage.name}"] = one.options()
    return {**passes, "order": [[phase.stage.name, *(one.name for one in phase.passes)] for phase in pipeline]}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _is_source(file: Path) -> bool:
    return file.suffix in (".py", ".cpp", ".h", ".cu", ".cuh")


def _digests(files: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of source files, by file.

    A key is the file's path inside Ingot's package, or the name of a file outside the package.
    """
    return {
        file.relative_to(_PACKAGE).as_posix() if file.is_relative_to(_PACKAGE) else file.name: hashlib.sha256(
            file.read_bytes()
        ).hexdigest()
        for file in sorted(files)
    }


def _op_sources(ops: Iterable[Op]) -> dict[str, str]:
    """Return the digests of the files that define the user's ops among `ops`, by module name.

    Ingot's ops are left out.
    """
    return _module_sources({op.reference.__module__: op.reference.__code__.co_filename for op in ops})


def _format_sources() -> dict[str, str]:
    """Return the digests of the files that define the user's packings, by module name.

    A packing is the order in which a quantized weight is stored. Ingot's packings are left out.
    """
    made = [function for one in PACKINGS.values() for function in (one.pack, one.unpack)]
    return _module_sources({one.__module__: one.__code__.co_filename for one in made})


def _pass_sources(passes: Iterable[Pass]) -> dict[str, str]:
    modules = {type(one).__module__: inspect.getfile(sys.modules[type(one).__module__]) for one in passes}
    return _module_sources(modules)


def _module_sources(modules: Mapping[str, str]) -> dict[str, str]:
    return {
        module: hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for module, file in sorted(modules.items())
        if not module.startswith(_OURS) and Path(file).is_file()
    }
