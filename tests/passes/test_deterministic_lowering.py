"""What deterministic mode makes of a dense model for a GPU: in steps of all sizes the same calls, none row by row."""

import pytest
from drawn import drawn
from staged import LIMITS, pass_context, traced
from tiny import TINY
from torch import fx

from ingot.backends.reference.emit import Reference, Rowwise
from ingot.backends.triton.emit import Triton
from ingot.compile.buckets import bucket_classes
from ingot.ir import ops
from ingot.ir.machine.target import Target
from ingot.ir.program import VIEWS, Program, RegionCall, Stage, is_call, target_name
from ingot.passes.manager import Lowered, run_pipeline
from ingot.passes.pipeline import edit_pipeline

BACKENDS = (Triton(), Reference(), Rowwise())
# Ops without kernels on a GPU.
NO_KERNELS = {"ingot.route", "ingot.sparse_mixer", "ingot.experts"}
FIRST = {TINY[name].family: name for name in reversed(TINY)}  # the first checkpoint of each family


def lowered(name: str, passes: str = "default") -> Lowered:
    target = Target.named("sm_90")
    buckets = bucket_classes(target, BACKENDS, LIMITS.max_tokens, LIMITS.max_batch, deterministic=True)
    context = pass_context(target=target, backends=BACKENDS, deterministic=True, bucket=None)
    model = traced({**TINY[name].config, "dtype": "bfloat16"})
    return run_pipeline(model, context, buckets, edit_pipeline(passes), upto=Stage.LOWERED)


@pytest.mark.parametrize("name", ["llama-plain", "qwen3-plain"])
def test_every_class_has_the_same_calls_and_none_by_rows(name: str) -> None:
    found = lowered(name)
    orders = []
    for program in found.programs.values():
        assert program.bucket is not None and program.bucket.batch_invariant
        calls = [node for node in program.calls() if node.target not in VIEWS]
        assert {node.meta["backend"] for node in calls} <= {"triton"}
        # Rows may be selected early: a copy, which adds nothing up.
        computing = [node for node in calls if not is_call(node, ops.select_rows.overload)]
        orders.append([_ops(program, node) for node in computing])
        assert any(is_call(node, ops.qk_norm_rope_append.overload) for node in calls)
        assert not any(is_call(node, ops.append_attention.overload) for node in calls)
    assert len(orders) == 4 and all(order == orders[0] for order in orders)
    assert any(len(names) > 1 for names in orders[0]), "regions"
    reasons = {
        one.reason for record in found.records if record.name == "fuse-append-attention" for one in record.refusals
    }
    assert len(reasons) == 1 and "its bits depend on the step" in reasons.pop()


@pytest.mark.parametrize("format", drawn(1, ["int8", "int8_tensor", "fp8_per_channel_per_token"]))
def test_quantized_weights_have_kernels(format: str) -> None:
    for program in lowered("llama-plain", f'default,quantize{{format="{format}"}}').programs.values():
        calls = [node for node in program.calls() if node.target not in VIEWS]
        assert any("ingot.quant_linear" in _ops(program, node) for node in calls)
        assert {node.meta["backend"] for node in calls} == {"triton"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", drawn(5, FIRST))
def test_no_family_needs_a_reference(family: str) -> None:
    for program in lowered(FIRST[family]).programs.values():
        calls = [
            node for node in program.calls() if node.target not in VIEWS and target_name(node.target) not in NO_KERNELS
        ]
        assert {node.meta["backend"] for node in calls} == {"triton"}


def _ops(program: Program, node: fx.Node) -> list[str]:
    """What a call computes: of a region all that is in it."""
    if isinstance(node.target, RegionCall):
        return [target_name(one.target) for one in program.regions[node.target.name].body.calls()]
    return [target_name(node.target)]
