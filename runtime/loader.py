"""From an artifact folder to a bound executor: target first, then digests, then executables and weights."""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ingot.backends.cpu import load as cpu
from ingot.backends.inductor import load as inductor
from ingot.backends.triton import load as triton
from ingot.ir.artifact import Manifest
from ingot.ir.errors import ArtifactError, OptionError, TargetError
from ingot.ir.extras import require
from ingot.ir.memory import MemoryNeed
from ingot.ir.mesh import mesh_text, parse_mesh, world_size
from ingot.ir.parse import parse_type
from ingot.ir.plan import Executable, Plan, Plans
from ingot.ir.target import Target, first_difference
from ingot.runtime.artifact import Artifact, malformed, open_artifact
from ingot.runtime.check_plan import check_plans
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.weights import copy_weights
from ingot.runtime.executor import Executor
from ingot.runtime.states import States
from ingot.runtime.tokenizer import Tokenizer
from ingot.runtime.weights import map_weights

LOADERS: dict[str, Callable[[Executable, Path], Callable[..., Sequence[torch.Tensor]]]] = {
    "inductor": inductor.load,
    "triton": triton.load,
}
LIBRARY_LOADERS: dict[str, Callable[[Executable, Path], Mapping[str, Callable[..., Any]]]] = {"cpu": cpu.load_library}
# What a KV pool takes on a CPU when nobody bounds the memory: vLLM's default for its CPU backend, 4 GiB, and never more
# than half of the machine.
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
    """A model ready to run: an executor for each entry, over the same weights and states.

    `tokenizer` is None when the checkpoint had none.
    """

    artifact: Artifact
    plans: Plans
    executors: Mapping[str, Executor | CudaExecutor]
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    limits: Limits
    num_pages: int

    @property
    def plan(self) -> Plan:
        """The plan of the entry `main`."""
        return self.plans.plans["main"]

    @property
    def executor(self) -> Executor | CudaExecutor:
        """The executor of the entry `main`."""
        return self.executors["main"]


def load_artifact(
    path: str | Path, *, num_pages: int | None = None, memory: int | None = None, threads: int | None = None
) -> Loaded:
    """Load an artifact onto the device that it was compiled for.

    `memory` bounds in bytes what serving may take (default: the machine's): by the plan's numbers weights and
    activations come first, and the KV pool gets what is left, as far as the limits need it. `num_pages` sizes the pool
    by itself. `threads` check digests.

    Raises ArtifactError for a damaged artifact and TargetError for one compiled for another machine, before any
    executable file is opened; OptionError for memory that the plan does not fit into.
    """
    artifact = open_artifact(path, check=check_target, threads=threads)
    loaded = bind(artifact, num_pages=num_pages, memory=memory, threads=threads)
    if all(entry.path != "tokenizer/tokenizer.json" for entry in artifact.manifest.files):
        return loaded
    tokenizer = Tokenizer.load(artifact.folder / "tokenizer", eos_fallback=loaded.eos_token_ids)
    return replace(loaded, tokenizer=tokenizer, eos_token_ids=tuple(sorted(tokenizer.eos_token_ids)))


def bind(
    artifact: Artifact,
    *,
    num_pages: int | None = None,
    memory: int | None = None,
    threads: int | None = None,
    verify: bool = True,
) -> Loaded:
    """`load_artifact` of an open artifact for this machine, without its tokenizer.

    `verify` checks the digests of the weights, the only ones that opening left.
    """
    target = this_machine(artifact.manifest)
    plans = _plans(artifact)
    limits = _limits(artifact, plans)
    eos = _eos_token_ids(artifact)
    pages = _pages(plans, limits, target, num_pages, memory)
    with ThreadPoolExecutor(1) as background:
        weights = background.submit(_weights, artifact, torch.device(target.device), threads, verify)
        executables = {
            executable.id: _load_executable(executable, artifact, target) for executable in plans.executables.values()
        }
        libraries = {name: _load_library(library, artifact, target) for name, library in plans.libraries.items()}
        sizes = {"pages": pages, "S": limits.max_batch}
        states = States(plans.states, sizes, torch.device(target.device))
        params = weights.result()
        runs = CudaExecutor if target.device == "cuda" else Executor
        executors = {
            entry: runs(plan, params, executables, sizes, libraries, states) for entry, plan in plans.plans.items()
        }
    return Loaded(artifact, plans, executors, None, eos, limits, pages)


def _weights(artifact: Artifact, device: torch.device, threads: int | None, verify: bool) -> dict[str, torch.Tensor]:
    if device.type != "cpu":
        return copy_weights(artifact, device, threads=threads, verify=verify)
    if verify:
        artifact.verify_files(artifact.weight_files(), threads)
    return map_weights(artifact)


def this_machine(manifest: Manifest) -> Target:
    """This machine's device of the kind that the artifact is for. Raises TargetError when it has none, or when what
    runs code on it is not installed."""
    if manifest.target.get("device") != "cuda":
        return Target.detect("cpu")
    try:
        target = Target.detect("cuda")
    except TargetError as error:
        raise TargetError(
            f"the artifact was compiled for a GPU, {manifest.target.get('name')!s:.80}, and {error.what}",
            expected="a machine like the one it was compiled for",
            hint="compile it again with --target cpu, or run it where there is such a GPU",
        ) from None
    require("cuda.bindings", "cuda-bindings", "running on a GPU")
    return target


def check_target(manifest: Manifest) -> None:
    """Refuse what was compiled for several devices, or for another machine, naming the first field that differs."""
    if manifest.model.get("mesh") is not None:
        mesh = _mesh(manifest)
        raise TargetError(
            f"the artifact was compiled for {world_size(mesh)} ranks ({mesh_text(mesh)})",
            expected="one: serving on more than one device is not supported yet",
            hint="compile the model without a mesh",
        )
    target = this_machine(manifest)
    compiled = {name: list(value) if isinstance(value, tuple) else value for name, value in manifest.target.items()}
    if difference := first_difference({**compiled, "versions": manifest.versions}, target.identity()):
        raise TargetError(
            f"the artifact was compiled for another target: {difference}",
            expected="a machine like the one it was compiled for",
            hint="compile it again on this machine",
        )


def _mesh(manifest: Manifest) -> dict[str, int]:
    try:
        return parse_mesh(str(manifest.model["mesh"])[:80])
    except OptionError as error:
        raise ArtifactError(error.what, where="manifest.json, model", expected=error.expected) from None


def _plans(artifact: Artifact) -> Plans:
    try:
        plans = Plans.model_validate_json(artifact.read_text("plan.json"))
    except ValidationError as error:
        raise malformed("plan.json", error) from None
    check_plans(plans)
    return plans


def _limits(artifact: Artifact, plans: Plans) -> Limits:
    """The manifest's limits, which must be those of every plan: compiled code is right within them only."""
    model = artifact.manifest.model
    for name in Limits.__dataclass_fields__:
        value = model.get(name)
        if type(value) is not int or value < 1:
            raise _limit_error(f"{name} is {value!r:.80}", "a whole number above 0")
    limits = Limits(**{name: model[name] for name in Limits.__dataclass_fields__})  # type: ignore[arg-type]
    pages = -(-limits.max_seq_len // limits.page_size)
    for plan in plans.plans.values():
        for dim, needed in (("T", limits.max_tokens), ("B", limits.max_batch), ("S", limits.max_batch), ("P", pages)):
            if dim in plan.dims and plan.dims[dim][1] != needed:
                raise _limit_error(f"the limits need {dim} up to {needed}", f"{plan.dims[dim][1]}, as in plan.json")
        if not any(bucket.bucket.holds(1, 1) for bucket in plan.buckets):
            raise ArtifactError(
                f"no bucket class of {plan.entry} holds a step of one token", where="plan.json, buckets"
            )
    for name, state in plans.states.items():
        if state.kind == "paged_kv" and limits.page_size not in parse_type(state.type).shape:
            raise _limit_error(f"page_size is {limits.page_size}", f"that of state {name}, {state.type}")
    if limits.max_tokens < limits.max_batch:
        raise _limit_error(f"max_tokens is {limits.max_tokens}", f"at least max_batch, {limits.max_batch}")
    return limits


def _limit_error(what: str, expected: str) -> ArtifactError:
    return ArtifactError(f"the manifest's limits are wrong: {what}", where="manifest.json, model", expected=expected)


def _eos_token_ids(artifact: Artifact) -> tuple[int, ...]:
    text = artifact.manifest.model.get("eos_token_ids")
    if not isinstance(text, str) or not re.fullmatch(r"(\d{1,18}(,\d{1,18})*)?", text, re.ASCII):
        raise ArtifactError(
            f"eos_token_ids is {text!r:.80}", where="manifest.json, model", expected="token ids separated by commas"
        )
    return tuple(int(item) for item in text.split(",") if item)


def _load_executable(
    executable: Executable, artifact: Artifact, target: Target
) -> Callable[..., Sequence[torch.Tensor]]:
    if executable.backend not in LOADERS:
        raise ArtifactError(
            f"executable {executable.id} is of the unknown backend '{executable.backend}'", expected=", ".join(LOADERS)
        )
    return LOADERS[executable.backend](executable, _folder_of(executable, artifact, target))


def _load_library(library: Executable, artifact: Artifact, target: Target) -> Mapping[str, Callable[..., Any]]:
    if library.backend not in LIBRARY_LOADERS:
        raise ArtifactError(
            f"library {library.id} is of the unknown backend '{library.backend}'", expected=", ".join(LIBRARY_LOADERS)
        )
    return LIBRARY_LOADERS[library.backend](library, _folder_of(library, artifact, target))


def _folder_of(executable: Executable, artifact: Artifact, target: Target) -> Path:
    """Where an executable's files lie. Each is listed in the manifest, whose digests have been checked."""
    folder = f"exe/{target.name}/{executable.id}"
    for name in executable.files:
        artifact.file(f"{folder}/{name}")
    return artifact.folder / folder


def _pages(plans: Plans, limits: Limits, target: Target, asked: int | None, memory: int | None) -> int:
    """Pages for every sequence at full length, or as many as fit beside all else that the plans need."""
    for name, value in (("KV pages", asked), ("bytes of memory", memory)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise OptionError(f"the {name} are {value!r:.80}", expected="a whole number above 0")
    need = MemoryNeed.of(plans)
    if not need.page:
        raise ArtifactError("the plan keeps no paged KV cache", where="plan.json, states")
    limit = min(memory or target.memory, target.memory)
    fitting = need.pages_within(limit)
    if asked is not None:
        if asked > fitting:
            raise _no_room(need, limit, f"{asked} KV pages of {need.page} bytes", f"at most {max(0, fitting)} pages")
        return asked
    per_sequence = need.sequence // need.page
    if per_sequence > fitting:
        raise _no_room(
            need, limit, f"the KV pages of one sequence, {need.sequence} bytes,", f"{need.fixed + need.sequence} bytes"
        )
    # Without a word about memory the pool takes its usual share, which holds one sequence at least.
    share = fitting if memory else max(per_sequence, min(DEFAULT_KV_BYTES, target.memory // 2) // need.page)
    return min(limits.max_batch * per_sequence, fitting, share)


def _no_room(need: MemoryNeed, limit: int, what: str, expected: str) -> OptionError:
    return OptionError(
        f"{what} do not fit into memory: of {limit} bytes the weights take {need.weights}, the activations"
        f" {need.activations}, other states {need.states}",
        where="plan.json, memory",
        expected=expected,
        hint="ask for fewer pages or give more memory, or compile for smaller limits",
    )
