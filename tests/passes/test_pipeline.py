"""The pipeline: its order, what `--passes` changes in it, and what the manager sees to."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from staged import LIMITS, pass_context, staged, traced
from tiny import TINY

from ingot.ir import ops
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import OptionError, PassError, UserPassError, VerifyError
from ingot.ir.parse import parse_program
from ingot.ir.program import Model, Stage, op_counts
from ingot.ir.text import print_program
from ingot.passes.base import Pass, PassContext
from ingot.passes.fuse_add_rms_norm import FuseAddRMSNorm
from ingot.passes.insert_paged_kv import InsertPagedKV
from ingot.passes.manager import run_pass, run_pipeline
from ingot.passes.pipeline import OPTIONAL, PIPELINE, Phase, edit_pipeline
from ingot.passes.rewrite import Pattern, Rewriter, Var

NAMES = [one.name for phase in PIPELINE for one in phase.passes]


@pytest.fixture(scope="module")
def model() -> Model:
    return traced(TINY["qwen3-plain"].config)


def _names(pipeline: tuple[Phase, ...]) -> list[str]:
    return [one.name for phase in pipeline for one in phase.passes]


def test_the_default() -> None:
    assert edit_pipeline("default") == PIPELINE
    assert edit_pipeline(" default ") == PIPELINE
    assert [phase.stage for phase in PIPELINE] == sorted(phase.stage for phase in PIPELINE)
    assert set(NAMES) >= OPTIONAL
    assert all(len(phase.passes) == len({one.name for one in phase.passes}) for phase in PIPELINE), "once in a phase"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_leaving_out(name: str, model: Model) -> None:
    """What is optional can be left out: the rest of the pipeline brings the model to its end all the same."""
    pipeline = edit_pipeline(f"default,-{name}")
    assert _names(pipeline) == [one for one in NAMES if one != name]
    steps, lowered = staged(model, pipeline)
    assert [step.name for step in steps[1:]] == _names(pipeline)
    assert lowered.programs["any"].plan is not None


def test_leaving_out_all_that_is_optional(model: Model) -> None:
    pipeline = edit_pipeline(",".join(["default", *(f"-{name}" for name in sorted(OPTIONAL))]))
    _, lowered = staged(model, pipeline)
    program = lowered.programs["any"]
    assert "ingot.add_rms_norm" not in op_counts(program) and not program.regions
    assert op_counts(program)["ingot.linear"] == op_counts(model.entries["main"])["ingot.linear"]


def test_without_regions_no_region_compiler_is_named(model: Model) -> None:
    """A call alone cannot be run by a compiler of regions, so a plan that says so would not be true."""
    _, lowered = staged(model, edit_pipeline("default,-form-regions"))
    plan = lowered.programs["any"].plan
    assert plan is not None and plan.buckets[0].nodes_per_backend().keys() == {"reference"}
    assert not plan.executables


@pytest.mark.parametrize("name", sorted(set(NAMES) - OPTIONAL))
def test_mandatory_passes_stay(name: str) -> None:
    with pytest.raises(OptionError, match=f"pass '{name}' cannot be left out") as caught:
        edit_pipeline(f"default,-{name}")
    assert caught.value.expected == ", ".join(sorted(OPTIONAL))


def test_options() -> None:
    for text in ("default,insert-paged-kv{page_size=32}", "default, insert-paged-kv{ page_size = 32 , }"):
        pipeline = edit_pipeline(text)
        assert _names(pipeline) == NAMES
        assert [one for phase in pipeline for one in phase.passes if isinstance(one, InsertPagedKV)] == [
            InsertPagedKV(page_size=32)
        ]
    assert edit_pipeline("default,insert-paged-kv{}") == edit_pipeline("default,normalize") == PIPELINE


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "''"),
        ("defualt", "'defualt'"),
        ("-normalize", "'-normalize'"),
        ("normalize,default", "'normalize,default'"),
        ("default,", "unknown pass ''"),
        ("default,-", "unknown pass ''"),
        ("default,-normalise", "the nearest is 'normalize'"),
        ("default,merge-linear", "the nearest is 'merge-linears'"),
        ("default,-normalize,-normalize", "unknown pass 'normalize'"),
        ("default,insert-paged-kv{pagesize=8}", "pass 'insert-paged-kv' has no option 'pagesize'"),
        ("default,insert-paged-kv{page_size}", "pass 'insert-paged-kv' has no option 'page_size'"),
        ('default,insert-paged-kv{name="x"}', "pass 'insert-paged-kv' has no option 'name'"),
        ("default,insert-paged-kv{page_size=8,page_size=16}", "'page_size' .* is given twice"),
        ("default,insert-paged-kv{page_size=}", "option 'page_size' of pass 'insert-paged-kv' is ''"),
        ("default,insert-paged-kv{page_size=many}", "is 'many'"),
        ("default,insert-paged-kv{page_size=8.0}", "is '8.0'"),
        ("default,insert-paged-kv{page_size=true}", "is 'true'"),
        ('default,insert-paged-kv{page_size="8"}', "is '\"8\"'"),
        ("default,insert-paged-kv{page_size=[8]}", r"is '\[8\]'"),
        ("default,insert-paged-kv{page_size=null}", "is 'null'"),
        ("default,insert-paged-kv{page_size=8", "has an open brace"),
        ("default,insert-paged-kv}", "has an open brace"),
        ("default,insert-paged-kv{page_size=8}}", "has an open brace"),
        ("default,insert-paged-kv{page_size=8}x", "is '8}x'"),
        ("default,normalize{depth=1}", "no options"),
        ("default,quantize{format=int4_g128},quantize{format=int8}", "'format' of pass 'quantize' is given twice"),
    ],
)
def test_misspelt(text: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem) as caught:
        edit_pipeline(text)
    assert caught.value.where == "--passes" and caught.value.expected and caught.value.exit_code == 2


def test_every_record_tells_what_happened(model: Model) -> None:
    steps, _ = staged(model)
    text = print_program(model.entries["main"])
    for step in steps[1:]:
        record = step.record
        assert record is not None
        # Between phases only the stage in the first line moves on.
        assert record.ir_before.partition("\n")[2] == text.partition("\n")[2]
        text = record.ir_after
        assert text == print_program(step.program)
        before, after = (op_counts_of(one) for one in (record.ir_before, record.ir_after))
        assert record.op_count_diff == {
            name: after.get(name, 0) - before.get(name, 0)
            for name in sorted(before.keys() | after.keys())
            if after.get(name, 0) != before.get(name, 0)
        }
        phases = [phase for phase in PIPELINE if any(one.name == record.name for one in phase.passes)]
        assert {phase.by_bucket for phase in phases} == {record.bucket is not None}
        assert record.seconds >= 0 and "seconds" not in record.summary() and "ir_after" not in record.summary()


def op_counts_of(text: str) -> dict[str, int]:
    """Calls by name, counted in a text: the lines of the program itself, not of its regions."""
    counts: dict[str, int] = {}
    for line in text.splitlines():
        if line.startswith("%"):
            name = line.partition(" = ")[2].partition("(")[0]
            name = "region" if name.startswith("region.") else name
            counts[name] = counts.get(name, 0) + 1
    return counts


def test_each_bucket_class_is_lowered_by_itself(model: Model) -> None:
    buckets = (BucketClass(name="decode", tokens=(1, 8), q_max=1), BucketClass(name="any", tokens=(1, 256)))
    lowered = run_pipeline(model, replace(pass_context(), bucket=None), buckets)
    assert list(lowered.programs) == ["decode", "any"]
    assert [record.bucket for record in lowered.records if record.name == "form-regions"] == ["decode", "any"]
    assert [program.bucket for program in lowered.programs.values()] == list(buckets)
    assert lowered.fused.bucket is None and lowered.fused.stage is Stage.FUSED


@pytest.mark.parametrize("stage", list(Stage))
def test_stopping_early(stage: Stage, model: Model) -> None:
    lowered = run_pipeline(
        model, replace(pass_context(), bucket=None), (BucketClass(name="any", tokens=(1, 9)),), upto=stage
    )
    reached = max(phase.stage for phase in PIPELINE if phase.stage <= stage) if stage else Stage.TRACED
    assert lowered.fused.stage == min(reached, Stage.FUSED)
    assert [program.stage for program in lowered.programs.values()] == [reached] * (reached >= Stage.LOWERED)


# A pass that matches less than the model promises is an error.


@dataclass(frozen=True)
class _Inert(FuseAddRMSNorm):
    """The norm's epsilon is looked for under another name, as after a rename that forgot this pattern."""

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        pattern = Pattern(ops.rms_norm, Var("x"), Var("weight"), epsilon=Var("eps"))
        for node, _ in rewriter.find(pattern):
            rewriter.take(node)


@dataclass(frozen=True)
class _Half(FuseAddRMSNorm):
    """One match fewer than it could."""

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        rewriter.fuel = 4
        super().run(rewriter, context)


def _with(one: Pass) -> tuple[Phase, ...]:
    return tuple(
        Phase(phase.stage, tuple(one if item.name == one.name else item for item in phase.passes)) for phase in PIPELINE
    )


@pytest.mark.parametrize(("one", "matches"), [(_Inert(), 0), (_Half(), 4)], ids=["inert", "half"])
def test_matching_less_than_promised_is_an_error(one: Pass, matches: int, model: Model) -> None:
    with pytest.raises(PassError, match=f"pass fuse-add-rms-norm matched {matches} times") as caught:
        staged(model, _with(one))
    assert caught.value.expected == "at least 5, from the model's layers and flags"
    staged(model, edit_pipeline("default,-fuse-add-rms-norm"))  # who asks for it owes nothing


@dataclass(frozen=True)
class _Failing(Pass):
    name: ClassVar[str] = "failing"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        raise PassError("something is odd", where="%linear", expected="otherwise")


@dataclass(frozen=True)
class _Raising(_Failing):
    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        raise LookupError("no such node")


def test_an_error_names_its_pass(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    main = model.entries["main"]
    for one in (_Failing, _Raising):
        monkeypatch.setattr(one, "__module__", "ingot.passes.failing")
    with pytest.raises(PassError) as caught:
        run_pass(_Failing(), main, pass_context(), under=Stage.NORMAL)
    assert str(caught.value).startswith("pass failing: something is odd\n") and caught.value.where == "%linear"
    with pytest.raises(PassError, match="pass failing: LookupError: no such node") as caught:
        run_pass(_Raising(), main, pass_context(), under=Stage.NORMAL)
    assert isinstance(caught.value.__cause__, LookupError) and f"{__file__}, line " in caught.value.where


def test_a_pass_of_another_package_is_not_ours(model: Model) -> None:
    with pytest.raises(UserPassError, match=f"pass failing of {__name__} raised: something is odd") as caught:
        run_pass(_Failing(), model.entries["main"], pass_context(), under=Stage.NORMAL)
    assert caught.value.where.startswith(f"{__file__}, line ") and caught.value.where.endswith("%linear")


@dataclass(frozen=True)
class _Nothing(_Failing):
    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        pass


@pytest.mark.parametrize("one", [_Nothing(), _Raising(), FuseAddRMSNorm()])
def test_a_program_that_was_wrong_before(one: Pass) -> None:
    text = "program p stage=NORMAL\ninput x: f32[T, 4]\n%y = aten.mul.Tensor(%x, %x) : f32[T, 4]\nreturn y=%y\n"
    with pytest.raises(
        VerifyError, match=f"the program was wrong before pass {one.name} saw it: dim T is not"
    ) as caught:
        run_pass(one, parse_program(text), pass_context(), under=Stage.FUSED)
    assert "after pass" not in str(caught.value) and "line 2" in caught.value.where


def test_a_pass_refuses_other_fields() -> None:
    options: dict[str, Any] = {"pagesize": 8}
    with pytest.raises(TypeError, match="pagesize"):
        InsertPagedKV(**options)
    assert LIMITS.max_tokens == 256
