"""`ingot explain`: show each call's cost and candidate backends, and where passes nearly applied."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from ingot.cli.commands import ArtifactFolder, AsJson, Flag, Variant
from ingot.cli.console import console, facts, print_json, print_table, size_text, table
from ingot.cli.views.caches import print_caches
from ingot.cli.views.mesh_time import print_mesh_time
from ingot.cli.views.step_time import known_columns, print_step_time, time_text
from ingot.ir.errors import OptionError

if TYPE_CHECKING:
    from ingot.debug.explained import BucketCosts, Call, PassMisses


# Columns of seconds: those of the golden run, and on a GPU those of a step.
_SECONDS: tuple[str, ...] = ("measured>",)
_TIMES: tuple[str, ...] = ("roofline>", "predicted>", "measured>", "traced>")
# On a mesh: of the ranks that run a call, the times of the fastest and the slowest one, and the index of the latter.
_ON_RANKS: tuple[str, ...] = ("fastest>", "slowest>", "rank>")


def explain_artifact(
    artifact: ArtifactFolder,
    /,
    *,
    step: str | None = None,
    measure: Flag = False,
    trace: str | None = None,
    layer: int | None = None,
    op: str | None = None,
    backend: str | None = None,
    pass_name: Annotated[str | None, Parameter(name="--pass")] = None,
    sort: Literal["bytes", "flops", "seconds", "time"] | None = None,
    variant: Variant = None,
    json: AsJson = False,
) -> None:
    """Show each call's cost and candidate backends. Show for each pass where it nearly applied, and why it did not.

    Parameters
    ----------
    step
        The step to show costs and times for, as in T=32,context=512. The step has T tokens of B sequences. Each
        sequence has context positions after the step. Default: a large step of each bucket class. In decode classes,
        each sequence has one token. In other classes, the step has as few sequences as can hold the tokens. A context
        has 1024 positions, or fewer if sequences are shorter.
    measure
        Run that step on this machine's GPU, or on all ranks of a mesh. Time each call and the whole step. On a mesh,
        also show the time of moving values between ranks, and which rank waits for which.
    trace
        Also record that step with a profiler, and show what each call adds to it. It is measured too. The file is for
        Perfetto or chrome://tracing. It is compressed if its name ends in .gz. On a mesh, it has all ranks, and the
        table has no times of it.
    layer
        Only calls of this layer.
    op
        Only calls of this op, as in ingot.linear or linear.
    backend
        Only calls that this backend computes.
    pass_name
        Only the places where this pass nearly applied.
    sort
        The largest calls first. bytes, flops: by cost. seconds: by the time in the golden run, a short run at the end
        of the compile. time: by the measured or predicted time on a GPU, or by that of the slowest rank.
        Default: program order.
    """
    from ingot.debug.explain import explain
    from ingot.debug.requested_step import RequestedStep
    from ingot.runtime.loading.variants import variant_folder

    requested = None if step is None else RequestedStep.parse(step)
    measure = measure or trace is not None  # a trace records a measured step
    if measure and (requested is None or requested.tokens is None):
        option = "--measure" if trace is None else "--trace"
        raise OptionError(f"{option} needs a step", where=option, expected="--step T=…, its tokens")
    if trace is not None and not Path(trace).parent.is_dir():
        raise OptionError(
            f"'{trace:.200}' is in no existing folder", where="--trace", expected="a file in an existing folder"
        )
    found = explain(
        variant_folder(artifact, variant), requested, measure=measure, trace=None if trace is None else Path(trace)
    )
    filters = [value for value in (layer, op, backend) if value is not None]
    if pass_name is not None and (filters or sort is not None):
        raise OptionError("--pass together with options that select calls", expected="one of them")
    if filters:
        found = found.of(lambda call: _wanted(call, layer, op, backend))
        if not any(bucket.calls for bucket in found.buckets):
            raise OptionError("no call matches", expected=f"a layer, op or backend of {found.artifact}")
    if sort is not None:
        found = found.by(lambda call: _size(call, sort))
    passes = [one for one in found.passes if pass_name in (None, one.name)]
    if pass_name is not None and not passes:
        names = ", ".join(dict.fromkeys(one.name for one in found.passes))
        raise OptionError(f"no pass '{pass_name}' ran", where="--pass", expected=names or "a trace of the passes")
    if json:
        value = found.to_json()
        value["passes"] = [one for one in value["passes"] if pass_name in (None, one["name"])]
        if pass_name is not None:
            del value["buckets"], value["caches"]
        print_json(value)
        return
    if pass_name is None:
        for bucket in found.buckets:
            _print_calls(bucket, filtered=bool(filters))
    if not filters and pass_name is None:
        print_caches(console(), found.caches.to_json())
        console().print()
    if not filters and sort is None:
        shown = {(bucket.entry, bucket.bucket) for bucket in found.buckets}
        _print_misses([one for one in passes if one.bucket is None or (one.entry, one.bucket) in shown])


def _size(call: "Call", sort: str) -> float:
    if sort == "time":
        if call.slowest is not None:
            return call.slowest.seconds
        return call.time.taken if call.time is not None else 0
    size: float | None = getattr(call, sort)
    return size or 0


def _wanted(call: "Call", layer: int | None, op: str | None, backend: str | None) -> bool:
    return (
        (layer is None or call.layer == layer)
        and (op is None or op in (call.op, call.op.removeprefix("ingot.")))
        and (backend is None or call.backend == backend)
    )


def _print_calls(bucket: "BucketCosts", *, filtered: bool) -> None:
    out, step = console(), bucket.step
    name = bucket.bucket if bucket.entry == "main" else f"{bucket.entry}@{bucket.bucket}"
    sequences = f"{step.sequences} sequence{'s' if step.sequences > 1 else ''}"
    out.print(f"{name}: {step.tokens} tokens of {sequences}, context {step.context}", style="bold", markup=False)
    times = _SECONDS
    if bucket.time is not None:
        times = _TIMES[: 2 + known_columns(bucket.time)]
    if bucket.mesh is not None:
        times = (*(times if bucket.time is not None else ()), *_ON_RANKS)
    columns = ("call", "op", "layer>", "flops>", "bytes>", *times, "backend", "origin", "others")
    stages = {} if bucket.mesh is None else bucket.by_stage()
    if len(stages) < 2:
        print_table(out, table(columns, [_row(call, times) for call in bucket.calls]))
    else:
        for stage, calls in stages.items():
            out.print(f"stage {stage}:", markup=False)
            print_table(out, table(columns, [_row(call, times) for call in calls]))
            out.print()
    total, seconds = bucket.total(), bucket.seconds()
    lines: list[tuple[str, object]] = [("flops", _count(total.flops)), ("bytes", size_text(total.bytes))]
    if seconds is not None and times == _SECONDS:
        fed = ", ".join(map(str, step.timed))
        lines.append(("measured", f"{time_text(seconds)}, the median of steps of {fed} tokens"))
    if len(stages) < 2:
        out.print()
    print_table(out, facts(lines))
    out.print()
    if bucket.time is not None and not filtered:
        print_step_time(bucket.time)
    if bucket.mesh is not None and not filtered:
        print_mesh_time(bucket.mesh)


def _row(call: "Call", columns: Sequence[str]) -> tuple[object, ...]:
    name = f"  {call.name}" if call.region else call.name
    others = ", ".join(_others(call))
    layer = "–" if call.layer is None else call.layer
    times = [_time(call, column) for column in columns]
    size = size_text(call.bytes)
    own = call.claims.get(call.backend)
    # In a region a backend has calls that it would not take outside one.
    backend = f"{call.backend} {own:g}" if isinstance(own, float) else call.backend
    if call.decision is not None:
        backend = ", ".join(filter(None, (backend, call.decision.decided, call.decision.of_backend(call.backend))))
    return name, call.op, layer, _count(call.flops), size, *times, backend, call.origin, others


def _time(call: "Call", column: str) -> str:
    """Return what a column of times says of a call."""
    if column in _ON_RANKS:
        if call.slowest is None:
            return "–"
        if column == "rank>":
            return str(call.slowest.rank)
        return time_text(call.slowest.seconds if column == "slowest>" else min(one.seconds for one in call.ranks))
    seconds = call.seconds if call.time is None else getattr(call.time, column.removesuffix(">"))
    return "–" if seconds is None else time_text(seconds)


def _others(call: "Call") -> Iterator[str]:
    """Yield a text for each backend that was not chosen for the call.

    The text has the backend's cost and times, or the reason why the backend refused the call.
    """
    others = {backend: claim for backend, claim in call.claims.items() if backend != call.backend}
    for backend, claim in others.items():
        if isinstance(claim, float):
            times = call.decision.of_backend(backend) if call.decision is not None else ""
            yield f"{backend} {claim:g}, {times}" if times else f"{backend} {claim:g}"
    yield from (f"no {backend}: {claim}" for backend, claim in others.items() if isinstance(claim, str))


def _count(value: int) -> str:
    """Return a number as text in decimal units, such as "1.2 G"."""
    number = float(value)
    for unit in ("", " k", " M", " G", " T"):
        if number < 999.95:
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f} P"


def _print_misses(passes: "list[PassMisses]") -> None:
    out = console()
    rows = []
    for one in passes:
        where = "@".join(part for part in ("" if one.entry == "main" else one.entry, one.bucket or "") if part)
        name = f"{one.name}@{where}" if where else one.name
        misses: list[tuple[object, ...]] = [(miss.count, miss.reason, f"%{miss.node}") for miss in one.misses]
        misses = misses or [("–", "nowhere", "–")]
        rows += [(name if i == 0 else "", one.matches if i == 0 else "", *miss) for i, miss in enumerate(misses)]
    print_table(out, table(("pass", "applied>", "not>", "because", "first at"), rows))
