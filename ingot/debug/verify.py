"""Repeat an artifact's golden run, row by row, to check that it still computes what it did when it was compiled.

On a processor like the compiling one, the bits must be the same: loading requires the same target and torch version,
and torch's ops use as many threads as they did then. On another processor libraries may add in another order. There, a
position's largest logits may differ by the tolerance of the model's dtype, relative to their size.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ingot.compile.golden import StepOutput, backends, digest, read_golden, replay, run_files, this_machine
from ingot.debug.verification import BucketResult, Promise, RowDifference, Verification
from ingot.ir.artifact.golden import GoldenRun, Row
from ingot.ir.artifact.manifest import EXE_FOLDER, FileEntry, Manifest
from ingot.ir.errors import ArtifactError, IngotError
from ingot.ir.numerics.tolerances import TOLERANCES, Tolerance
from ingot.ir.types import DTYPES
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.check_target import check_target
from ingot.runtime.loading.load_context import mesh_of
from ingot.runtime.loading.loader import Loaded, bind
from ingot.runtime.ranks.in_process import bind_ranks


def verify(path: str | Path) -> Verification:
    """Check an artifact's digests, load it, and repeat its golden run, a short run recorded at the end of the compile.

    Differences from the golden run are returned, and not raised. If native code has changed, it does not run, because
    it is not safe.

    Raises ArtifactError if the artifact is damaged or has no golden run. Raises TargetError if it was compiled for
    another kind of machine.
    """
    artifact = open_artifact(path, check=check_target)
    golden = read_golden(artifact)
    promise, why = _promise(artifact.manifest, golden)
    changed = _changed_files(golden.files, run_files(artifact.manifest))
    rows = _Rows(promise, _tolerance(artifact.manifest))
    failure: IngotError | None = None
    try:
        if native := [line for line in changed if line.startswith(EXE_FOLDER)]:
            raise ArtifactError(f"{len(native)} changed files hold native code, which was not run")
        with _threads(golden.machine.threads):
            loaded = bind_ranks(artifact) if mesh_of(artifact.manifest) else bind(artifact)
            changed += _changed_backends(loaded, golden)
            for output in replay(loaded, golden.requests, golden.schedule, golden.seed):
                rows.compare(output, golden)
    except IngotError as error:
        if not changed:
            raise
        failure = error
    return Verification(
        artifact=artifact.folder,
        build_id=artifact.build_id,
        promise=promise,
        why=why,
        changed=tuple(changed),
        results=rows.results(),
        wrong=len(rows.wrong),
        first=next(iter(rows.wrong), None),
        first_token=next((one for one in rows.wrong if one.token != one.recorded_token), None),
        failure=failure,
    )


def _promise(manifest: Manifest, golden: GoldenRun) -> tuple[Promise, str]:
    here, there = this_machine(manifest).processor, golden.machine.processor
    if here and here == there:
        return Promise.BITWISE, "the processor is like the one that compiled it"
    return Promise.TOLERANCE, f"it was compiled on {there or 'a processor without a name'} and runs on {here or 'one'}"


def _tolerance(manifest: Manifest) -> Tolerance:
    dtype = DTYPES.get(str(manifest.model.get("dtype")))
    if dtype is None or dtype not in TOLERANCES:
        raise ArtifactError(f"the model's dtype is {manifest.model.get('dtype')!r:.80}", where="manifest.json, model")
    return TOLERANCES[dtype]


def _changed_files(recorded: Sequence[FileEntry], found: Sequence[FileEntry]) -> list[str]:
    before, now = ({entry.path: entry for entry in entries} for entries in (recorded, found))
    return [
        f"{path}: " + ("missing" if path not in now else "not there before" if path not in before else "changed")
        for path in sorted(before.keys() | now.keys())
        if before.get(path) != now.get(path)
    ]


def _changed_backends(loaded: Loaded, golden: GoldenRun) -> list[str]:
    changed = []
    for entry, run in golden.entries.items():
        if entry not in loaded.executors:
            raise ArtifactError(f"the golden run is of entry {entry!r:.80}", expected=", ".join(loaded.executors))
        found = backends(loaded.executors[entry])
        for bucket in loaded.plans.plans[entry].buckets:
            name = bucket.bucket.name
            before, now = run.backends.get(name, ()), found[name]
            if len(before) != len(now):
                changed.append(f"{entry}, {name}: {len(now)} instructions, {len(before)} before")
                continue
            changed += [
                f"{entry}, {name}, instruction {number} ({instruction.target[:40]}): computed by"
                f" {instruction.backend}, before by {was}"
                for number, (instruction, was) in enumerate(zip(bucket.instructions, before, strict=True))
                if instruction.backend != was
            ]
    return changed


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _Rows:
    """Compares the logits and tokens of a repeated run with the recorded ones.

    `promise` says whether the bits must be equal. If not, `tolerance` limits the errors. `wrong` collects the rows of
    logits that differ too much.
    """

    promise: Promise
    tolerance: Tolerance
    wrong: list[RowDifference] = field(default_factory=list)
    # By entry and bucket class, the rows of each step: same bits, same token, error, allowed.
    _seen: dict[tuple[str, str], list[list[tuple[bool, bool, float, float]]]] = field(default_factory=dict)

    def compare(self, output: StepOutput, golden: GoldenRun) -> None:
        if output.entry not in golden.entries:
            raise ArtifactError(f"the golden run has no entry '{output.entry}'", where="golden/run.json")
        recorded = golden.entries[output.entry].steps[output.number].rows
        seen: list[tuple[bool, bool, float, float]] = []
        self._seen.setdefault((output.entry, output.bucket), []).append(seen)
        places = golden.places(output.number)
        for (request, position), row, logits, token in zip(places, recorded, output.logits, output.tokens, strict=True):
            same = digest(logits) == row.digest
            error = 0.0 if same else _error(logits, row)
            allowed = (
                self.tolerance.atol + self.tolerance.rtol * _size(row) if self.promise is Promise.TOLERANCE else 0.0
            )
            seen.append((same, token == row.token, error, allowed))
            if not same and (self.promise is Promise.BITWISE or not error <= allowed):
                right = False
            else:
                right = token == row.token or (not same and _is_tie(logits, token, row.token, 2 * allowed))
            if not right:
                place = (output.entry, output.bucket, output.number, request, position)
                self.wrong.append(RowDifference(*place, error, allowed, token, row.token))

    def results(self) -> tuple[BucketResult, ...]:
        made = []
        for (entry, bucket), steps in self._seen.items():
            rows = [row for step in steps for row in step]
            error, allowed = max(((error, allowed) for _, _, error, allowed in rows), default=(0.0, 0.0))
            same, tokens = sum(row[0] for row in rows), sum(row[1] for row in rows)
            made.append(BucketResult(entry, bucket, len(steps), len(rows), same, tokens, error, allowed))
        return tuple(made)


def _size(row: Row) -> float:
    """Return the largest absolute value among a row's recorded logits. Infinities and NaN are ignored.

    Return 0 if no other values are recorded.
    """
    return max((abs(value) for _, value in row.top if isinstance(value, float)), default=0.0)


def _error(logits: torch.Tensor, row: Row) -> float:
    """Return the largest error of a row of logits.

    The recorded `row` has the top tokens with their logits. The logits of these tokens are compared. The largest logits
    of both rows are compared too, in order.
    """
    recorded = torch.tensor([float(value) for _, value in row.top], dtype=torch.float64)
    at = logits[[index for index, _ in row.top]].double()
    largest = logits.topk(len(row.top)).values.double()
    return max(_distance(at, recorded), _distance(largest, recorded))


def _distance(found: torch.Tensor, recorded: torch.Tensor) -> float:
    same = (found == recorded) | (found.isnan() & recorded.isnan())
    error = float(torch.where(same, 0.0, (found - recorded).abs()).max())
    return math.inf if math.isnan(error) else error


def _is_tie(logits: torch.Tensor, token: int, other: int, margin: float) -> bool:
    """Return whether two tokens are valid (not negative) and their logits differ by at most `margin`."""
    return min(token, other) >= 0 and float((logits[token] - logits[other]).abs()) <= margin
