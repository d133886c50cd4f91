"""The trace of a compile: the record of every pass run, and the program before and after it. Defines its files.

trace/passes.json     a list of `PassRun`s in the order in which they ran; at the level "summary" without program texts
trace/00-traced.ir    an entry's program from the frontend, as text; 00-traced@ENTRY.ir for entries other than main
trace/NN-PASS.ir      the program after the pass, or, if that is smaller,
trace/NN-PASS.delta   its difference from the program before it (`ingot.ir.artifact.delta`)
timings.json          "passes": seconds and peak memory of each run, in the same order; outside every identity
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from ingot.ir.artifact.delta import decode_delta, encode_delta
from ingot.ir.artifact.manifest import TIMINGS
from ingot.ir.artifact.record import Numerics, PassRecord, Refusal, Rewrite
from ingot.ir.artifact.refusals import RefusalTable
from ingot.ir.errors import ArtifactError, OptionError

if TYPE_CHECKING:
    from ingot.ir.diff import ProgramDiff
    from ingot.ir.program import Program

Level = Literal["none", "summary", "full"]
LEVELS: tuple[Level, ...] = ("none", "summary", "full")
PASSES = "trace/passes.json"
HOW_TO_GET = "compile the model again with --trace full"
_AGAIN = "compile the model again, or copy the artifact again"


# Names.


def trace_name(entry: str, bucket: str | None) -> str:
    """Return the name of a program for display, such as "draft@decode".

    The first part is the entry (program of the model), left out for main. The second part is the bucket class (range of
    step sizes), left out if there is none. The name is "" if both are left out.
    """
    return "@".join(part for part in ("" if entry == "main" else entry, bucket or "") if part)


def run_name(pass_name: str, entry: str, bucket: str | None) -> str:
    """Return the name of a pass run for display, such as `cse`, `cse@draft` or `make-plan@draft@decode`.

    The first part is the pass. The second part is the entry (program of the model), left out for main. The third part
    is the bucket class (range of step sizes), left out if there is none.
    """
    return "@".join(filter(None, (pass_name, trace_name(entry, bucket))))


def traced_file(entry: str) -> str:
    return f"trace/{run_name('00-traced', entry, None)}.ir"


# Records.


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PassRun(_Schema):
    """One run of a pass, as passes.json records it. `PassRecord` explains the fields.

    `before` and `after` are here the trace's files with the program before and after the pass. They are None if the
    trace holds no programs (level "summary"). A rewrite is (anchor, origin, made): the matched value, where it comes
    from in the model, and the added values.
    """

    name: str
    entry: str
    options: dict[str, Any]
    source_hash: str
    bucket: str | None
    stage: str
    matches: int
    rewrites: tuple[tuple[str, str, tuple[str, ...]], ...]
    refusals: RefusalTable
    op_count_diff: dict[str, int]
    numerics: Numerics
    before: str | None = None
    after: str | None = None

    @property
    def title(self) -> str:
        return run_name(self.name, self.entry, self.bucket)


_RUNS = TypeAdapter(tuple[PassRun, ...])


def encode_trace(level: Level, traced: Mapping[str, str], records: Sequence[PassRecord]) -> dict[str, str | list[Any]]:
    """Return the files of a trace by path. Programs are text, and passes.json is a JSON value.

    With `level` "summary" there is only passes.json, and with "none" there is nothing. `traced` holds the text of each
    entry (program of the model) before the first pass. `records` are the pass runs of all entries, in order.
    """
    if level == "none":
        return {}
    rows = [record.summary() for record in records]
    files: dict[str, str | list[Any]] = {PASSES: rows}
    if level == "summary":
        return files
    for entry, text in traced.items():
        files[traced_file(entry)] = text
    # The file and text of the latest program of each entry, and of each of its bucket classes.
    newest: dict[tuple[str, str | None], tuple[str, str]] = {
        (entry, None): (traced_file(entry), text) for entry, text in traced.items()
    }
    for number, (row, record) in enumerate(zip(rows, records, strict=True), 1):
        place = (record.entry, record.bucket)
        base = newest.get(place) or newest[record.entry, None]
        stem = f"trace/{number:02d}-{run_name(record.name, record.entry, record.bucket)}"
        # Between two passes a program may get its bucket class.
        before = base if record.ir_before == base[1] else _added(files, f"{stem}.before", record.ir_before, base)
        after = _added(files, stem, record.ir_after, before)
        row.update(before=before[0], after=after[0])
        newest[place] = after
    return files


def _added(files: dict[str, str | list[Any]], stem: str, text: str, base: tuple[str, str]) -> tuple[str, str]:
    """Add the text of a program to `files`, and return the (path, text) under which it was added.

    `base` is (path, text) of another program. `files` gets a delta from it if that is shorter, else the text. `stem` is
    the path without the suffix, which is ".delta" or ".ir".
    """
    delta = encode_delta(text, base[1], base[0])
    file, written = (f"{stem}.delta", delta) if len(delta) < len(text) else (f"{stem}.ir", text)
    files[file] = written
    return file, text


# Reading.


@dataclass(frozen=True)
class TraceEntry:
    """One run of a pass in an artifact's trace, with the programs before and after it.

    `number` counts the runs from 1. `run` is its record. `seconds` is its time, and `peak_bytes` the peak of the
    process's resident memory. They are None if the artifact lost its timings. `peak_bytes` is also None if the system
    does not report it.
    """

    number: int
    run: PassRun = field(repr=False)
    seconds: float | None
    peak_bytes: int | None
    _text: Callable[[str], str] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.number:2} {self.run.title}: {self.run.stage}, {self.matches} matches"

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def title(self) -> str:
        """Return the name of the run for display, such as `cse` or `choose-backends@decode`.

        The first part is the pass. The entry (program of the model) follows unless it is main, then the bucket class
        (range of step sizes).
        """
        return self.run.title

    @property
    def entry(self) -> str:
        return self.run.entry

    @property
    def bucket(self) -> str | None:
        return self.run.bucket

    @property
    def stage(self) -> str:
        """Return the name of the program's pipeline stage after the pass."""
        return self.run.stage

    @property
    def options(self) -> dict[str, Any]:
        return self.run.options

    @property
    def matches(self) -> int:
        return self.run.matches

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        return tuple(
            Rewrite(index, anchor, origin, made) for index, (anchor, origin, made) in enumerate(self.run.rewrites)
        )

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        return self.run.refusals.refusals()

    @property
    def op_count_diff(self) -> dict[str, int]:
        """Return the change in the number of calls of each op, such as {"ingot.linear": -2}.

        Ops without a change are left out.
        """
        return self.run.op_count_diff

    @property
    def numerics(self) -> Numerics:
        return self.run.numerics

    @cached_property
    def before_text(self) -> str:
        """Return the program before the pass, as text. Raises ArtifactError if the trace has no programs."""
        return self._text(_recorded(self.run.before, self.title))

    @cached_property
    def after_text(self) -> str:
        """Return the program after the pass, as text. Raises ArtifactError if the trace has no programs."""
        return self._text(_recorded(self.run.after, self.title))

    @cached_property
    def before(self) -> "Program":
        """Return the program before the pass. Raises ArtifactError if the trace has no programs."""
        return _parsed(self.before_text)

    @cached_property
    def after(self) -> "Program":
        """Return the program after the pass. Raises ArtifactError if the trace has no programs."""
        return _parsed(self.after_text)

    def diff(self) -> "ProgramDiff":
        """Return how the pass changed what the program computes.

        Raises ArtifactError if the trace has no programs.
        """
        return self.before.diff(self.after)


def _recorded(file: str | None, title: str) -> str:
    if file is None:
        raise ArtifactError("the artifact's trace holds no programs", where=f"pass {title}", hint=HOW_TO_GET)
    return file


def _parsed(text: str) -> "Program":
    from ingot.ir.parse import parse_program  # here, because it imports torch

    return parse_program(text)


class Trace(Sequence[TraceEntry]):
    """The runs of all passes of a compile, in order. An index is a number or a name: `trace[3]`, `trace["cse@NORMAL"]`.

    A name is a pass such as "cse". It may continue with "@" and one of three: a bucket class (range of step sizes), an
    entry (program of the model), or a pipeline stage. The name of a pass that ran in several stages means its last run.
    """

    def __init__(self, entries: Iterable[TraceEntry], text: Callable[[str], str]) -> None:
        self._entries, self._text = tuple(entries), text

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[TraceEntry]:
        return iter(self._entries)

    @overload
    def __getitem__(self, key: int | str) -> TraceEntry: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[TraceEntry]: ...
    def __getitem__(self, key: int | slice | str) -> TraceEntry | Sequence[TraceEntry]:
        """Return the run with the number or name `key`, or the runs of a slice.

        Raises OptionError for an unknown or ambiguous name, and IndexError for a number out of range.
        """
        if not isinstance(key, str):
            return self._entries[key]
        found = self.runs(key)
        if len({entry.title for entry in found}) > 1:
            titles = ", ".join(dict.fromkeys(entry.title for entry in found))
            raise OptionError(f"pass '{key}' ran several times", expected=f"one of {titles}")
        return found[-1]

    def runs(self, name: str) -> tuple[TraceEntry, ...]:
        """Return all runs of a pass. Raises OptionError if there is none.

        `name` is the pass. It may continue with "@" and one of three: a bucket class (range of step sizes), an entry
        (program of the model), or a pipeline stage.
        """
        wanted, *parts = name.split("@")
        found = tuple(
            entry
            for entry in self._entries
            if entry.name == wanted and all(part in (entry.bucket, entry.entry, entry.stage) for part in parts)
        )
        if not found:
            near = [entry.title for entry in self._entries if entry.name == wanted] or [one.name for one in self]
            nearest = difflib.get_close_matches(name, near, n=1)
            raise OptionError(
                f"no pass '{name}' ran",
                expected=", ".join(dict.fromkeys(near)),
                hint=f"the nearest is '{nearest[0]}'" if nearest else "",
            )
        return found

    def traced_text(self, entry: str = "main") -> str:
        """Return the text of an entry (program of the model) as traced, before the first pass.

        Raises ArtifactError if the trace has no programs.
        """
        if all(one.run.after is None for one in self):
            raise ArtifactError("the artifact's trace holds no programs", where=f"program {entry}", hint=HOW_TO_GET)
        return self._text(traced_file(entry))


def read_trace(rows: object, timings: object, read: Callable[[str], str]) -> Trace:
    """Return the trace of an artifact from its files.

    `rows` is passes.json as a JSON value. `timings` is timings.json as a JSON value, or None if the file is lost.
    `read` returns another file of the artifact as text. Raises ArtifactError if `rows` or `timings` are malformed. A
    damaged program raises ArtifactError only when it is read.
    """
    try:
        runs = _RUNS.validate_python(rows)
    except ValidationError as error:
        first = error.errors()[0]
        raise _malformed(PASSES, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    costs = _costs(timings, runs)
    texts = _Texts(read)
    return Trace(
        [
            TraceEntry(number, run, *cost, texts.text)
            for number, (run, cost) in enumerate(zip(runs, costs, strict=True), 1)
        ],
        texts.text,
    )


def _costs(timings: object, runs: Sequence[PassRun]) -> list[tuple[float | None, int | None]]:
    """Return (seconds, peak bytes of memory) of each pass run, from the JSON value of timings.json.

    Both are None for each run if `timings` is None.
    """
    if timings is None:
        return [(None, None)] * len(runs)
    try:
        passes: Any = timings["passes"]  # type: ignore[index]  # the except clause below reports another type
        if [one["name"] for one in passes] != [run.name for run in runs]:
            raise ValueError("the passes are not those of the trace")
        return [(float(one["seconds"]), one["peak_bytes"]) for one in passes]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(TIMINGS, str(error)) from None


class _Texts:
    """Reads the programs of a trace as text. A program's file may be a delta from another file.

    The last program is cached, because the next file is often a delta from it.
    """

    def __init__(self, read: Callable[[str], str]) -> None:
        self._read, self._known = read, ("", "")

    def text(self, file: str) -> str:
        if self._known[0] != file:
            self._known = (file, self._resolved(file, ()))
        return self._known[1]

    def _resolved(self, file: str, above: tuple[str, ...]) -> str:
        if file == self._known[0]:
            return self._known[1]
        if file in above:
            raise ArtifactError(f"{file} is a delta of itself", where=file, hint=_AGAIN)
        written = self._read(file)
        if not file.endswith(".delta"):
            return written
        return decode_delta(written, lambda base: self._resolved(base, (*above, file)), file)


def _malformed(file: str, what: str) -> ArtifactError:
    return ArtifactError(f"{file} is malformed: {what}", where=file, hint=_AGAIN)
