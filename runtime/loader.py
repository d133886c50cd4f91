"""From an artifact folder to a bound executor: target first, then digests, then executables and weights."""

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ingot.backends.cpu import load as cpu
from ingot.backends.inductor import load as inductor
from ingot.ir.artifact import Manifest
from ingot.ir.errors import ArtifactError, TargetError
from ingot.ir.parse import parse_type
from ingot.ir.plan import Executable, Plan
from ingot.ir.target import Target
from ingot.ir.types import DTYPES
from ingot.runtime.artifact import Artifact, open_artifact
from ingot.runtime.executor import Executor
from ingot.runtime.tokenizer import Tokenizer

LOADERS: dict[str, Callable[[Executable, Path], Callable[..., Sequence[torch.Tensor]]]] = {"inductor": inductor.load}
# What a KV pool takes on a CPU unless the caller says otherwise: vLLM's default for its CPU backend, 4 GiB, and never
# more than half of the machine.
DEFAULT_KV_BYTES = 4 << 30


@dataclass(frozen=True)
class Limits:
    """What an artifact was compiled for; sizes as in `compile_model`, `page_size` in tokens."""

    vocab_size: int
    max_seq_len: int
    max_batch: int
    max_tokens: int
    page_size: int


@dataclass(frozen=True)
class Loaded:
    """A model ready to run. `tokenizer` is None when the checkpoint had none."""

    artifact: Artifact
    plan: Plan
    executor: Executor
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    limits: Limits
    num_pages: int


def load_artifact(path: str | Path, *, num_pages: int | None = None, threads: int | None = None) -> Loaded:
    """Load an artifact onto the CPU. `num_pages` sizes the KV pool (default: what the limits need, within memory).

    Raises ArtifactError for a damaged artifact and TargetError for one compiled for another machine, before any
    executable file is opened.
    """
    target = Target.detect("cpu")
    artifact = open_artifact(path, check=lambda manifest: _check_target(manifest, target), threads=threads)
    plan = _plan(artifact)
    limits = _limits(artifact)
    with ThreadPoolExecutor(1) as background:
        weights_whole = background.submit(artifact.verify_files, artifact.weight_files(), threads)
        executables = {
            executable.id: _load_executable(executable, artifact, target) for executable in plan.executables.values()
        }
        libraries = {
            name: cpu.load_library(library, _folder_of(library, artifact, target))
            for name, library in plan.libraries.items()
        }
        params = _map_weights(artifact)
        pages = num_pages or _default_pages(plan, limits, target)
        executor = Executor(plan, params, executables, {"pages": pages, "S": limits.max_batch}, libraries)
        weights_whole.result()
    eos = tuple(int(item) for item in str(artifact.manifest.model["eos_token_ids"]).split(",") if item)
    tokenizer = None
    if any(entry.path == "tokenizer/tokenizer.json" for entry in artifact.manifest.files):
        tokenizer = Tokenizer.load(artifact.folder / "tokenizer", eos_fallback=eos)
        eos = tuple(sorted(tokenizer.eos_token_ids))
    return Loaded(artifact, plan, executor, tokenizer, eos, limits, pages)


def _check_target(manifest: Manifest, target: Target) -> None:
    """Refuse what was compiled for another machine, naming the first field that differs."""
    try:
        features = manifest.target["features"]
        compiled = target.model_copy(
            update={
                **manifest.target,
                "features": tuple(features) if isinstance(features, list | tuple) else features,
                "versions": manifest.versions,
            }
        )
        difference = compiled.difference(target)
    except (KeyError, AttributeError, TypeError) as error:
        raise ArtifactError(f"the manifest's target is malformed: {error!r}") from error
    if difference:
        raise TargetError(
            f"the artifact was compiled for another target: {difference}",
            expected="a machine like the one it was compiled for",
            hint="compile it again on this machine",
        )


def _plan(artifact: Artifact) -> Plan:
    try:
        return Plan.model_validate_json(artifact.read_text("plan.json"))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ArtifactError(f"field {field}: {first['msg']}", where=str(artifact.file("plan.json"))) from error


def _limits(artifact: Artifact) -> Limits:
    model = artifact.manifest.model
    try:
        return Limits(**{name: int(model[name]) for name in Limits.__dataclass_fields__})  # type: ignore[arg-type]
    except (KeyError, ValueError, TypeError) as error:
        raise ArtifactError(f"the manifest's model lacks a limit: {error}", where="manifest.json, model") from error


def _load_executable(
    executable: Executable, artifact: Artifact, target: Target
) -> Callable[..., Sequence[torch.Tensor]]:
    if executable.backend not in LOADERS:
        raise ArtifactError(
            f"executable {executable.id} is of the unknown backend '{executable.backend}'", expected=", ".join(LOADERS)
        )
    return LOADERS[executable.backend](executable, _folder_of(executable, artifact, target))


def _folder_of(executable: Executable, artifact: Artifact, target: Target) -> Path:
    """Where an executable's files lie. Each is listed in the manifest, whose digests have been checked."""
    folder = f"exe/{target.name}/{executable.id}"
    for name in executable.files:
        artifact.file(f"{folder}/{name}")
    return artifact.folder / folder


def _map_weights(artifact: Artifact) -> dict[str, torch.Tensor]:
    """Every weight by name, backed by its file's pages: nothing is copied."""
    index: Any = artifact.read_json("weights.json")
    maps: dict[str, mmap.mmap] = {}
    params: dict[str, torch.Tensor] = {}
    try:
        for name, entry in index.items():
            if "same_as" in entry:
                continue
            if entry["file"] not in maps:
                with artifact.file(entry["file"]).open("rb") as file:
                    # Copy-on-write, so that a stray write never reaches the file.
                    maps[entry["file"]] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            dtype = DTYPES[entry["dtype"]]
            count = 1
            for size in entry["shape"]:
                count *= size
            flat = torch.frombuffer(maps[entry["file"]], dtype=dtype, count=count, offset=entry["offset"])
            params[name] = flat.reshape(entry["shape"])
        for name, entry in index.items():
            if "same_as" in entry:
                params[name] = params[entry["same_as"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ArtifactError(f"weights.json is malformed: {error!r}", where=str(artifact.folder)) from error
    return params


def _default_pages(plan: Plan, limits: Limits, target: Target) -> int:
    """Pages for every sequence at full length, or as many as the default share of memory holds."""
    page_bytes = 0
    for state in plan.states.values():
        if state.kind == "paged_kv":
            state_type = parse_type(state.type)
            size = state_type.dtype.itemsize
            for extent in state_type.bind({"pages": 1}):
                size *= extent
            page_bytes += size
    needed = limits.max_batch * -(-limits.max_seq_len // limits.page_size)
    return max(1, min(needed, min(DEFAULT_KV_BYTES, target.memory // 2) // page_bytes))
