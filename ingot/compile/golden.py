"""The golden run of an artifact: a short run that the compile records and `ingot verify` repeats."""

import hashlib
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError

from ingot.compile.golden_schedule import golden_schedule
from ingot.ir.artifact.golden import EntryRun, GoldenRun, Logit, Machine, Row, StepResult
from ingot.ir.artifact.manifest import EXE_FOLDER, GOLDEN, WEIGHTS_FOLDER, FileEntry, Manifest
from ingot.ir.artifact.trace import trace_name
from ingot.ir.errors import ArtifactError, OptionError
from ingot.ir.machine.target import Target
from ingot.ir.numerics.harness import Schedule, scheduled
from ingot.runtime.loading.artifact import Artifact
from ingot.runtime.loading.loader import Loaded
from ingot.runtime.steps.bucket import Call
from ingot.runtime.steps.executor import Executor

SEED = 20  # arbitrary; seeds the tokens and the order of the pages
TOP = 8  # logits stored per position
# The files and folders that a golden run depends on. The other files are for readers, or for the tokenizer.
_RUN_FILES = ("plan.json", "weights.json")
_RUN_FOLDERS = (WEIGHTS_FOLDER, EXE_FOLDER)
_AGAIN = "compile the model again"


@dataclass(frozen=True)
class StepOutput:
    """The results of one step in a golden run (a short run that a compile records and `ingot verify` repeats).

    - `entry`: the model's program that ran, such as "main"
    - `number`: index of the step among the steps of this entry
    - `bucket`: the bucket class (range of step sizes) of the step
    - `logits`: f32[n, vocab], the n rows of logits that the step returned
    - `tokens`: the n tokens that were sampled from these rows
    - `seconds`: the time of each instruction of the step; empty if the run was not timed
    """

    entry: str
    number: int
    bucket: str
    logits: torch.Tensor
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]


def this_machine(manifest: Manifest) -> Machine:
    """Return the processor and the thread count of this machine. The bits of results depend on both.

    For an artifact for a GPU, the processor is the GPU's product name with torch's version. For a CPU, it is the fields
    of /proc/cpuinfo by which libraries choose code.
    """
    on_gpu = manifest.target.get("device") == "cuda"
    processor = f"{Target.detect('cuda').gpu}, torch {torch.__version__}" if on_gpu else _processor()
    return Machine(processor=processor, threads=torch.get_num_threads())


# Fields of /proc/cpuinfo, on x86 and Arm, that distinguish CPU models with equal instruction sets.
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            first = file.read().partition("\n\n")[0]
    except OSError:
        return ""
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    known = {name.strip(): value.strip() for name, value in fields.items()}
    return ", ".join(f"{name} {known[name]}" for name in _CPU_FIELDS if known.get(name))


@dataclass(frozen=True)
class InstructionSeconds:
    """The seconds of each instruction of a bucket class (range of step sizes), each a median over several steps.

    `tokens` has the number of tokens of each of these steps.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Recording:
    """A golden run (the results of a short run, which `ingot verify` repeats), and the times of its instructions.

    The times are by bucket class (range of step sizes). A key of `instructions` is, for example, "decode", or
    "draft@decode" for a draft model. There are no times for the ranks of a mesh.
    """

    run: GoldenRun
    instructions: dict[str, InstructionSeconds]


def record(loaded: Loaded) -> Recording:
    """Run the artifact for a few steps, as when it is served, and return the results and times.

    They are the golden run, which `ingot verify` repeats later. Raises IngotError if the artifact does not run.
    """
    limits = loaded.limits
    buckets = [bucket.bucket for bucket in loaded.plan.buckets]
    schedule = golden_schedule(buckets, limits.max_seq_len, limits.max_batch, limits.page_size)
    draw = random.Random(SEED)
    lengths: dict[int, int] = {}
    for index, count in (pair for fed in schedule for pair in fed):
        lengths[index] = lengths.get(index, 0) + count
    requests = tuple(
        tuple(draw.randrange(limits.vocab_size) for _ in range(lengths[index])) for index in sorted(lengths)
    )
    steps: dict[str, list[StepResult]] = {}
    times: dict[str, list[StepOutput]] = {}
    # Captured graphs have no instructions to time, so these steps run once more, instruction by instruction.
    has_graphs = any(executor.replays for executor in loaded.executors.values())
    on_mesh = bool(loaded.context.mesh)  # its ranks have other instructions, and run one after another
    for one in replay(loaded, requests, schedule, SEED, timed=not (has_graphs or on_mesh)):
        times.setdefault(trace_name(one.entry, one.bucket), []).append(replace(one, logits=_NO_LOGITS))
        rows = tuple(_row(logits, token) for logits, token in zip(one.logits, one.tokens, strict=True))
        steps.setdefault(one.entry, []).append(StepResult(bucket=one.bucket, rows=rows))
    if has_graphs:
        times = {}
        for one in replay(loaded, requests, schedule, SEED, timed=True):
            times.setdefault(trace_name(one.entry, one.bucket), []).append(replace(one, logits=_NO_LOGITS))
    run = GoldenRun(
        machine=this_machine(loaded.artifact.manifest),
        files=run_files(loaded.artifact.manifest),
        seed=SEED,
        requests=requests,
        schedule=tuple(tuple(fed) for fed in schedule),
        entries={
            entry: EntryRun(backends=backends(executor), steps=tuple(steps[entry]))
            for entry, executor in loaded.executors.items()
            if entry in steps
        },
    )
    return Recording(run, {} if on_mesh else {name: _medians(served) for name, served in times.items()})


_NO_LOGITS = torch.empty(0)


def _medians(steps: Sequence[StepOutput]) -> InstructionSeconds:
    seconds = tuple(statistics.median(times) for times in zip(*(step.seconds for step in steps), strict=True))
    return InstructionSeconds(tuple(len(step.tokens) for step in steps), seconds)


def replay(
    loaded: Loaded, requests: Sequence[Sequence[int]], schedule: Schedule, seed: int, *, timed: bool = False
) -> Iterator[StepOutput]:
    """Run the steps of `schedule` for every entry that returns logits, and yield the result of each step.

    An entry is a program of the model. `requests` are the tokens of each request. `schedule` says how many of them each
    step takes. `seed` determines the order in which KV cache pages are used. Steps run as captured CUDA graphs if there
    are any. With `timed`, they run instruction by instruction. Raises OptionError if the KV pool cannot hold the
    requests.
    """
    page = loaded.limits.page_size
    needed = sum(math.ceil(len(request) / page) for request in requests)
    if loaded.pages and needed > loaded.num_pages:
        raise OptionError(
            f"the KV pool has {loaded.num_pages} pages", where="the golden run", expected=f"{needed}, for its requests"
        )
    for entry, executor in loaded.executors.items():
        if "logits" not in executor.plan.outputs:
            continue
        run = _Run(executor, timed)
        for number, values in enumerate(scheduled(executor.inputs, run, requests, schedule, needed, page, seed)):
            seconds = tuple(after - before for before, after in itertools.pairwise(run.ticks))
            yield StepOutput(entry, number, run.bucket, values["logits"], tuple(values["tokens"].tolist()), seconds)


class _Run:
    """A function that runs one step with `executor`, and returns the outputs of the step.

    `bucket` is the bucket class (range of step sizes) of the last step. With `timed`, `ticks` holds the clock before
    the last step's first instruction, and after each instruction.
    """

    def __init__(self, executor: Executor, timed: bool) -> None:
        self.executor = executor
        self.timed = timed
        self.bucket = ""
        self.ticks: list[float] = []

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        self.ticks = []
        handle = self.executor.launch(inputs, watch=self._tick if self.timed else None)
        self.bucket = handle.bucket
        handle.tokens()  # wait until the step has run
        return {name: value.cpu() for name, value in handle.outputs.items()}

    def _tick(self, call: Call) -> Any:
        if not self.ticks:
            self.ticks.append(self._now())
        result = call()
        self.ticks.append(self._now())
        return result

    def _now(self) -> float:
        self.executor.synchronize()  # wait until the launched work has run
        return time.perf_counter()


def backends(executor: Executor) -> dict[str, tuple[str, ...]]:
    """Return the backend of each instruction that `executor` runs, by bucket class (range of step sizes)."""
    return {
        bucket.bucket.name: tuple(instruction.backend for instruction in bucket.instructions)
        for bucket in executor.plan.buckets
    }


def run_files(manifest: Manifest) -> tuple[FileEntry, ...]:
    """Return those files of the manifest that the results of a run depend on: plan, weights and compiled code."""
    return tuple(entry for entry in manifest.files if entry.path in _RUN_FILES or entry.path.startswith(_RUN_FOLDERS))


def digest(logits: torch.Tensor) -> str:
    """Return the SHA-256 of one row of logits, as hexadecimal text."""
    return hashlib.sha256(logits.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _row(logits: torch.Tensor, token: int) -> Row:
    values, ids = logits.topk(min(TOP, logits.numel()))
    top = tuple((index, _logit(value)) for index, value in zip(ids.tolist(), values.tolist(), strict=True))
    return Row(digest=digest(logits), top=top, token=token)


def _logit(value: float) -> Logit:
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def read_golden(artifact: Artifact) -> GoldenRun:
    """Return the golden run (recorded results of a short run) that an artifact stores.

    Raises ArtifactError if it is missing, malformed, or beyond the artifact's limits.
    """
    path = artifact.folder / GOLDEN
    try:
        run = GoldenRun.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ArtifactError(
            "the artifact has no golden run",
            where=str(path),
            hint=f"{_AGAIN}, on a machine that can run it; a model that returns no logits has none",
        ) from None
    except OSError as error:
        raise ArtifactError(f"the golden run cannot be read: {error.strerror}", where=str(path)) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part)[:80] for part in first["loc"]) or "the whole"
        raise _malformed(f"{field}: {first['msg']}") from None
    model = artifact.manifest.model
    rows = [row for entry in run.entries.values() for step in entry.steps for row in step.rows]
    named = [*(row.token for row in rows), *(index for row in rows for index, _ in row.top)]
    for what, found, limit in (
        ("token ids", 1 + max(named + [token for request in run.requests for token in request]), "vocab_size"),
        ("largest logits", max(len(row.top) for row in rows), "vocab_size"),
        ("requests", len(run.requests), "max_batch"),
        ("tokens of a request", max(map(len, run.requests)), "max_seq_len"),
        ("tokens of a step", max(sum(count for _, count in fed) for fed in run.schedule), "max_tokens"),
    ):
        most = model.get(limit)
        if not isinstance(most, int) or found > most:
            raise _malformed(f"the {what} reach {found}", f"at most {most}, the artifact's {limit}")
    return run


def _malformed(what: str, expected: str = "") -> ArtifactError:
    return ArtifactError(f"{GOLDEN} is malformed: {what}", where=GOLDEN, expected=expected, hint=_AGAIN)
