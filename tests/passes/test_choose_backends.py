"""choose-backends: the fastest or cheapest claim wins, every No is kept, and a call without a claim is an error."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from backend_kinds import CompilesCalls
from gpu_model import MODEL
from sm_90 import unplug
from staged import pass_context, traced
from tiny import CHECKPOINTS

from ingot import compile_model
from ingot.backends.inductor.emit import Inductor
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.compile.buckets import bucket_classes
from ingot.compile.competing import competing
from ingot.compile.op_claims import one_call_of_each
from ingot.frontend.trace import Limits
from ingot.ir.artifact.backend_times import BackendTime, BackendTimes
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.record import PassRecord, Refusal
from ingot.ir.backend import No, Yes
from ingot.ir.errors import PassError
from ingot.ir.machine.target import Target
from ingot.ir.ops import OPS
from ingot.ir.program import Program, Region, Stage, target_name
from ingot.ir.text import print_program, print_region_body
from ingot.passes.base import Contest, PassContext
from ingot.passes.choose_backends import ChooseBackends, claims_of
from ingot.passes.form_regions import FormRegions
from ingot.passes.manager import run_pipeline
from ingot.passes.pipeline import PIPELINE

Apply = Callable[..., tuple[Program, PassRecord]]
TEXT = (Path(__file__).parent / "goldens" / "choose-backends.before.ir").read_text(encoding="utf-8")


def _backends(program: Program) -> dict[str, str]:
    return {node.name: node.meta["backend"] for node in program.calls() if "backend" in node.meta}


def test_golden(golden: Callable[..., PassRecord]) -> None:
    record = golden(ChooseBackends())
    assert record.matches == 3 and record.bucket == "decode"  # an item of a tuple needs no backend
    assert record.refusals == (Refusal("embedding", "inductor: ingot.embedding is not fusible"),)


def test_deterministic_mode_takes_batch_invariant_claims_only(apply: Apply) -> None:
    program, record = apply(ChooseBackends(), TEXT, deterministic=True)
    # A view computes nothing, so the reference may keep it.
    assert _backends(program) == {"embedding": "rowwise", "add_rms_norm": "rowwise", "view": "reference"}
    assert record.refusals == (
        Refusal("embedding", "inductor: ingot.embedding is not fusible"),
        Refusal("embedding", "reference: not batch-invariant"),
        Refusal("add_rms_norm", "inductor: not batch-invariant"),
        Refusal("add_rms_norm", "reference: not batch-invariant"),
        Refusal("view", "inductor: not batch-invariant"),
    )


def test_without_a_region_compiler(apply: Apply) -> None:
    program, record = apply(ChooseBackends(), TEXT, backends=(Reference(), Rowwise()))
    assert set(_backends(program).values()) == {"reference"} and record.refusals == ()


def test_no_backend(apply: Apply) -> None:
    with pytest.raises(PassError) as caught:
        apply(ChooseBackends(), TEXT, backends=(Inductor(),))
    reason = "inductor: ingot.embedding is not fusible"
    assert caught.value.what == f"no backend computes ingot.embedding: {reason}"
    assert caught.value.where.startswith("%embedding") and caught.value.expected == "a claim of inductor"
    assert caught.value.hint == "compile with another backend, as backend='auto', or for another target"
    with pytest.raises(
        PassError, match=r"ingot\.embedding: reference: not batch-invariant(.|\n)*without deterministic"
    ):
        apply(ChooseBackends(), TEXT, backends=(Reference(),), deterministic=True)


def test_references_stand_in_for_no_attention_on_a_gpu_unless_they_are_asked_for() -> None:
    """Nor for a write into a cache: the error names why each backend does not compute it."""
    _, nodes = one_call_of_each(OPS)
    for name in ("paged_attention", "append_attention", "partial_attention", "step_attention", "kv_append"):
        node = nodes[f"ingot.{name}"]
        for target, choice, alone in (("sm_90", "auto", False), ("sm_90", "reference", True), ("cpu", "auto", True)):
            context = pass_context(
                target=Target.named(target),
                backends=[one for one in competing(choice, Target.named(target)) if isinstance(one, Reference)],
                bucket=BucketClass(name="few", tokens=(1, 16)),
            )
            claims, reasons = claims_of(node, context)
            assert list(claims) == (["reference", "rowwise"] if alone else []), (name, target, choice)
            assert alone or all("does not replace a missing kernel of this op" in reason for reason in reasons)
    others = pass_context(target=Target.named("sm_90"), backends=(Reference(asked=False),))
    claims, _ = claims_of(nodes["ingot.merge_attention"], others)
    assert "reference" in claims, "an op that goes over all rows at once"


def test_what_no_kernel_of_a_gpu_attends_to_is_an_error_with_every_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unplug(monkeypatch)
    checkpoint = MODEL.write(tmp_path / "wide", head_dim=320)
    limits: dict[str, Any] = {"target": "sm_90", "max_batch": 2, "max_tokens": 2, "jobs": 1}
    with pytest.raises(PassError, match=r"no backend computes ingot\.(paged_attention|qk_norm_rope_append)") as caught:
        compile_model(checkpoint, tmp_path / "a.ingot", **limits)
    for reason in (
        "triton: heads of 320 elements, more than 256",
        "flashinfer: ",
        "reference: on a GPU it does not replace",
    ):
        assert reason in caught.value.what
    assert "backend='reference', which is slow" in caught.value.hint and "layer 0" in caught.value.where
    report = compile_model(checkpoint, tmp_path / "a.ingot", backend="reference", **limits)
    assert set(report.nodes_per_backend) == {"reference"}


class _Priced(Reference):
    """Takes everything at its price, and remembers what it was asked."""

    def __init__(self, name: str, cost: float) -> None:
        self.name, self.cost = name, cost  # type: ignore[misc]
        self.asked: list[tuple[str, str]] = []

    def claim(self, nodes: Sequence[Any], target: Any, bucket: Any) -> Yes | No:
        self.asked.append((nodes[0].name, bucket.name))
        return Yes(self.cost)


@pytest.mark.parametrize("cheap_first", [True, False])
def test_the_cheapest_claim_wins(apply: Apply, cheap_first: bool) -> None:
    cheap, dear = _Priced("cheap", 1.0), _Priced("dear", 2.0)
    backends = (cheap, dear) if cheap_first else (dear, cheap)
    program, _ = apply(ChooseBackends(), TEXT, backends=backends)
    assert set(_backends(program).values()) == {"cheap"}
    assert cheap.asked == dear.asked == [(name, "decode") for name in ("embedding", "add_rms_norm", "view")]


def test_of_equal_claims_the_preferred_backend_wins(apply: Apply) -> None:
    program, _ = apply(ChooseBackends(), TEXT, backends=(_Priced("first", 1.0), _Priced("second", 1.0)))
    assert set(_backends(program).values()) == {"first"}


# --- backends that are timed -----------------------------------------------------------------------------------------


class _Timer:
    """Says that the second backend is the faster one, or `reason`; `asked` has the contests, `anyway` the bodies."""

    def __init__(self, reason: str = "") -> None:
        self.reason, self.asked, self.anyway = reason, list[Contest](), list[Region]()

    def __call__(self, contests: Sequence[Contest], anyway: Callable[[], Sequence[Region]]) -> list[Any]:
        self.asked += contests
        self.anyway += anyway()
        return [self.reason or _timed(one) for one in contests]


def _timed(contest: Contest) -> BackendTimes:
    first, second = contest.backends
    times = {first: 2.0, second: 1.0}
    return BackendTimes(
        call=contest.call,
        bucket=contest.bucket,
        backend=second,
        times={name: (BackendTime(tokens=1, sequences=1, microseconds=one),) for name, one in times.items()},
        source="measured",
    )


def test_times_beat_the_costs_of_claims(apply: Apply) -> None:
    backends, timer = (_Priced("dear", 2.0), _Priced("cheap", 1.0)), _Timer()
    program, _ = apply(ChooseBackends(), TEXT, backends=backends, time_calls=timer)
    assert set(_backends(program).values()) == {"dear"}
    assert {one.backends for one in timer.asked} == {("cheap", "dear")} and not timer.anyway
    assert all(isinstance(node.meta["contest"], BackendTimes) for node in program.calls() if "backend" in node.meta)


def test_a_call_that_cannot_be_timed_is_ranked(apply: Apply) -> None:
    backends = (_Priced("dear", 2.0), _Priced("cheap", 1.0))
    program, _ = apply(ChooseBackends(), TEXT, backends=backends, time_calls=_Timer("no GPU"))
    assert set(_backends(program).values()) == {"cheap"}
    assert {node.meta["contest"] for node in program.calls() if "backend" in node.meta} == {"no GPU"}


def test_what_is_decided_is_not_timed(apply: Apply) -> None:
    backends, timer = (_Priced("dear", 2.0), _Priced("cheap", 1.0)), _Timer()
    apply(ChooseBackends(), TEXT, backends=backends, time_calls=timer)
    decided = {one.key: _timed(one) for one in timer.asked}
    program, _ = apply(ChooseBackends(), TEXT, backends=backends, decided=decided)
    assert set(_backends(program).values()) == {"dear"}


def test_fallbacks_and_regions_are_not_timed(apply: Apply) -> None:
    timer = _Timer()
    apply(ChooseBackends(), TEXT, backends=(_Priced("one", 1.0), Inductor(), Reference(), Rowwise()), time_calls=timer)
    assert not timer.asked, "one backend, a region compiler, and what stands in for missing ones"


GATES = """\
program main stage=FUSED bucket=extend tokens=[1, 64] q_max=any
dim T in [1, 512]
input gate: f32[T, 8]
input up: f32[T, 8]
%once = ingot.silu_mul(%gate, %up) : f32[T, 8]
%twice = ingot.silu_mul(%once, %once) : f32[T, 8]
return y=%twice
"""


class _Apart(CompilesCalls):
    """Compiles each call as a region of its own, or all together, at a low cost."""

    name, compiles_calls = "apart", False

    def __init__(self, *, together: bool = False) -> None:
        self.together = together

    def claim(self, nodes: Sequence[Any], target: Any, bucket: Any) -> Yes | No:
        return Yes(0.1 * len(nodes))

    def cover(self, nodes: Sequence[Any]) -> list[list[Any]] | None:
        return None if self.together else [[node] for node in nodes]

    def warm_up(self) -> None: ...


def test_a_region_of_one_call_is_timed_and_its_code_is_kept(apply: Apply) -> None:
    timer = _Timer()
    program, _ = apply(ChooseBackends(), GATES, backends=(_Apart(), _Priced("call", 2.0)), time_calls=timer)
    assert _backends(program) == {"once": "call", "twice": "apart"}, "a value read twice is one input of a region"
    (contest,) = timer.asked
    assert contest.backends == ("apart", "call") and contest.region("call").body is contest.body
    decision = next(node.meta["decision"] for node in program.calls() if node.name == "once")
    assert (decision.decided, decision.reason) == ("timed", "")

    alone, _ = apply(ChooseBackends(), GATES, backends=(_Apart(), _Priced("call", 2.0)))
    formed, _ = apply(FormRegions(), print_program(alone), backends=(_Apart(),))
    (once, _) = formed.regions.values()
    assert print_region_body(contest.region("apart").body) == print_region_body(once.body)
    assert "dim T in [1, 512]" in print_region_body(once.body), "one code for all bucket classes"


def test_regions_of_several_calls_are_not_timed(apply: Apply) -> None:
    for backends in ((_Apart(together=True), _Priced("call", 2.0)), (_Priced("call", 0.05), _Apart(together=True))):
        timer = _Timer()
        program, _ = apply(ChooseBackends(), GATES, backends=backends, time_calls=timer)
        assert not timer.asked and set(_backends(program).values()) == {backends[0].name}


@pytest.mark.parametrize("swift", ["apart", "call"])
def test_a_call_that_timing_shows_to_be_slow_leaves_no_region(apply: Apply, swift: str) -> None:
    """The call alone is slower as `apart` compiles it, so its low claim takes nothing out of inductor's region."""

    def timer(contests: Sequence[Contest], anyway: Any) -> list[BackendTimes]:
        return [replace_backend(_timed(one), swift) for one in contests]

    def replace_backend(times: BackendTimes, name: str) -> BackendTimes:
        return times.model_copy(update={"backend": name})

    backends = (_Apart(), Inductor(), _Priced("call", 2.0))
    program, _ = apply(ChooseBackends(), GATES, backends=backends, time_calls=timer)
    decision = next(node.meta["decision"] for node in program.calls() if node.name == "once")
    assert list(decision.times) == ["apart", "call"]
    if swift == "apart":
        assert _backends(program)["once"] == "apart" and decision.decided == "timed"
    else:
        assert _backends(program)["once"] == "inductor" and decision.decided == "ranked"
        assert decision.reason == "apart took longer than call, which claims a higher cost than inductor"


def _contests(architecture: str) -> tuple[dict[str, list[tuple[str, tuple[str, ...]]]], _Timer]:
    """By bucket class, the ops and backends of the contests among the backends of a GPU."""
    target, timer = Target.named("sm_90"), _Timer("asked")
    backends = competing("auto", target)
    config = {**CHECKPOINTS[architecture].config, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    limits = Limits(max_seq_len=128, max_batch=4, max_tokens=128)
    context = PassContext(target, 128, 4, 128, backends=backends, time_calls=timer)
    phases = [phase for phase in PIPELINE if phase.stage <= Stage.LOWERED]
    kept = tuple(one for one in phases[-1].passes if one.name in ("choose-backends", "form-regions"))
    lowered = run_pipeline(
        traced(config, limits),
        context,
        bucket_classes(target, backends, 128, 4, deterministic=False),
        (*phases[:-1], replace(phases[-1], passes=kept)),
        upto=Stage.LOWERED,
    )
    found: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for bucket in lowered.programs:
        mine = [one for one in timer.asked if one.body.bucket is not None and one.body.bucket.name == bucket]
        found[bucket] = [(target_name(next(iter(one.body.calls())).target), one.backends) for one in mine]
    return found, timer


def test_products_in_regions_are_ranked_and_those_by_themselves_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    unplug(monkeypatch)
    products = ("ingot.linear", ("triton", "cublas"))
    # Norms in front of products, sums behind them: all are in regions.
    found, _ = _contests("llama-plain")
    assert not any(found.values())
    # Norms behind products: qkv, the one of attention and that of the gate are in none.
    found, timer = _contests("olmo2-cut")
    assert found["decode-1"] == found["decode-64"] == [products] * 3 and found["extend"] == []
    names = {target_name(next(iter(one.body.calls())).target) for one in timer.anyway}
    assert "ingot.sample" in names and "ingot.linear" not in names
    assert {one.backend for one in timer.anyway} == {"triton"}
