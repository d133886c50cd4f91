"""The trace's files: differences give back every text exactly, and damage is refused, never read as something else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from run_seed import run_seed

from ingot.ir.artifact.delta import decode_delta, encode_delta
from ingot.ir.artifact.record import Numerics, PassRecord, Refusal, Rewrite, Snapshot
from ingot.ir.artifact.trace import PASSES, encode_trace, read_trace, traced_file
from ingot.ir.errors import ArtifactError, OptionError

LINES = ["%a = add(%b) : f32[T]", "}", "", "+", "=1-2", "  in: i32[T]  # layer 0", "…"]


def printed(text: str) -> Snapshot:
    """A text without a program."""
    return Snapshot(text, str)


def record(name: str, before: str, after: str, bucket: str | None = None, **changes: Any) -> PassRecord:
    plain = PassRecord(
        name=name,
        entry="main",
        options={"page_size": 16},
        source_hash="0" * 64,
        bucket=bucket,
        stage="NORMAL",
        rewrites=(Rewrite(0, "a", "layer 0", ("b", "c")), Rewrite(1, "d", "")),
        refusals=(Refusal("e", "its argument is 3"),),
        op_count_diff={"ingot.linear": -1},
        numerics=Numerics.ROUNDING,
        seconds=0.5,
        peak_bytes=7,
        before=printed(before),
        after=printed(after),
    )
    return replace(plain, **changes)


def edited(text: str, draw: random.Random) -> str:
    """Lines removed, added, repeated and moved."""
    lines = text.split("\n")
    for _ in range(draw.randrange(6)):
        place = draw.randrange(len(lines) + 1)
        match draw.randrange(3):
            case 0:
                del lines[place : place + draw.randrange(4)]
            case 1:
                lines.insert(place, draw.choice([*LINES, f"new {draw.random()}"]))
            case _:
                lines[place:place] = lines[: draw.randrange(5)]
        lines = lines or [""]
    return "\n".join(lines)


def drawn_text(draw: random.Random) -> str:
    count = draw.choice([0, 1, 5, 40])
    return "".join(draw.choice([*LINES, f"line {draw.randrange(60)}"]) + "\n" for _ in range(count))


def refuse(file: str) -> str:
    raise ArtifactError(f"no file {file!r}")


def reader(files: dict[str, str]) -> Callable[[str], str]:
    return lambda file: files[file] if file in files else refuse(file)


def test_a_difference_gives_back_the_text() -> None:
    print("INGOT_TEST_SEED", run_seed())
    draw = random.Random(f"{run_seed()} exact")
    for _ in range(300):
        base = drawn_text(draw)
        text = edited(base, draw)
        assert decode_delta(encode_delta(text, base, "base.ir"), reader({"base.ir": base}), "d") == text


def test_what_stays_costs_a_line() -> None:
    base = "".join(f"line {number}\n" for number in range(1000))
    delta = encode_delta(base.replace("line 500\n", "other\n"), base, "base.ir")
    assert delta.split("\n")[3:] == ["=1-500", "+other", "=502-1001", ""]


def test_a_damaged_difference_is_refused() -> None:
    print("INGOT_TEST_SEED", run_seed())
    draw = random.Random(f"{run_seed()} damage")
    refused = 0
    for _ in range(300):
        base = drawn_text(draw) + "the end\n"
        text = edited(base, draw)
        delta = encode_delta(text, base, "base.ir")
        place = draw.randrange(len(delta))
        damaged = draw.choice(
            [
                delta[:place],
                delta[:place] + delta[place + 1 :],
                delta[:place] + chr(draw.randrange(32, 127)) + delta[place + 1 :],
                delta[:place] + "\n" + delta[place:],
            ]
        )
        try:
            found = decode_delta(damaged, reader({"base.ir": base}), "trace/03-x.delta")
        except ArtifactError as error:
            refused += 1
            assert "03-x.delta" in str(error) or "no file" in str(error)
        else:
            assert found == text  # the same text by other words, such as a range written with a zero in front
    assert refused > 250


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        ("delta 2\nbase b\nsha256 0\n+x\n", "begins with 'delta 2'"),
        ("delta 1\nbase b\n", "cut short"),
        ("delta 1\nsha256 0\nbase b\n+x\n", "has no base and digest"),
        ("delta 1\nbase b\nsha256 0\n=0-1\n", "line 4 is '=0-1'"),
        ("delta 1\nbase b\nsha256 0\n=2-1\n", "line 4 is '=2-1'"),
        ("delta 1\nbase b\nsha256 0\n=1-99\n", "line 4 is '=1-99'"),
        ("delta 1\nbase b\nsha256 0\n=1-²\n", "line 4 is"),
        ("delta 1\nbase b\nsha256 0\n-x\n", "line 4 is '-x'"),
        ("delta 1\nbase b\nsha256 0\n+x\n", "yields another text"),
    ],
)
def test_each_kind_of_damage_is_named(damaged: str, said: str) -> None:
    with pytest.raises(ArtifactError) as error:
        decode_delta(damaged, reader({"b": "one\ntwo\n"}), "trace/03-x.delta")
    assert said in str(error.value) and "trace/03-x.delta" in str(error.value)


# A trace of several passes, entries and bucket classes.

SHARED = "program main\nline 1\nline 2\nline 3\n"
RECORDS = (
    record("cse", SHARED, SHARED),
    record("fuse", SHARED, SHARED.replace("line 2", "fused"), stage="FUSED"),
    record("cse", SHARED.replace("line 2", "fused"), SHARED.replace("line 2", "fused"), stage="FUSED"),
    record("choose", "program main bucket=a\nline 1\nfused\nline 3\n", "program main bucket=a\nother\n", "a"),
    record("choose", "program main bucket=b\nline 1\nfused\nline 3\n", "program main bucket=b\nline 1\n", "b"),
    record("cse", "program draft\nshort\n", "program draft\n", entry="draft"),
)
TRACED = {"main": SHARED, "draft": "program draft\nshort\n"}
TIMINGS = {"passes": [{"name": one.name, "seconds": index, "peak_bytes": 9} for index, one in enumerate(RECORDS)]}


def written(level: Any = "full") -> dict[str, str | list[Any]]:
    files = encode_trace(level, TRACED, RECORDS)
    # As it comes back from the disk: tuples are lists.
    return {name: one if isinstance(one, str) else json.loads(json.dumps(one)) for name, one in files.items()}


def texts(files: dict[str, str | list[Any]]) -> Callable[[str], str]:
    return reader(cast("dict[str, str]", files))


def test_a_trace_reads_back_what_was_recorded() -> None:
    files = written()
    trace = read_trace(files[PASSES], TIMINGS, texts(files))
    assert len(trace) == len(RECORDS) == len(list(trace)) and trace[-1].number == len(RECORDS)
    for index in (5, 0, 3, 4, 2, 1):  # in any order
        entry, made = trace[index], RECORDS[index]
        assert (entry.before_text, entry.after_text) == (made.ir_before, made.ir_after)
        for name in (
            "name",
            "entry",
            "bucket",
            "stage",
            "options",
            "matches",
            "rewrites",
            "refusals",
            "op_count_diff",
            "numerics",
        ):
            assert getattr(entry, name) == getattr(made, name), name
        assert (entry.seconds, entry.peak_bytes) == (index, 9)
    assert trace.traced_text() == SHARED and trace.traced_text("draft") == TRACED["draft"]
    assert set(files) >= {PASSES, traced_file("main"), "trace/00-traced@draft.ir"}


def test_runs_are_found_by_name() -> None:
    trace = read_trace((files := written())[PASSES], TIMINGS, texts(files))
    assert trace["fuse"] is trace[1] and trace["choose@b"] is trace[4] and trace["cse@draft"] is trace[5]
    assert trace["cse@main"] is trace[2], "the last of its runs"
    assert trace["cse@NORMAL@main"] is trace[0]
    assert [entry.number for entry in trace.runs("cse")] == [1, 3, 6]
    assert [entry.title for entry in trace[3:]] == ["choose@a", "choose@b", "cse@draft"]
    for name, said in (("chose", "nearest is 'choose'"), ("choose", "choose@a, choose@b"), ("choose@c", "choose@a")):
        with pytest.raises(OptionError, match=said):
            trace[name]
    with pytest.raises(IndexError):
        trace[6]


def test_levels_keep_what_they_say() -> None:
    assert written("none") == {}
    files = written("summary")
    assert list(files) == [PASSES]
    trace = read_trace(files[PASSES], None, refuse)
    assert trace["fuse"].rewrites == RECORDS[1].rewrites and trace["fuse"].seconds is None
    for ask in (lambda: trace["fuse"].before_text, lambda: trace["fuse"].after, trace.traced_text):
        with pytest.raises(ArtifactError, match=r"holds no programs(.|\n)*--trace full"):
            ask()


def test_a_damaged_trace_is_refused() -> None:
    rows: Any = written()[PASSES]
    for damage, said in (
        ({"matches": "two"}, "0.matches"),
        ({"more": 1}, "0.more"),
        ({"numerics": "perfect"}, "0.numerics"),
        ({"rewrites": [["a"]]}, "0.rewrites"),
    ):
        with pytest.raises(ArtifactError, match=said):
            read_trace([{**rows[0], **damage}], None, refuse)
    for value in (None, {}, [1]):
        with pytest.raises(ArtifactError, match=r"passes\.json is malformed"):
            read_trace(value, None, refuse)
    for timings in ({}, [], {"passes": [{"name": "other", "seconds": 1, "peak_bytes": 1}]}, {"passes": [{}]}):
        with pytest.raises(ArtifactError, match=r"timings\.json is malformed"):
            read_trace(rows, timings, refuse)
    circle = {"a.delta": encode_delta("x", "x", "b.delta"), "b.delta": encode_delta("x", "x", "a.delta")}
    trace = read_trace([{**rows[0], "after": "a.delta"}], None, reader(circle))
    with pytest.raises(ArtifactError, match="delta of itself"):
        _ = trace[0].after_text
