"""ingot bisect on the side of the passes: faults planted by hand are named by pass, rewrite and node, and shown."""

import dataclasses
import json
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn, drawn_in_one_of
from harmed_pass import Fault, calls, check_named, planted
from safetensors.torch import load_file, save_file
from sharded import CASES as SHARDED
from sharded import Case as Sharded
from tiny import TINY
from torch import fx

from ingot import compile_model
from ingot.backends.reference import load as reference_load
from ingot.cli.commands.bisect import UNCONFIRMED, bisect_artifact, print_verdict
from ingot.compile.golden import read_golden
from ingot.debug.bisect import bisect, driver
from ingot.debug.bisect.case import Case, recorded_requests
from ingot.debug.bisect.programs.blame_pass import Judge, blame_pass
from ingot.debug.bisect.verdict import Kind
from ingot.ir import build, ops
from ingot.ir.artifact.manifest import GOLDEN
from ingot.ir.artifact.record import Rewrite
from ingot.ir.errors import IngotError, OutputError
from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.passes.fuse_add_rms_norm import FuseAddRMSNorm
from ingot.passes.insert_collectives import InsertCollectives
from ingot.passes.insert_ending import InsertEnding
from ingot.passes.insert_paged_kv import InsertPagedKV
from ingot.passes.merge_linears import MergeLinears
from ingot.passes.quantize import Quantize
from ingot.passes.sequence_parallel import SequenceParallel

pytestmark = [pytest.mark.xdist_group("bisect"), pytest.mark.one_in_file(3)]

_SLICE = torch.ops.aten.slice.Tensor
OPTIONS: dict[str, Any] = {"backend": "reference", "max_batch": 8, "max_tokens": 1024, "max_seq_len": 160}


def _wrong_epsilon(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    (node,) = calls(nodes, ops.add_rms_norm.overload)
    node.kwargs = {**node.kwargs, "eps": node.kwargs["eps"] * 1.01}  # type: ignore[operator]


def _missing_residual(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    (fused,) = calls(nodes, ops.add_rms_norm.overload)
    (total,) = (user for user in fused.users if user.args[1] == 1)
    total.replace_all_uses_with(fused.args[1])  # type: ignore[arg-type]


def _rounded(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    """A cast down and back, of which float64 shows nothing."""
    (fused,) = calls(nodes, ops.add_rms_norm.overload)
    (normed,) = (user for user in fused.users if user.args[1] == 0)
    with program.graph.inserting_after(normed):
        narrow = build.call(program, ops.cast.overload, (normed,), {"dtype": torch.float16})
    with program.graph.inserting_after(narrow):
        wide = build.call(program, ops.cast.overload, (narrow,), {"dtype": torch.float32})
    normed.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not narrow)


def _swapped_slices(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    *_, left, right = calls(nodes, _SLICE)
    left.args, right.args = right.args, left.args


def _mixed_up(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    """Whoever reads the second slice gets the third: the numbers are those of a wrong recipe."""
    _, left, right = calls(nodes, _SLICE)
    users = list(left.users)
    right.replace_all_uses_with(left)
    for user in users:
        user.replace_input_with(left, right)


def _rounded_sum(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    (reduced,) = calls(nodes, ops.all_reduce.overload)
    with program.graph.inserting_after(reduced):
        narrow = build.call(program, ops.cast.overload, (reduced,), {"dtype": torch.bfloat16})
    with program.graph.inserting_after(narrow):
        wide = build.call(program, ops.cast.overload, (narrow,), {"dtype": torch.float32})
    reduced.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not narrow)


def _rounded_part(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    (part,) = calls(nodes, ops.reduce_scatter.overload)
    with program.graph.inserting_after(part):
        narrow = build.call(program, ops.cast.overload, (part,), {"dtype": torch.bfloat16})
    with program.graph.inserting_after(narrow):
        wide = build.call(program, ops.cast.overload, (narrow,), {"dtype": torch.float32})
    part.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not narrow)


def _swapped_recipe(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    name = next(str(node.target) for node in nodes if node.op == "placeholder")
    spec = program.params[name]
    first, *between, last = spec.recipe.inputs
    recipe = dataclasses.replace(spec.recipe, inputs=(last, *between, first))
    program.params[name] = dataclasses.replace(spec, recipe=recipe)


def _wrong_mask(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    (node,) = calls(nodes, ops.paged_attention.overload)
    node.kwargs = {**node.kwargs, "mask": "window_20"}


def _pages_of_another_group(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    (node,) = calls(nodes, ops.paged_attention.overload)
    q, kv, _, *rest = node.args
    node.args = (q, kv, program.find("page_table"), *rest)


def _written_into_another_group(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    (node,) = calls(nodes, ops.kv_append.overload)
    *rest, _ = node.args
    node.args = (*rest, program.find("slots"))


def _swapped_k_and_v(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    (node,) = calls(nodes, ops.kv_append.overload)
    kv, k, v, *rest = node.args
    node.args = (kv, v, k, *rest)


def _stale_position(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    """The rows move by what was fed, and not to where they are: the second step shows it."""
    (node,) = calls(nodes, ops.advance.overload)
    last, position, rows, _, *rest = node.args
    node.args = (last, position, rows, program.find("q_lens"), *rest)


def _unpenalized(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    (node,) = calls(nodes, ops.sample.overload)
    place = ops.sample.parameters.names.index("frequency")
    node.args = (*node.args[:place], program.find("presence"), *node.args[place + 1 :])


# Layer 0 merges q, k and v and then gate and up; rewrites 2 and 3 are those of layer 1.
FAULTS = (
    Fault(FuseAddRMSNorm, 0, _wrong_epsilon, "add_rms_norm"),
    Fault(FuseAddRMSNorm, 2, _missing_residual, "add_3"),
    Fault(FuseAddRMSNorm, 1, _rounded, "cast_1"),
    Fault(MergeLinears, 2, _swapped_slices, "slice_7"),
    Fault(MergeLinears, 2, _mixed_up, "slice_7"),
    Fault(MergeLinears, 3, _swapped_recipe, "layers.1.mlp.gate_up.weight"),
    Fault(InsertPagedKV, 1, _wrong_mask, "paged_attention_1"),
    Fault(InsertPagedKV, 2, _swapped_k_and_v, "kv_append_2"),
    Fault(InsertEnding, 0, _stale_position, "advance"),
    Fault(InsertEnding, 0, _unpenalized, "sample"),
)


@pytest.mark.parametrize("fault", drawn(1, FAULTS), ids=str)
def test_a_fault_is_named(fault: Fault, artifact: Callable[..., Path], again: None) -> None:
    path = artifact("llama-plain", **OPTIONS)
    with planted(fault.whose, fault.index, fault.harm):
        verdict = bisect(path)
    check_named(verdict, fault)
    assert verdict.runs <= 40, "by halves, over passes and over rewrites"


OF_WINDOWS = (
    Fault(InsertPagedKV, 1, _pages_of_another_group, "paged_attention_1"),
    Fault(InsertPagedKV, 2, _written_into_another_group, "kv_append_2"),
    Fault(InsertPagedKV, 2, _wrong_mask, "paged_attention_2"),
)


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of layers that take turns, most have a window that gives pages back."""
    folder = tmp_path_factory.mktemp("windows")
    compile_model(
        TINY["gemma3_text-new"].write(folder / "checkpoint", sliding_window=33), folder / "a.ingot", **OPTIONS
    )
    return folder / "a.ingot"


@pytest.mark.parametrize("fault", drawn(1, OF_WINDOWS), ids=str)
def test_a_fault_of_a_window_is_named(fault: Fault, windows: Path, again: None) -> None:
    with planted(fault.whose, fault.index, fault.harm):
        check_named(bisect(windows), fault)


@pytest.mark.parametrize("mask", drawn(1, ["window_32", "window_34", "causal"]))
def test_a_backend_with_another_window_is_named(mask: str, windows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs say the window of 33 tokens; the kernel sees one position more or fewer, or all of them."""
    attend = ops.paged_attention.reference

    def other(*args: Any, **kwargs: Any) -> Any:
        return attend(*args, **{**kwargs, "mask": mask} if kwargs.get("mask") == "window_33" else kwargs)

    faulty = dataclasses.replace(ops.paged_attention, reference=other)
    monkeypatch.setattr(reference_load, "OPS", {**ops.OPS, "paged_attention": faulty})
    verdict = bisect(windows)
    assert (verdict.kind, verdict.blamed, verdict.node) == (Kind.BACKEND, "reference", "paged_attention_1"), verdict
    assert verdict.layer == 1 and "no other is wrong" in verdict.found


def test_windows_are_healthy(windows: Path, again: None) -> None:
    assert bisect(windows).kind is Kind.HEALTHY


@pytest.mark.parametrize(
    "fault",
    drawn(
        1,
        [
            Fault(InsertCollectives, 2, _rounded_sum, "cast_1"),
            Fault(InsertPagedKV, 1, _swapped_k_and_v, "kv_append_1"),
            Fault(SequenceParallel, 1, _rounded_part, "cast_1"),
        ],
    ),
    ids=str,
)
def test_a_fault_on_a_mesh_is_named(fault: Fault, again: None, tmp_path: Path) -> None:
    passes = f"default,{SequenceParallel.name}{{steps=all}}" if fault.whose is SequenceParallel else "default"
    path = _on_a_mesh(SHARDED["q and k norms"], tmp_path, passes=passes)
    with planted(fault.whose, fault.index, fault.harm):
        check_named(bisect(path), fault)


def _on_a_mesh(case: Sharded, folder: Path, **options: Any) -> Path:
    source = TINY[case.checkpoint].write(folder / "checkpoint", **case.changes)
    compile_model(source, folder / "a.ingot", **{**OPTIONS, "max_seq_len": 64, **options}, mesh=case.mesh)
    return folder / "a.ingot"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "repeated key-value heads and biases" else [pytest.mark.slow])
        for name in SHARDED
    ],
)
def test_no_pass_is_to_blame_on_a_mesh(name: str, tmp_path: Path) -> None:
    """Not even in what the second look would take back."""
    case = Case.open(_on_a_mesh(SHARDED[name], tmp_path, passes=f"default,{SequenceParallel.name}{{steps=all}}"))
    assert blame_pass(case, Judge(case)) is None


def test_a_fault_of_the_compile_alone_is_named(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pass was mended since: its program is in the trace, and the pass makes another one now."""
    fault = FAULTS[1]
    with planted(fault.whose, fault.index, fault.harm):
        compile_model(checkpoint("llama-plain"), tmp_path / "a.ingot", **OPTIONS)
    verdict = bisect(tmp_path / "a.ingot", output=tmp_path / "shown")
    assert verdict.blamed == fault.whose.name and "changed" not in verdict.found
    assert verdict.note == "the pass has changed since the artifact was compiled: compile it again"
    print_verdict(verdict)
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"note {verdict.note} " in printed and f"program {verdict.golden} " in printed + " "
    assert f"rewrite no. {fault.index + 1}, at %" in printed
    assert verdict.rewrite is not None and verdict.rewrite.index == fault.index
    assert verdict.reproducer is not None
    assert _ends_with(verdict.reproducer) == 1
    text = verdict.reproducer.read_text()
    assert "The pass is not run: before.ir is compared with after.ir" in text and text[:3] == '"""'


def _ends_with(script: Path) -> int:
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return int(ended.value.code or 0)


@pytest.mark.parametrize("fault", drawn_in_one_of(2, [FAULTS[0], FAULTS[5], FAULTS[7]]), ids=str)
def test_the_reproducer_shows_the_fault_by_itself(
    fault: Fault, artifact: Callable[..., Path], again: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = artifact("llama-plain", **OPTIONS)
    with planted(fault.whose, fault.index, fault.harm):
        verdict = bisect(path, output=tmp_path / "shown")
        assert verdict.reproducer is not None and verdict.golden is not None
        assert _ends_with(verdict.reproducer) == 1
    assert "the fault is present" in capsys.readouterr().out
    assert _ends_with(verdict.reproducer) == 0, "the pass does no harm any more"
    assert "from ingot.reproduce import reproduce" in verdict.reproducer.read_text(), "the name that stays"
    program = parse_program(verdict.golden.read_text())
    if fault.index == 0:
        assert len(list(program.calls())) <= 2, "the smallest program that shows it"
    with pytest.raises(OutputError, match="exists already"):
        bisect(path, output=tmp_path / "shown")
    _damage(verdict.reproducer, capsys)


def _damage(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be run says so, and does not look like the fault."""
    file = script.with_name("pass.json")
    about = json.loads(file.read_text())
    for change, said in [
        ({"module": "gone_package.passes"}, "the package 'gone_package' is not installed"),
        ({"module": "ingot.passes.gone"}, "cannot be made: ModuleNotFoundError"),
        ({"class": "Gone"}, "cannot be made: AttributeError"),
        ({"options": {"size": 1}}, "cannot be made: TypeError"),
        ({"class": "Stage"}, "cannot be made"),
        ({"pages": "many"}, "ValueError"),
    ]:
        file.write_text(json.dumps({**about, **change}))
        assert _ends_with(script) == 2
        assert said in capsys.readouterr().err
    file.write_text("{")
    assert _ends_with(script) == 2 and "the reproducer is incomplete" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3-scaled" else pytest.mark.slow) for name in TINY]
)
def test_a_healthy_compile_has_no_culprit(name: str, artifact: Callable[..., Path]) -> None:
    options = {**OPTIONS, "max_seq_len": TINY[name].max_seq_len, "dtype": "bfloat16"}
    verdict = bisect(artifact(name, **options))
    assert verdict.kind is Kind.HEALTHY and not verdict


def _other_weight(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    name = next(str(node.target) for node in nodes if str(node.target).endswith("qweight"))
    spec = program.params[name]
    other = next(one for one in program.params if one.endswith("qweight") and one != name)
    recipe = dataclasses.replace(program.params[other].recipe)
    program.params[name] = dataclasses.replace(spec, recipe=recipe)


def test_quantizing_may_lose_what_its_format_does_and_no_more(artifact: Callable[..., Path], again: None) -> None:
    path = artifact("llama-plain", **OPTIONS, passes="default,quantize")
    case = Case.open(path)
    assert blame_pass(case, Judge(case)) is None
    with planted(Quantize, 1, _other_weight):
        verdict = bisect(path)
    assert (verdict.kind, verdict.blamed, verdict.node) == (Kind.PASS, "quantize", "layers.0.attention.k.qweight")
    assert verdict.rewrite is not None and verdict.rewrite.index == 1 and verdict.layer == 0


def test_a_culprit_that_no_second_look_confirms_is_named_so(
    artifact: Callable[..., Path], again: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "_LOOKS", ())
    path = artifact("llama-plain", **OPTIONS, passes="default,quantize")
    with planted(Quantize, 1, _other_weight):
        verdict = bisect(path)
        assert not verdict and (verdict.kind, verdict.blamed) == (Kind.UNCONFIRMED, "quantize")
        assert bisect_artifact(str(path)) == UNCONFIRMED
    assert "pass, unconfirmed" in (shown := capsys.readouterr().out) and "healthy" not in shown


def test_an_overflow_of_the_model_is_no_rewrites_fault(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint("llama-plain"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 2e4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    compile_model(folder, tmp_path / "a.ingot", **OPTIONS, dtype="float16")
    verdict = bisect(tmp_path / "a.ingot")
    assert (verdict.kind, verdict.layer, verdict.op) == (Kind.OVERFLOW, 1, "ingot.linear")
    assert "float16" in verdict.found or "f16" in verdict.found


def test_the_golden_run_is_run_beside_the_drawn_prompts(artifact: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "a.ingot"
    shutil.copytree(artifact("llama-plain", **OPTIONS), path)
    case = Case.open(path)
    golden = [list(request) for request in read_golden(case.artifact).requests]
    assert golden and recorded_requests(case.artifact, case) == [*case.prompts(), *golden]
    (path / GOLDEN).unlink()
    assert recorded_requests(case.artifact, case) == case.prompts()


def test_a_checkpoint_that_has_moved(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint("llama-plain"), folder)
    compile_model(folder, tmp_path / "a.ingot", **OPTIONS)
    folder.rename(tmp_path / "moved")
    with pytest.raises(IngotError, match="--checkpoint"):
        bisect(tmp_path / "a.ingot")
    assert bisect(tmp_path / "a.ingot", checkpoint=tmp_path / "moved").kind is Kind.HEALTHY
