"""Loading of an artifact: check its target and digests, load executables and weights, and bind them to executors."""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from ingot.backends.table import BACKENDS
from ingot.ir.artifact.adapters import ADAPTED
from ingot.ir.artifact.manifest import Manifest
from ingot.ir.artifact.plan import Executable, Plan, Plans
from ingot.ir.cache.scratch_pages import Scratch
from ingot.ir.errors import ArtifactError, OptionError
from ingot.ir.machine.load_context import LoadContext
from ingot.ir.machine.target import Target
from ingot.ir.mesh import ONE_DEVICE, STAGES
from ingot.runtime.cpu.executor import CpuExecutor
from ingot.runtime.cpu.threads import on_threads
from ingot.runtime.cuda.context import start
from ingot.runtime.cuda.early_context import EarlyContext
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.graphs.choice import CAPTURES, Capture
from ingot.runtime.cuda.weights import WeightCopy
from ingot.runtime.debug_switch import debugging
from ingot.runtime.loading.artifact import Artifact, open_artifact
from ingot.runtime.loading.check_plan import check_plans, check_positions
from ingot.runtime.loading.check_target import check_target, this_machine
from ingot.runtime.loading.limits import Limits, read_limits
from ingot.runtime.loading.load_context import check_one_device, context_on, mesh_of
from ingot.runtime.loading.loaders import load_executable, load_library
from ingot.runtime.loading.memory import Pages
from ingot.runtime.loading.onednn import bound_code_caches
from ingot.runtime.loading.phases import Phases, Span
from ingot.runtime.loading.plan_file import read_plan_file
from ingot.runtime.loading.room import find_room, serving_memory
from ingot.runtime.loading.states import States
from ingot.runtime.loading.weights import map_weights
from ingot.runtime.ranks.launcher import MeshLauncher
from ingot.runtime.ranks.leader import Leader
from ingot.runtime.ranks.measuring.schedule import MeasuringSchedule
from ingot.runtime.ranks.processes import RankProcesses
from ingot.runtime.ranks.seat import ALONE, Seat
from ingot.runtime.ranks.start import start_ranks
from ingot.runtime.scheduling.round import Round, WithAdapters
from ingot.runtime.steps.executor import Executor
from ingot.runtime.steps.stage_line import StageLine
from ingot.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Loaded:
    """A model that is loaded and ready to run.

    artifact        the artifact that it was loaded from
    plans           the compiled plan of each program, by name; the programs are the model ("main") and others, such as
                    a draft model
    context         the device that it runs on
    executors       the executor of each program, by name; all share weights and states
    tokenizer       None if the checkpoint had none, or if the caller did not request it
    eos_token_ids   the model's end tokens
    limits          the limits that the artifact was compiled for
    pages           cache group -> its number of KV pages; a cache group is KV caches that share one page table
    scratch         cache group with sliding windows -> its scratch pages, or the reason why it has none. One step uses
                    scratch pages for a long prefill
    slots           the number of slots for per-sequence states, such as Mamba's; 0 for models without them
    phases          how long each phase of loading took
    leader          the processes of the other ranks; None on one device
    rank_spans      when each phase of another rank ran, by the index of the rank

    The phases are these. "manifest" checks the digests of all files except the weights; a part of it, "target", detects
    this machine. "plan" and "tokenizer" read files. "device" creates a GPU's context, in parallel with these two.
    "weights" reads and checks the weights, in parallel with the phases after it. These are "executables", "states" and
    "bind". "warm-up" runs steps of padding, and "graph" captures the first CUDA graph, or all; both are for GPUs.

    On a mesh, "other GPUs" waits for the contexts of the other ranks. "connect" connects the ranks, in parallel with
    the phases from "plan" to "states"; "connections" waits for it. "ranks" waits until the other ranks are ready. Those
    also have "start", "engine" and "rank 0", which waits for what rank 0 decides.
    """

    artifact: Artifact
    plans: Plans
    context: LoadContext
    executors: Mapping[str, Executor]
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    limits: Limits
    pages: Pages
    scratch: Mapping[str, Scratch]
    slots: int
    phases: Phases
    leader: Leader | None = None
    rank_spans: Mapping[int, Sequence[Span]] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """The compiled plan of the main model (the program `main`)."""
        return self.plans.plans["main"]

    @property
    def served(self) -> Plans:
        """The plans that a scheduler needs to know: those of this process, or of all ranks of a mesh together."""
        return self.plans if self.leader is None else self.leader.plans

    @property
    def num_pages(self) -> int:
        """The fewest KV pages that any cache group has; 0 without KV caches. A cache group is KV caches that share one
        page table. A page number below this is valid in every group."""
        return min(self.pages.values(), default=0)

    @property
    def scratch_pages(self) -> Mapping[str, range]:
        """The page numbers of the scratch pages, by cache group. Scratch pages have keys and values that only one step
        of a long prefill reads. A cache group is KV caches that share one page table."""
        return self.executor.states.scratch_pages

    @property
    def executor(self) -> Executor:
        """The executor of the main model (the program `main`)."""
        return self.executors["main"]

    @property
    def round(self) -> Round | WithAdapters | MeshLauncher:
        """The launcher that runs all programs of each step, such as the model and then its draft model.

        In an artifact that serves LoRA adapters, it runs another program in steps that use one. On a mesh, it runs the
        steps of all ranks.
        """
        plain = Round([self.executors[entry] for entry in self.plans.round])
        if self.leader is not None:
            return MeshLauncher(plain, self.leader, self.context.mesh.get(STAGES, 1))
        return WithAdapters(plain, self.executors[ADAPTED]) if self.has_adapters else plain

    @property
    def has_adapters(self) -> bool:
        """Whether the artifact was compiled to serve LoRA adapters."""
        return ADAPTED in self.plans.plans

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of the programs that steps run."""
        return (*self.plans.round, *([ADAPTED] if self.has_adapters else []))


def load_artifact(
    path: str | Path,
    *,
    num_pages: int | None = None,
    memory: int | None = None,
    threads: int | None = None,
    capture: Capture = "need",
    keep_states: bool = True,
    phases: Phases | None = None,
    early: EarlyContext | None = None,
    all_ranks: bool = False,
    processes: RankProcesses | None = None,
    clock: bool = False,
    measuring: MeasuringSchedule | None = None,
) -> Loaded:
    """Load an artifact onto the device that it was compiled for.

    path          the artifact's folder
    num_pages     pages of each cache group (KV caches that share one page table); default: as many as fit, up to what
                  the artifact's limits can use
    memory        bytes that serving may use; default: all memory of a CPU machine, nine tenths of a GPU's. Weights and
                  activations come first; the KV cache gets the rest
    threads       number of threads that check digests and copy weights
    capture       when to capture CUDA graphs; "none": launch every instruction separately
    keep_states   reserve slots in which the prefix cache keeps per-sequence states, such as Mamba's
    phases        records the seconds of each phase; default: a new one, in `Loaded.phases`
    early         the thread that creates the GPU's context; None: create it here
    all_ranks     start a process for each other rank of an artifact for a mesh. `Loaded.round` then runs steps of all
                  ranks; an executor alone must run none. False: such an artifact is refused
    processes     the processes of the other ranks, if `begun_ranks` has started them
    clock         measure how long the GPU of each pipeline stage computes
    measuring     which steps the ranks of a mesh measure, from the first one on; None: none

    Raises ArtifactError for a damaged artifact, and TargetError for one of another machine; then no executable file was
    opened. Raises OptionError if the plan does not fit into memory.
    """
    phases = phases or Phases()
    if capture not in CAPTURES:
        raise OptionError(f"capture is {capture!r:.80}", expected=", ".join(CAPTURES))

    def check(manifest: Manifest) -> None:
        with phases.phase("target"):
            check_target(manifest)

    with phases.phase("manifest"):
        artifact = open_artifact(path, check=check, threads=threads)
    mesh = mesh_of(artifact.manifest) if all_ranks else ONE_DEVICE
    load = partial(
        bind,
        artifact,
        num_pages=num_pages,
        memory=memory,
        threads=threads,
        keep_states=keep_states,
        phases=phases,
        clock=clock,
    )
    with ThreadPoolExecutor(1) as background:
        device = torch.device(this_machine(artifact.manifest).device)
        ready = background.submit(start_device, device, phases, early)
        tokenizer = _tokenizer(artifact, _eos_token_ids(artifact), phases)
        if not mesh:
            return load(capture=capture, ready=ready, tokenizer=tokenizer)
        ready.result()  # the free memory is asked for in the context
    if capture == "idle":
        # Ranks capture together. Each decides alone what a step needs, but only rank 0 knows when it is idle.
        capture = "need"
    leader = start_ranks(
        artifact,
        mesh,
        num_pages,
        memory,
        keep_states=keep_states,
        capture=capture,
        phases=phases,
        processes=processes,
        clock=clock,
        measuring=measuring,
    )
    with leader.loading():
        loaded = load(capture=capture, ready=ready, tokenizer=tokenizer, seat=leader.seat())
        with phases.phase("ranks"):
            spans = leader.wait_until_ready()
    return replace(loaded, leader=leader, rank_spans=spans)


def bind(
    artifact: Artifact,
    *,
    num_pages: int | None = None,
    memory: int | None = None,
    threads: int | None = None,
    capture: Capture = "need",
    keep_states: bool = True,
    verify: bool = True,
    phases: Phases | None = None,
    seat: Seat = ALONE,
    ready: "Future[None] | None" = None,
    tokenizer: Tokenizer | None = None,
    clock: bool = False,
) -> Loaded:
    """Load an artifact that is already open onto the device that it was compiled for.

    artifact      the open artifact
    num_pages     pages of each cache group (KV caches that share one page table); default: as many as fit, up to what
                  the artifact's limits can use
    memory        bytes that serving may use; default: all memory of a CPU machine, nine tenths of a GPU's
    threads       number of threads that check digests and copy weights
    capture       when to capture CUDA graphs; "none": launch every instruction separately
    keep_states   reserve slots in which the prefix cache keeps per-sequence states, such as Mamba's
    verify        compare the digests of the weights; opening has not checked them
    phases        records the seconds of each phase; default: a new one, in `Loaded.phases`
    seat          the place of this process in the mesh that the artifact was compiled for
    ready         is done when the device is ready; None: make it ready here
    tokenizer     the tokenizer for the result
    clock         measure how long the GPU of a pipeline stage computes

    Raises ArtifactError for a damaged artifact; OptionError if the plan does not fit into memory.
    """
    target = this_machine(artifact.manifest)
    device = torch.device(target.device)
    phases = phases or Phases()
    with ThreadPoolExecutor(2) as background:
        ready = ready or background.submit(start_device, device, phases, None)
        with phases.phase("plan"):
            plans = _plans(artifact, seat)
            limits = read_limits(artifact, plans)
            eos = _eos_token_ids(artifact)
        ready.result()
        context = context_on(target.device, seat.rank, seat.mesh, seat.connect())
        # Before any copy, so that an artifact that does not fit fails at once.
        room = seat.room
        if room is None:
            memory_here = serving_memory(target, plans, context.allocator.granularity, capture=capture)
            room = find_room([plans], limits, memory_here, num_pages, memory, keep_states=keep_states)
        sizes = {"R": limits.max_batch, "S": room.slots}
        if device.type == "cuda":
            copy = WeightCopy(artifact, context, names=_needed(plans, context), threads=threads, verify=verify)
            params, weights = copy.tensors, background.submit(_timed, phases, "weights", copy.run)
        else:
            params, weights = (
                {},
                background.submit(_timed, phases, "weights", partial(_map, artifact, context, plans, threads, verify)),
            )
        alone, joined = _by_connection(plans)
        with phases.phase("executables"), on_threads(seat.threads):
            executables = {one.id: load_executable(one, _folder_of(one, artifact, target), context) for one in alone}
            libraries = {
                name: load_library(one, _folder_of(one, artifact, target), context)
                for name, one in plans.libraries.items()
            }
        with phases.phase("states"):
            states = States(plans.states, sizes, context.allocator, room.pages, room.scratch)
        if seat.mesh:
            with phases.phase("connections"):
                tuple(context.communicators.values())
            with phases.phase("executables"):
                for one in joined:
                    executables[one.id] = load_executable(one, _folder_of(one, artifact, target), context)
        # A GPU's weights are allocated before they are copied. That suffices for binding and warm-up.
        params = params or weights.result()
        with phases.phase("bind"):
            runs: Callable[..., Executor]
            if device.type == "cuda":
                stages = _stages(artifact) if seat.mesh else ()
                runs = partial(
                    CudaExecutor, context=context, capture=capture, strict=debugging(), stages=stages, clock=clock
                )
            else:
                runs = partial(CpuExecutor, line=StageLine.of(context), threads=seat.threads)
            libraries |= _collectives(plans, context)
            executors = {
                entry: runs(plan, params, executables, sizes, libraries, states) for entry, plan in plans.plans.items()
            }
        if device.type == "cuda":
            _try_out(device, executors, capture, phases)
        weights.result()
    ends = eos if tokenizer is None else tuple(sorted(tokenizer.eos_token_ids))
    made = room.pages, room.scratch, room.slots
    return Loaded(artifact, plans, context, executors, tokenizer, ends, limits, *made, phases)


def _collectives(plans: Plans, context: LoadContext) -> dict[str, Mapping[str, Callable[..., object]]]:
    """Return the functions of the backends that compute collectives, if the plans use them: backend -> op -> function.
    `context` connects the ranks."""
    buckets = [bucket for plan in plans.plans.values() for bucket in plan.buckets]
    used = {one.backend for bucket in buckets for one in bucket.instructions}
    return {
        name: entry.collectives(context)
        for name, entry in BACKENDS.items()
        if entry.collectives is not None and name in used
    }


def _by_connection(plans: Plans) -> tuple[list[Executable], list[Executable]]:
    """Return the executables that need no other rank to be loaded, and those that do, both in their order."""
    found: tuple[list[Executable], list[Executable]] = [], []
    for one in plans.executables.values():
        entry = BACKENDS.get(one.backend)
        found[entry is not None and entry.joins_collectives].append(one)
    return found


def start_device(device: torch.device, phases: Phases, early: EarlyContext | None) -> None:
    """Make a device ready. `early` is the thread that creates a GPU's context; None: create it here. Raises TargetError
    if the GPU cannot be used."""
    if device.type == "cpu":
        bound_code_caches()
    else:
        with phases.phase("device"):
            if early is not None:
                early.wait()  # not in a CUDA call, which may hold the GIL while it waits
            start(device)


def _tokenizer(artifact: Artifact, eos: tuple[int, ...], phases: Phases) -> Tokenizer | None:
    """Load the artifact's tokenizer; None if it has none. `eos` are the end tokens to use if the tokenizer's files name
    none. `phases` records the time.

    Reading a vocabulary holds the GIL. So this runs in parallel with the creation of a GPU's context, which needs no
    GIL, and on a mesh with the start of the other ranks. It does not run in parallel with the threads that copy
    weights.
    """
    if all(entry.path != "tokenizer/tokenizer.json" for entry in artifact.manifest.files):
        return None
    with phases.phase("tokenizer"):
        return Tokenizer.load(artifact.tokenizer, eos_fallback=eos)


def _timed(phases: Phases, phase: str, work: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    with phases.phase(phase):
        return work()


def _map(
    artifact: Artifact, context: LoadContext, plans: Plans, threads: int | None, verify: bool
) -> dict[str, torch.Tensor]:
    return map_weights(artifact, context.rank, names=_needed(plans, context), verify=verify, threads=threads)


def _needed(plans: Plans, context: LoadContext) -> set[str] | None:
    """Return the names of the weights that this rank needs; None: all, without a mesh."""
    return {name for plan in plans.plans.values() for name in plan.params} if context.mesh else None


def _try_out(device: torch.device, executors: Mapping[str, Executor], capture: Capture, phases: Phases) -> None:
    """Warm up every executor, and capture its CUDA graph for batch size 1. With `capture` "all", capture all its
    graphs. `phases` records the times as "warm-up" and "graph"."""
    torch.cuda.default_stream(device).synchronize()  # steps run on another stream, which does not wait for the states
    for executor in executors.values():
        with phases.phase("warm-up"):
            executor.warm_up()
            executor.synchronize()
        with phases.phase("graph"):
            executor.capture_all() if capture == "all" else executor.capture(1)
            executor.synchronize()  # raises errors of these launches here


def _plans(artifact: Artifact, seat: Seat) -> Plans:
    """Read and check plan.json, and return the plans of this process's rank (its device, if there are several). Raises
    ArtifactError if the file is invalid."""
    if seat is ALONE:
        check_one_device(artifact.manifest)
    file = read_plan_file(artifact)
    check_positions(file, mesh_of(artifact.manifest))
    plans = file.of(seat.rank.index)
    check_plans(plans)
    return plans


def _stages(artifact: Artifact) -> tuple[Plan, ...]:
    """Return the plans of all pipeline stages; empty without stages."""
    positions = read_plan_file(artifact).positions.values()
    return tuple(one.plans["main"] for one in positions) if len(positions) > 1 else ()


def _eos_token_ids(artifact: Artifact) -> tuple[int, ...]:
    text = artifact.manifest.model.get("eos_token_ids")
    if not isinstance(text, str) or not re.fullmatch(r"(\d{1,18}(,\d{1,18})*)?", text, re.ASCII):
        raise ArtifactError(
            f"eos_token_ids is {text!r:.80}", where="manifest.json, model", expected="token ids separated by commas"
        )
    return tuple(int(item) for item in text.split(",") if item)


def _folder_of(executable: Executable, artifact: Artifact, target: Target) -> Path:
    """Return the folder of an executable's files in the artifact. `target` describes this machine. Raises ArtifactError
    if the manifest does not list one of the files."""
    folder = f"exe/{target.name}/{executable.id}"
    for name in executable.files:
        artifact.file(f"{folder}/{name}")
    return artifact.folder / folder
