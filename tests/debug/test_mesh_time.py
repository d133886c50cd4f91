"""Times of a step on a mesh: the arithmetic of spans worked out by hand, floors of collectives, and merged traces."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.views.mesh_time import print_mesh_time
from ingot.debug.explained import BucketCosts, Call, StepShape
from ingot.debug.mesh_time import collectives
from ingot.debug.mesh_time.collectives import LEAST_SENT, link_bandwidth
from ingot.debug.mesh_time.evaluate import MeshCalls, evaluate
from ingot.debug.mesh_time.merge_traces import merge_traces
from ingot.debug.mesh_time.run import MeshRun
from ingot.debug.mesh_time.times import Collective, Exchange, MeshTime, RankCall, RankStep
from ingot.ir.errors import InternalError, OutputError
from ingot.ir.machine.gpu_times import H200_TIMES
from ingot.ir.machine.gpus import TYPICAL, Gpu
from ingot.ir.ops import OPS
from ingot.runtime.ranks.measuring.recorder import CallSpan, read_spans, spans_json
from ingot.runtime.ranks.measuring.schedule import MeasuringSchedule, StepKind

S = 10**9  # nanoseconds
REDUCE = Collective("all_reduce", "tp", 100, 0.5)


def spans(*found: tuple[str, int, float, float], size: int = 0) -> list[CallSpan]:
    """Spans of (kind, number, begin, end), in seconds."""
    return [CallSpan(kind, number, round(begin * S), round(end * S), size) for kind, number, begin, end in found]


def slower(step: list[CallSpan], factor: int) -> list[CallSpan]:
    return [replace(one, begin=one.begin * factor, end=one.end * factor) for one in step]


def test_the_smallest_time_of_a_collective_is_moving_and_the_rest_is_waiting() -> None:
    first = spans(("call", 0, 0, 1), ("call", 1, 1, 6), ("call", 2, 6.5, 7))
    second = spans(("call", 0, 0, 4), ("call", 1, 4, 6), ("call", 2, 6, 7))
    # The slower half of the steps does not count.
    run = MeshRun([9.0, 7.0, 8.0], {0: [slower(first, 10), first], 1: [slower(second, 10), second]}, {})
    time, calls = evaluate(run, {"tp": 2}, MeshCalls([["norm", "sum", "add"]], {"sum": REDUCE}, 200))
    assert (time.mesh, time.measured, time.recorded, time.steps, time.link) == ("tp=2", 8.0, 7.0, 1, 200)
    zero, one = time.ranks
    assert (zero.seconds, zero.computes, zero.moves, zero.waits, zero.between) == (7, 1.5, 2, 3, 0.5)
    assert (one.seconds, one.computes, one.moves, one.waits, one.between) == (7, 5, 2, 0, 0)
    assert (zero.waits_for, one.waits_for) == ({1: 3}, {})
    assert (zero.name, one.name, one.stage) == ("rank 0 (tp=0)", "rank 1 (tp=1)", 0)
    assert calls["sum"] == (RankCall(0, 5, 3), RankCall(1, 2, 0)) and calls["norm"] == (RankCall(0, 1), RankCall(1, 4))
    (exchange,) = time.exchanges
    assert (exchange.what, exchange.axis, exchange.ranks, exchange.calls) == ("all_reduce", "tp", (0, 1), 1)
    assert (exchange.sent, exchange.floor, exchange.moves, exchange.waits) == (100, 0.5, 2, 3)
    assert exchange.last == {1: 1.0}


def test_equal_collectives_of_one_group_are_one_exchange() -> None:
    """Two sums, and a gathering of other bytes, in two steps in which another rank comes last."""
    step = spans(("call", 0, 0, 3), ("call", 1, 3, 4), ("call", 2, 4, 5))
    other = spans(("call", 0, 2, 3), ("call", 1, 3, 6), ("call", 2, 6, 7))
    run = MeshRun([1.0], {0: [step, other] * 2, 1: [other, step] * 2}, {})
    found = {"a": REDUCE, "b": REDUCE, "c": Collective("all_gather", "tp", 7)}
    time, _ = evaluate(run, {"tp": 2}, MeshCalls([["a", "b", "c"]], found))
    reduced, gathered = time.exchanges
    assert (reduced.calls, reduced.moves, reduced.waits, reduced.last) == (2, 1, 2, {0: 0.5, 1: 0.5})
    assert (gathered.what, gathered.sent, gathered.calls, gathered.floor) == ("all_gather", 7, 1, None)
    assert time.steps == 2 and [one.waits_for for one in time.ranks] == [{1: 2}, {0: 2}]


def test_a_stage_waits_until_the_other_one_sends() -> None:
    first = [
        *spans(("call", 0, 0, 3)),
        *spans(("send", 1, 3, 3.25), ("send", 1, 3.25, 3.5), size=64),
        *spans(("receive", 1, 4, 9), size=8),
    ]
    second = [
        *spans(("receive", 0, 1, 5), ("receive", 0, 5, 6), size=64),
        *spans(("call", 0, 6, 8)),
        *spans(("send", 0, 8, 8.5), size=8),
    ]
    run = MeshRun([10.0], {0: [first], 1: [second]}, {})
    time, calls = evaluate(run, {"pp": 2}, MeshCalls([["up"], ["down"]], {}, 16))
    zero, one = time.ranks
    # Stage 0 waits from 4 to 8, when stage 1 sends. Both of its sends move, half a second, and so does the last one.
    assert (zero.computes, zero.waits, zero.moves, zero.between, zero.seconds) == (3, 4, 1.5, 0.5, 9)
    # Stage 1 waits from 1 to 3. The second value was sent before, so receiving it moves alone.
    parts = (one.computes, one.waits, one.moves, one.between, one.seconds)
    assert parts == pytest.approx((2, 2, 3.5, 0, 7.5))
    assert (zero.waits_for, one.waits_for) == ({1: 4}, {0: 2})
    assert calls == {"up": (RankCall(0, 3),), "down": (RankCall(1, 2),)}
    forth, back = time.exchanges
    assert (forth.what, forth.axis, forth.ranks, forth.calls, forth.sent) == ("stage 0 to 1", "pp", (0, 1), 2, 64)
    assert (forth.moves, forth.waits, forth.floor, forth.last) == (1.5, 1, 4, {0: 0.5, 1: 0.5})
    assert (back.what, back.calls, back.moves, back.waits, back.last) == ("stage 1 to 0", 1, 1, 4, {1: 1.0})


def test_ranks_of_two_stages_exchange_among_themselves() -> None:
    """Of a mesh of pp=2 tp=2, ranks 0 and 1 add, and each sends to the rank of its place."""
    early, late = spans(("call", 0, 0, 5)), spans(("call", 0, 4, 5))
    sent = spans(("send", 1, 5, 5.5), size=4)
    received = [*spans(("receive", 0, 0, 6), size=4), *spans(("call", 0, 6, 7))]
    run = MeshRun([1.0], {0: [early + sent], 1: [late + sent], 2: [received], 3: [received]}, {})
    time, calls = evaluate(run, {"pp": 2, "tp": 2}, MeshCalls([["sum"], ["head"]], {"sum": REDUCE}))
    assert [one.waits_for for one in time.ranks] == [{1: 4}, {}, {0: 5}, {1: 5}]
    reduced, forth = time.exchanges
    assert reduced.ranks == (0, 1) and (forth.ranks, forth.calls) == ((0, 1, 2, 3), 1)
    assert [one.rank for one in calls["head"]] == [2, 3]


def test_a_rank_that_lacks_a_call_is_named() -> None:
    whole, part = spans(("call", 0, 0, 1), ("call", 1, 1, 2)), spans(("call", 0, 0, 1), ("call", 0, 1, 2))
    run = MeshRun([1.0], {0: [whole], 1: [part]}, {})
    with pytest.raises(InternalError, match=r"rank 1 \(tp=1\) has recorded 2 calls of a step") as caught:
        evaluate(run, {"tp": 2}, MeshCalls([["norm", "sum"]], {"sum": REDUCE}))
    assert "each of its 2 calls once" in caught.value.expected


@pytest.mark.parametrize(
    ("op", "of_two", "of_four"), [("all_reduce", 1, 1.5), ("all_gather", 1, 3), ("reduce_scatter", 0.5, 0.75)]
)
def test_least_bytes_of_a_collective(op: str, of_two: float, of_four: float) -> None:
    """What a rank sends in a ring, as a multiple of its own argument."""
    assert (LEAST_SENT[op](2), LEAST_SENT[op](4)) == (Fraction(of_two), Fraction(of_four))


def test_every_collective_has_a_floor_or_needs_no_other_rank() -> None:
    legal = {name for name, op in OPS.items() if op.across is not None and op.legal != "open"}
    assert legal == set(LEAST_SENT) | {"take_part", "vocab_embedding"}


def test_a_link_is_known_for_the_gpus_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = replace(TYPICAL["sm_90"], links=True)
    cases: list[tuple[Gpu, int | None]] = [
        (h200, H200_TIMES.link),
        (replace(h200, links=False), None),
        (replace(h200, product="NVIDIA H100"), None),
    ]
    for gpu, wanted in cases:
        monkeypatch.setattr(collectives, "find_gpu", lambda gpu=gpu: gpu)
        assert link_bandwidth("cuda") == wanted
    assert H200_TIMES.link is not None and link_bandwidth("cpu") is None


def test_a_schedule_says_what_each_step_is() -> None:
    plain, recorded, traced = StepKind.PLAIN, StepKind.RECORDED, StepKind.TRACED
    schedule = MeasuringSchedule(2, 3)
    assert [schedule.kind(step) for step in range(schedule.steps)] == [plain] * 2 + [recorded] * 3
    assert schedule.preparing is None
    schedule = MeasuringSchedule.read(json.loads(json.dumps(MeasuringSchedule(1, 1, 2).to_json())))
    assert [schedule.kind(step) for step in range(schedule.steps)] == [plain, recorded, plain, traced, traced]
    assert schedule.preparing == 2


def test_spans_pass_through_json() -> None:
    steps = [spans(("call", 3, 1, 2)), [*spans(("send", 1, 2, 3), size=5)]]
    assert read_spans(json.loads(json.dumps(spans_json(steps)))) == steps


def trace(base: int, pid: int, *more: dict[str, Any]) -> bytes:
    labels = {"ph": "M", "name": "process_labels", "pid": pid, "args": {"labels": "CPU"}}
    named = {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "python"}}
    call = {"ph": "X", "name": "0 ingot.add", "pid": pid, "tid": 5, "ts": 10.0, "dur": 2.0}
    flow = {"ph": "s", "name": "ac2g", "pid": pid, "tid": 5, "ts": 10.0, "id": 1}
    own = {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 1.0, "dur": 1.0}
    events = [named, labels, call, flow, own, *more]
    return json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": events}).encode()


@pytest.mark.parametrize("name", ["all.json", "all.json.gz"])
def test_merged_traces_have_a_process_for_each_rank(name: str, tmp_path: Path) -> None:
    kernel = {"ph": "X", "name": "gemm", "pid": 0, "tid": 7, "ts": 11.0, "dur": 1.0}
    device = {"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": "GPU 0"}}
    first, second = trace(5000, 70, kernel, device), trace(8000, 70, kernel, device)
    merge_traces({"rank 0 (tp=0)": first, "rank 1 (tp=1)": second}, tmp_path / name)
    read: Callable[[bytes], bytes] = gzip.decompress if name.endswith(".gz") else bytes
    merged = json.loads(read((tmp_path / name).read_bytes()))
    events = merged["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    wanted = ["rank 0 (tp=0)", "rank 0 (tp=0), GPU 0", "rank 1 (tp=1)", "rank 1 (tp=1), GPU 0"]
    assert [names[pid] for pid in sorted(names)] == wanted
    calls = {names[one["pid"]]: one["ts"] for one in events if one["name"] == "0 ingot.add"}
    assert calls == {"rank 0 (tp=0)": 10.0, "rank 1 (tp=1)": 13.0} and merged["baseTimeNanoseconds"] == 5000
    assert len({one["id"] for one in events if one["ph"] == "s"}) == 2
    assert not any("Profiler" in one["name"] for one in events)


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="the trace cannot be written: Is a directory"):
        merge_traces({"rank 0 (tp=0)": trace(0, 1)}, tmp_path)


def a_call(name: str, *stages: int, region: str = "") -> Call:
    times = () if region else tuple(RankCall(2 * stage + place, stage + 1.0) for stage in stages for place in (0, 1))
    facts: dict[str, Any] = {"layer": None, "origin": "", "flops": 0, "bytes": 0, "backend": "", "claims": {}}
    return Call(name, name, **facts, region=region, stages=stages, ranks=times)


def a_time(link: int | None, *exchanges: Exchange) -> MeshTime:
    of_ranks = [RankStep(rank, f"rank {rank}", rank // 2, 4.0, 1.0, 1.0, 1.5, 0.5, {1: 1.5}) for rank in range(4)]
    return MeshTime("pp=2 tp=2", 9.0, 8.0, 12, link, tuple(of_ranks), exchanges)


def test_a_stage_has_its_calls_with_the_times_of_its_ranks() -> None:
    calls = (a_call("feed", 0, 1), a_call("r0", 0), a_call("up", 0, region="r0"), a_call("head", 1))
    costs = BucketCosts("main", "any", StepShape(4, 4, 8), calls, mesh=a_time(None))
    first, last = costs.by_stage().values()
    assert [one.name for one in first] == ["feed", "r0", "up"] and [one.name for one in last] == ["feed", "head"]
    assert [[time.rank for time in one.ranks] for one in (*first, *last)] == [[0, 1], [0, 1], [], [2, 3], [2, 3]]
    assert calls[0].slowest == RankCall(2, 2.0) and calls[2].slowest is None


def test_the_tables_of_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    reduced = Exchange("all_reduce", "tp", (0, 1), 3, 4000, 10e-6, 40e-6, 5e-6, {0: 0.25, 1: 0.75})
    moved = Exchange("stage 0 to 1", "pp", (0, 1, 2, 3), 2, 64, None, 3e-6, 0.0, {0: 0.3, 1: 0.3, 2: 0.4})
    print_mesh_time(a_time(400 * 10**9, reduced, moved))
    text = capsys.readouterr().out
    rows = [re.split(r"  +", line) for line in text.splitlines()]
    assert ["rank 0", "4000.00 ms", "1000.00 ms", "1000.00 ms", "1500.00 ms", "500.00 ms", "rank 1 1500.00 ms"] in rows
    found = ["all_reduce", "tp", "0, 1", "3", "4.0 kB", "10.0 µs", "40.0 µs", "25%", "5.0 µs"]
    assert [*found, "rank 1, 75% of the calls"] in rows
    found = ["stage 0 to 1", "pp", "0, 1, 2, 3", "2", "64 B", "–", "3.0 µs", "–", "0.0 µs"]
    assert [*found, "stage 0, 60% of the calls"] in rows
    assert "link      400.0 GB/s, a measured copy between two of these devices\n" in text
    print_mesh_time(a_time(None))
    text = capsys.readouterr().out
    assert "exchange" not in text and "the sent bytes alone are the floor" in text
