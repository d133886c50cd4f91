"""`ingot diff`: what it compares, how it prints that, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from drawn import in_one_of
from tiny import TINY

import ingot.cli.main as cli
from ingot import compile_model
from ingot.debug.diff import diff_sides
from ingot.debug.sides import Side
from ingot.ir.parse import parse_program

pytestmark = pytest.mark.xdist_group("diff-command")

TINY_MODEL = TINY["llama-biased"]


@dataclass(frozen=True)
class Done:
    """How a command line ended."""

    code: int
    out: str
    err: str


Diff = Callable[..., Done]


@pytest.fixture
def diff(capsys: pytest.CaptureFixture[str]) -> Diff:
    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = cli.run(cli.INGOT, ["diff", *map(str, arguments)])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


@dataclass(frozen=True)
class Artifacts:
    """The same model compiled as it is, with another epsilon, with other weights, and for fewer sequences."""

    plain: Path
    epsilon: Path
    weights: Path
    limits: Path


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    folder = tmp_path_factory.mktemp("diff")
    checkpoints = {
        "plain": TINY_MODEL.write(folder / "plain"),
        "epsilon": TINY_MODEL.write(folder / "epsilon", rms_norm_eps=0.03),
        "weights": replace(TINY_MODEL, seed=77).write(folder / "weights"),
        "limits": folder / "plain",
    }
    made = {}
    for name, checkpoint in checkpoints.items():
        made[name] = folder / f"{name}.ingot"
        batch = 2 if name == "limits" else 4
        options = {"max_batch": batch, "max_tokens": 32, "max_seq_len": 64, "jobs": 1}
        compile_model(checkpoint, made[name], backend="reference", **options)
    return Artifacts(**made)


def test_an_artifact_does_not_differ_from_itself(artifacts: Artifacts, diff: Diff) -> None:
    assert diff(artifacts.plain, artifacts.plain, "--exit-code") == Done(0, "no differences\n", "")
    assert json.loads(diff(artifacts.plain, artifacts.plain, "--json").out)["equal"] is True


def test_a_changed_constant_is_a_line_for_each_op(artifacts: Artifacts, diff: Diff) -> None:
    done = diff(artifacts.plain, artifacts.epsilon)
    assert (done.code, done.err) == (cli.DONE, "")
    lines = done.out.splitlines()
    # The norms of two layers, one alone and three fused with a sum, and the last.
    assert [line.strip() for line in lines if "eps" not in line] == ["in layers 0–1:"]
    assert len(lines) == 4 and all("eps 0.021 -> 0.03" in line for line in lines if "eps" in line)
    differs = diff(artifacts.plain, artifacts.epsilon, "--exit-code")
    assert (differs.code, differs.out) == (3, done.out)


def test_json_names_every_difference(artifacts: Artifacts, diff: Diff) -> None:
    found = json.loads(diff(artifacts.plain, artifacts.epsilon, "--json").out)
    (pair,) = found["programs"]
    assert not found["equal"] and not pair["equal"] and found["facts"] == []
    assert {(one["field"], one["old"], one["new"]) for one in pair["changed"]} == {("eps", "0.021", "0.03")}
    assert [one["layers"] for one in pair["changed"]] == [[0], [0], [1], [1], []]


def test_weights_with_other_bytes_are_other_weights(artifacts: Artifacts, diff: Diff) -> None:
    (line,) = diff(artifacts.plain, artifacts.weights).out.splitlines()
    assert line.startswith("~ weights contents build ")


def test_limits_show_in_manifest_plan_and_program(artifacts: Artifacts, diff: Diff) -> None:
    lines = diff(artifacts.plain, artifacts.limits).out.splitlines()
    assert "~ model max_batch 4 -> 2" in lines and "~ dim B [1, 4] -> [1, 2]" in lines
    assert any(line.startswith("~ plan main memory states ") for line in lines)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (":normalize", ":TRACED", "no differences"),
        (":cse@NORMAL", ":normal", "no differences"),
        (":cse@main@NORMAL", ":normal", "no differences"),
        (":cse@FUSED", ":merge-linears", "- %add_rms_norm = ingot.add_rms_norm("),
        (":insert-ending", ":merge-linears", "  + %slice_1 = aten.slice.Tensor(%linear_15, 1, 0, 60)"),
        (":choose-backends@any", "", "~ stage FUSED -> PLANNED"),
        (":merge-linears", ":choose-backends", "~ bucket – -> any tokens=[1, 32] q_max=any"),
    ],
)
def test_steps_of_one_artifact(artifacts: Artifacts, diff: Diff, before: str, after: str, expected: str) -> None:
    done = diff(f"{artifacts.plain}{before}", f"{artifacts.plain}{after}")
    assert done.code == 0 and any(line.startswith(expected) for line in done.out.splitlines()), done.out + done.err


def test_files_of_programs(artifacts: Artifacts, diff: Diff, tmp_path: Path) -> None:
    file = tmp_path / "changed.ir"
    text = (artifacts.plain / "program.ir").read_text(encoding="utf-8")
    file.write_text(text.replace("%norm.weight, eps=0.021)", "%norm.weight, eps=0.5)", 1))
    assert diff(artifacts.plain, file).out == "~ %rms_norm_4 = ingot.rms_norm(...): eps 0.021 -> 0.5\n"
    file.write_text(text.replace("program main", "program main stage"))
    done = diff(artifacts.plain, file)
    assert done.code == cli.BAD_INPUT and f"{file}, line 1, column " in done.err
    file.write_text("program main stage=FUSED\nsomething\n")
    assert "unknown statement 'something'" in diff(file, file).err
    file.write_text("program main stage=LOWERED\ninput x: f32[1]\n%y = region.r0(%x) : f32[1]\nreturn y=%y\n")
    done = diff(artifacts.plain, file)
    assert done.code == cli.BAD_INPUT and "unknown region 'r0'" in done.err and str(file) in done.err
    file.write_bytes(b"\xff")
    assert "cannot be read" in diff(file, artifacts.plain).err


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        ("nowhere", "'nowhere' is neither an artifact nor a file of programs"),
        ("{}:cze", "no pass 'cze' ran"),
        ("{}:QUANTIZED", "no program reached a stage 'QUANTIZED'"),
        ("{}:cse@decode", "no program 'decode' after cse"),
        ("{}:cse", "expected: cse@NORMAL or cse@FUSED"),
        ("{}:cse@main", "expected: cse@main@NORMAL or cse@main@FUSED"),
        ("{}/trace", "is no artifact"),
    ],
)
def test_what_cannot_be_compared_is_refused(artifacts: Artifacts, diff: Diff, after: str, problem: str) -> None:
    done = diff(artifacts.plain, after.format(artifacts.plain), "--exit-code")
    assert (done.code, done.out) == (cli.BAD_INPUT, "") and problem in done.err


def test_colours_on_a_terminal_alone(artifacts: Artifacts, diff: Diff, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = f"{artifacts.plain}:merge-linears", f"{artifacts.plain}:fuse-add-rms-norm"
    plain = diff(*steps).out
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    lines = diff(*steps).out.splitlines()
    assert len(lines) == len(plain.splitlines())
    for coloured, line in zip(lines, plain.splitlines(), strict=True):
        codes = {"-": "31", "+": "32", "~": "33"}
        assert coloured == f"\x1b[{codes.get(line.strip()[0], '1')}m{line}\x1b[0m"


@in_one_of(3)
def test_no_compiler_is_imported(artifacts: Artifacts) -> None:
    code = (
        "import sys, ingot.cli.main as cli\n"
        f"assert cli.run(cli.INGOT, ['diff', {str(artifacts.plain)!r}, {str(artifacts.epsilon)!r}]) == 0\n"
        "slow = ('ingot.compile.driver', 'ingot.passes', 'torch._inductor', 'torch._dynamo.eval_frame')\n"
        "print([name for name in slow if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stderr == "[]\n"


PROGRAM = """\
program {entry} stage={stage}{bucket}
dim T in [1, 64]
input x: f32[T, 16]
%soft_cap = ingot.soft_cap(%x, cap={cap}) : f32[T, 16]
return y=%soft_cap
"""


AA, DRAFT = ("a", "a"), ("draft", None, 1.0)


def side(*programs: tuple[str, str | None, float]) -> Side:
    made = {}
    for entry, bucket, cap in programs:
        words = f" bucket={bucket} tokens=[1, 64] q_max=any" if bucket else ""
        made[entry, bucket] = parse_program(PROGRAM.format(entry=entry, stage="FUSED", bucket=words, cap=cap))
    return Side("side", made)


@pytest.mark.parametrize(
    ("before", "after", "pairs"),
    [
        # Bucket classes with each other, entries with each other.
        ([("main", "a", 1.0), ("main", "b", 2.0)], [("main", "b", 2.0), ("main", "a", 1.5)], {AA: 1, ("b", "b"): 0}),
        ([("main", None, 1.0), DRAFT], [DRAFT, ("main", None, 1.0)], {("", ""): 0, ("draft", "draft"): 0}),
        # What is there before there are bucket classes with all of them.
        ([("main", None, 1.0)], [("main", "a", 1.0), ("main", "b", 2.0)], {("", "a"): 1, ("", "b"): 2}),
        ([("main", "a", 1.0), ("main", "b", 2.0)], [("main", None, 1.0)], {("a", ""): 1, ("b", ""): 2}),
        # One program with one program, whatever they are called.
        ([("main", "a", 1.0)], [("main", "b", 1.0)], {("a", "b"): 1}),
        # What the other side lacks.
        ([("main", "a", 1.0), ("main", "b", 1.0)], [("main", "a", 1.0)], {AA: 0, ("b", None): 0}),
        ([("main", "a", 1.0)], [("main", "a", 1.0), ("draft", "a", 1.0)], {AA: 0, (None, "draft@a"): 0}),
    ],
)  # fmt: skip
def test_which_programs_are_compared(
    before: list[tuple[str, str | None, float]],
    after: list[tuple[str, str | None, float]],
    pairs: dict[tuple[str | None, str | None], int],
) -> None:
    found = diff_sides(side(*before), side(*after))
    sizes = {(one.before, one.after): len([*one.diff.header, *one.diff.changed]) for one in found.programs}
    assert sizes == pairs
    assert bool(found) == any(count or None in pair for pair, count in pairs.items())
