"""`ingot explain --measure` and `--trace` on a mesh of processes: whose time is whose, and ranks that fail."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drawn import drawn, drawn_in_one_of
from planted_rank import plant

import ingot.cli.main as cli
from ingot.debug.mesh_time import run as measured_run
from ingot.debug.mesh_time.collectives import collective_in
from ingot.ir.mesh import parse_mesh, ranks
from ingot.ir.parse import parse_programs
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.plan_file import read_plan_file

pytestmark = pytest.mark.xdist_group("ranks")
MESHES = ("tp=2", "pp=2", "pp=2 tp=2")
STEP = ("--step", "T=3,context=40")
# The seconds that a planted call sleeps: far longer than any tiny call, on a busy machine too.
SLEEP = 0.04
# A mesh, and the ranks that wait for rank 1, whose call of rms_norm sleeps.
SLOW = {"tp=2": [0], "pp=2": [0], "pp=2 tp=2": [0, 3]}


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Fewer steps, and the folder of temporary files."""
    for name, count in (("_WARM", 3), ("_PLAIN", 2), ("_RECORDED", 6), ("_TRACED", 2)):
        monkeypatch.setattr(measured_run, name, count)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def nothing_left(folder: Path) -> bool:
    """Whether the folder of ranks is gone, and no process of one runs: its command line has the folder."""
    texts = [one.read_bytes() for one in Path("/proc").glob("[0-9]*/cmdline") if one.parent.exists()]
    return not list(folder.glob("ingot-ranks-*")) and not any(str(folder).encode() in text for text in texts)


@pytest.mark.parametrize("mesh", [*drawn(1, ["tp=2", "pp=2"]), pytest.param("pp=2 tp=2", marks=pytest.mark.slow)])
def test_a_sleep_of_a_rank_is_the_waiting_of_others(
    mesh: str,
    artifact: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    few_steps: Path,
) -> None:
    path = artifact("llama", mesh)
    plant(monkeypatch, 1, "ingot.rms_norm", sleep=SLEEP)
    assert cli.run(cli.INGOT, ["explain", str(path), *STEP, "--measure", "--json"]) == cli.DONE
    (bucket,) = json.loads(capfd.readouterr().out)["buckets"]
    check_each_call_once(path, mesh, bucket["calls"])
    of_ranks = {one["rank"]: one for one in bucket["mesh"]["ranks"]}
    for one in of_ranks.values():
        parts = [one[name] for name in ("computes", "moves", "waits", "between")]
        assert sum(parts) == pytest.approx(one["seconds"]) and min(parts) > 0
        assert one["waits"] == pytest.approx(sum(one["waits_for"].values()))
        own = [(call, time) for call in bucket["calls"] for time in call["ranks"] if time["rank"] == one["rank"]]
        computed = sum(time["seconds"] for call, time in own if call["collective"] is None)
        assert one["computes"] == pytest.approx(computed)
        assert all(0 <= time["waits"] <= time["seconds"] for _, time in own)
        assert all(time["waits"] == 0 for call, time in own if call["collective"] is None)
        assert max(one["seconds"] for one in of_ranks.values()) <= bucket["mesh"]["recorded"] * (1 + 1e-9)
    slept = [call for call in bucket["calls"] for time in call["ranks"] if time["rank"] == 1]
    slept = [call for call in slept if call["op"] == "ingot.rms_norm"]
    for call in slept:
        seconds = {time["rank"]: time["seconds"] for time in call["ranks"]}
        assert seconds.pop(1) > SLEEP > max(seconds.values(), default=0), "only rank 1 sleeps"
    # The sleep is part of what rank 1 computes. The others wait for it, and it moves nothing.
    assert of_ranks[1]["computes"] > len(slept) * SLEEP
    for rank in SLOW[mesh]:
        assert of_ranks[rank]["waits_for"]["1"] > 0.9 * len(slept) * SLEEP
        assert of_ranks[rank]["computes"] < SLEEP
    assert all(one["moves"] < SLEEP / 2 for one in bucket["mesh"]["exchanges"])
    check_exchanges(mesh, bucket)
    assert nothing_left(few_steps)


def test_floors_of_the_collectives_of_a_program(artifact: Callable[[str, str], Path]) -> None:
    opened = open_artifact(artifact("llama", "tp=2"))
    (program,) = parse_programs(opened.read_text("program.ir"))
    sizes = {"T": 3, "B": 3, "L": 3, "P": 3, "R": 5, "S": 5, "pages": 9, "G": 1}
    width, vocab = 54 * 4, 366 * 4  # bytes of a row of the residual stream, and of logits
    for ranks_of_axis, summed, gathered in ((2, 3 * width, 3 * vocab // 2), (4, 9 * width // 2, 9 * vocab // 2)):
        mesh = {"tp": ranks_of_axis}
        found = [collective_in(node, program, sizes, mesh, 10**6) for node in program.calls()]
        sent = [(one.what, one.sent) for one in found if one is not None]
        assert sent == [("all_reduce", summed)] * 7 + [("all_gather", gathered)]
        assert all(one is None or (one.axis, one.floor) == ("tp", one.sent / 10**6) for one in found)


def check_each_call_once(path: Path, mesh: str, calls: list[dict[str, Any]]) -> None:
    file = read_plan_file(open_artifact(path))
    for rank in ranks(parse_mesh(mesh)):
        (bucket,) = file.of(rank.index).plans["main"].buckets
        run = [call for call in calls if rank.index in [time["rank"] for time in call["ranks"]]]
        assert len(run) == len(bucket.instructions)
        targets = [one.target for one in bucket.instructions]
        assert [call["op"] for call in run] == targets
        assert all(rank.stage in call["stages"] for call in run)


def check_exchanges(mesh: str, bucket: dict[str, Any]) -> None:
    exchanges = bucket["mesh"]["exchanges"]
    assert bucket["mesh"]["link"] is None and all(one["floor"] is None for one in exchanges)
    # The residual stream has 3 rows of 54 float32 numbers. One of two ranks sends all of them, for a sum too.
    sent = 3 * 54 * 4
    reduced = [one for one in exchanges if one["what"] == "all_reduce"]
    assert all(one["sent"] == sent and one["axis"] == "tp" for one in reduced)
    # Two of each of three layers, and one of the embedding.
    assert sum(one["calls"] for one in reduced) == (7 if "tp" in mesh else 0)
    moved = [one for one in exchanges if one["what"] == "stage 0 to 1"]
    assert all(one["sent"] == sent and one["axis"] == "pp" for one in moved)
    # The stream, and the result that is to be added to it.
    assert sum(one["calls"] for one in moved) == (2 if "pp" in mesh else 0)
    back = {tuple(one["ranks"]) for one in exchanges if one["what"] == "stage 1 to 0"}
    assert back == ({tuple(range(len(bucket["mesh"]["ranks"])))} if "pp" in mesh else set())


@pytest.mark.parametrize("mesh", drawn_in_one_of(8, MESHES))
def test_a_trace_has_all_ranks(
    mesh: str,
    artifact: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    few_steps: Path,
    tmp_path: Path,
) -> None:
    plant(monkeypatch, 1, "ingot.rms_norm", sleep=SLEEP)
    trace = tmp_path / "trace.json.gz"
    assert cli.run(cli.INGOT, ["explain", str(artifact("llama", mesh)), *STEP, "--trace", str(trace)]) == cli.DONE
    check_trace(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"], mesh)
    said = capfd.readouterr().out
    head = next(line.split() for line in said.splitlines() if line.startswith("call "))
    assert head[5:8] == ["fastest", "slowest", "rank"] and "traced" not in head
    assert re.findall(r"^stage (\d):$", said, re.M) == (["0", "1"] if "pp" in mesh else [])
    assert re.search(r"^link +not known for these devices: the sent bytes alone are the floor$", said, re.M)
    assert nothing_left(few_steps)


def check_trace(events: list[dict[str, Any]], mesh: str) -> None:
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    wanted = [f"rank {one.index} (" for one in ranks(parse_mesh(mesh))]
    assert [name[: name.index("(") + 1] for name in names.values()] == wanted
    calls = [one for one in events if one.get("cat") == "user_annotation"]
    assert {one["pid"] for one in events} == set(names)
    slow = [one for one in calls if one["name"].endswith(" ingot.rms_norm") and names[one["pid"]].startswith("rank 1")]
    assert len(slow) >= 2 and all(one["dur"] > SLEEP * 1e6 for one in slow)
    # The ranks have one clock: when rank 1 has slept, each of the others waits for it or for a rank that does.
    end = slow[-1]["ts"] + slow[-1]["dur"]
    waiting = {one["pid"]: one["name"] for one in calls if one["ts"] < end <= one["ts"] + one["dur"]}
    assert set(waiting) == set(names)
    assert ("receive from stage 0" in {one["name"] for one in calls}) == ("pp" in mesh)


# Of a rank: its number, what the calls do after some steps, and what the error says.
FAULTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "raises": (1, {"fails": "planted", "after": 5}, "failed: ingot.rms_norm failed: ZeroDivisionError: planted"),
    "is killed": (1, {"kills": True, "after": 5}, "ended: it was killed by signal 9 (SIGKILL)"),
    "is rank 0": (0, {"fails": "planted", "after": 5}, "failed: ingot.rms_norm failed: ZeroDivisionError: planted"),
}


@pytest.mark.parametrize(
    ("mesh", "fault"), drawn_in_one_of(3, [(mesh, fault) for mesh in ("tp=2", "pp=2") for fault in FAULTS])
)
def test_a_rank_that_fails_is_named(
    mesh: str,
    fault: str,
    artifact: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    few_steps: Path,
    tmp_path: Path,
) -> None:
    rank, planted, text = FAULTS[fault]
    plant(monkeypatch, rank, "ingot.rms_norm", **planted)
    trace = tmp_path / "trace.json"
    assert cli.run(cli.INGOT, ["explain", str(artifact("llama", mesh)), *STEP, "--trace", str(trace)]) == cli.OUR_FAULT
    said = capfd.readouterr()
    assert f"rank {rank} ({mesh[:2]}={rank}) {text}, while a step was measured" in said.err
    assert "measure the step again" in said.err and "Traceback" not in said.err and not said.out
    assert nothing_left(few_steps) and not trace.exists()
