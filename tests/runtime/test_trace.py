"""The trace of an artifact: what was recorded while it was compiled, and what recording costs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny import CHECKPOINTS

from ingot import compile_model, open_artifact
from ingot.ir.artifact.record import PassRecord
from ingot.ir.errors import ArtifactError, OptionError
from ingot.ir.program import Program
from ingot.ir.text import print_program
from ingot.passes.resident import Resident, peak_between, resident
from ingot.runtime.loading.artifact import Artifact

NAME = "llama-plain"
OPTIONS: dict[str, Any] = {"backend": "reference", "max_batch": 2, "max_tokens": 32, "max_seq_len": 64, "jobs": 1}

pytestmark = pytest.mark.xdist_group("trace")


@dataclass(frozen=True)
class Compiled:
    """An artifact, and what a hook saw of its compile: texts before and after each pass, and the records."""

    artifact: Artifact
    seen: list[tuple[str, str]]
    records: list[PassRecord]


@pytest.fixture(scope="module")
def compiled(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    seen: list[tuple[str, str]] = []
    records: list[PassRecord] = []

    def look(before: Program, after: Program) -> None:
        seen.append((print_program(before), print_program(after)))
        records.append(after.history[-1])

    output = tmp_path_factory.mktemp("trace") / "a.ingot"
    compile_model(checkpoint(NAME), output, **OPTIONS, on_pass=look)
    return Compiled(open_artifact(output), seen, records)


def test_the_programs_are_those_that_the_passes_saw(compiled: Compiled) -> None:
    trace = compiled.artifact.trace
    assert len(trace) == len(compiled.seen) == 21
    for entry, seen, record in zip(trace, compiled.seen, compiled.records, strict=True):
        assert (entry.before_text, entry.after_text) == seen, entry.title
        assert (entry.name, entry.bucket, entry.stage) == (record.name, record.bucket, record.stage)
        assert (entry.rewrites, entry.refusals) == (record.rewrites, record.refusals)
        assert (entry.op_count_diff, entry.numerics) == (record.op_count_diff, record.numerics)
        assert (entry.seconds, entry.peak_bytes) == (record.seconds, record.peak_bytes)
        assert print_program(entry.after) == entry.after_text and print_program(entry.before) == entry.before_text
    assert trace[-1].after_text == compiled.artifact.read_text("program.ir")
    assert trace["insert-paged-kv"].matches == CHECKPOINTS[NAME].config["num_hidden_layers"]
    assert trace["fuse-qk-norm-rope"].matches == 0 and not trace["fuse-qk-norm-rope"].diff()
    assert trace["merge-linears"].diff()
    assert trace["choose-backends@any"].number == 17 and trace["cse"].stage == "FUSED"
    with pytest.raises(OptionError, match="nearest is 'cse'"):
        trace["csa"]


def test_differences_are_smaller_than_programs(compiled: Compiled) -> None:
    folder = compiled.artifact.folder / "trace"
    written = sum(file.stat().st_size for file in folder.iterdir() if file.name != "passes.json")
    assert written < sum(len(after) for _, after in compiled.seen) / 4


@pytest.mark.parametrize("level", ["summary", "none"])
def test_less_may_be_kept(level: Any, compiled: Compiled, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    report = compile_model(checkpoint(NAME), tmp_path / "a.ingot", **OPTIONS, trace=level)
    less, full = open_artifact(report.output), compiled.artifact
    assert report.request_key != full.manifest.request_key
    kept = {entry.path for entry in less.manifest.files if entry.path.startswith("trace/")}
    assert kept == ({"trace/passes.json"} if level == "summary" else set())
    for name in ("program.ir", "plan.json", "weights.json", "choices.json"):
        assert less.read_text(name) == full.read_text(name)
    if level == "none":
        with pytest.raises(ArtifactError, match=r"has no trace(.|\n)*--trace full"):
            _ = less.trace
        return
    assert [entry.rewrites for entry in less.trace] == [entry.rewrites for entry in full.trace]
    assert all(entry.seconds is not None for entry in less.trace)
    with pytest.raises(ArtifactError, match=r"holds no programs(.|\n)*--trace full"):
        _ = less.trace["cse"].after


def test_an_unknown_level_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="none, summary, full"):
        compile_model(checkpoint(NAME), tmp_path / "a.ingot", **OPTIONS, trace="some")  # type: ignore[arg-type]


def test_an_artifact_opens_and_tells_its_trace_without_torch(compiled: Compiled) -> None:
    code = (
        "import sys, ingot\n"
        f"trace = ingot.open_artifact({str(compiled.artifact.folder)!r}).trace\n"
        "print([entry.before_text[:7] for entry in trace[:2]], trace['cse'].matches, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['program', 'program'] 0 False\n"


def test_memory_is_what_the_process_held() -> None:
    before = resident()
    assert before is not None and before.now <= before.most
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    after = resident()
    assert after is not None and after.now - before.now > 60 << 20
    peak = peak_between(before, after)
    assert peak is not None and peak >= after.now
    assert peak_between(Resident(3, 9), Resident(5, 9)) == 5, "the mark was made before"
    assert peak_between(Resident(3, 9), Resident(5, 12)) == 12
    assert peak_between(None, after) is None


@pytest.mark.slow
@pytest.mark.parametrize("layers", [None, 32])
def test_recording_costs_little(layers: int | None, tmp_path: Path) -> None:
    """At most 5 % of compiling: the bundled model with its 8 layers, and 32 layers of a tiny one."""
    folder = Path(__file__).parents[2] / "models" / "pico"
    if layers is not None:
        folder = CHECKPOINTS[NAME].write(tmp_path / "deep", num_hidden_layers=layers)
    compile_model(folder, tmp_path / "warm.ingot", **OPTIONS)
    compile_model(folder, tmp_path / "a.ingot", **OPTIONS)
    timings = json.loads((tmp_path / "a.ingot" / "timings.json").read_text())
    share = timings["recording"] / sum(timings["phases"].values())
    print(f"recording takes {share:.1%} of a compile")
    assert share <= 0.05
