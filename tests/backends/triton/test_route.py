"""The routers of mixtures of experts by Triton kernels: their choices are those of the references, ties among them."""

from typing import Any

import pytest
import torch
from odd_samples import odd_samples
from triton_checks import check_lowering
from triton_schedules import DEVICE, new_schedule, run_lowering

from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.experts.route import LOWERINGS
from ingot.backends.triton.schedule import Value
from ingot.ir import ops
from ingot.ir.ops import OPS
from ingot.ir.types import TensorType

# Rows of zeros or NaN divide zero by zero, as in the references.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
F32 = torch.float32
GROUPED = {"scores": "sigmoid", "renormalize": True, "least_sum": 1e-20, "scale": 2.5}
# Experts, and options: those of Qwen3, GPT-OSS, DeepSeek-V3 and V2, with groups of twenty, and the largest.
MODELS: list[tuple[int, dict[str, Any]]] = [
    (128, {"top_k": 8, "renormalize": True}),
    (32, {"top_k": 4, "renormalize": True}),
    (256, {"top_k": 8, "groups": 8, "kept_groups": 4, **GROUPED}),
    (160, {"top_k": 6, "groups": 8, "kept_groups": 3, "group_best": 1, "scale": 16.0}),
    (512, {"top_k": 16}),
    (7, {"top_k": 7, "scores": "sigmoid"}),
    (16, {"top_k": 3, "scores": "sigmoid", "by_logits": True}),
]


def check(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check_lowering(OPS[name], LOWERINGS[name], args, kwargs, dims={"T": args[0].shape[0]})


@pytest.mark.parametrize("name", LOWERINGS)
def test_samples(name: str) -> None:
    for sample in OPS[name].samples(torch.Generator().manual_seed(1), F32) + odd_samples(name, F32):
        check(name, sample.args, dict(sample.kwargs))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("experts", "options"), MODELS, ids=str)
@pytest.mark.parametrize("ties", [False, True], ids=["drawn", "ties"])
def test_sizes_of_models(experts: int, options: dict[str, Any], ties: bool) -> None:
    """With ties, most scores of a row are those of several experts, and so are the scores of groups."""
    g = torch.Generator().manual_seed(experts)
    logits, bias = torch.randn(3 if DEVICE == "cpu" else 200, experts, generator=g), torch.randn(experts, generator=g)
    if ties:
        logits, bias = logits.round(), bias.round()
        logits[0] = 0.0
    check("route", (logits,), options)
    if not options.get("by_logits"):
        check("route", (logits, bias), options)
    check("sparse_mixer", (logits,), {"jitter": 0.3})


def test_logits_of_equal_scores_are_told_apart() -> None:
    """From 17 on, a sigmoid in float32 is 1."""
    logits = 20 + torch.arange(12.0).view(1, 12)[:, torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    for options in ({}, {"by_logits": True}):
        check("route", (logits,), {"top_k": 3, "scores": "sigmoid", **options})


@pytest.mark.parametrize("name", LOWERINGS)
def test_any_logits_choose_experts(name: str) -> None:
    """What kernels read by these indices is within the experts' weights, also for rows that only fill a step up."""
    logits = torch.randn(6, 13, generator=torch.Generator().manual_seed(3))
    logits[0] = float("nan")
    logits[1, 4] = float("nan")
    logits[2] = float("-inf")
    logits[3] = float("inf")
    logits[4, ::2] = -0.0
    logits[4, 1::2] = 0.0
    kwargs: dict[str, Any] = {"jitter": 0.1} if name == "sparse_mixer" else {"top_k": 5}
    weights, chosen = run_lowering(OPS[name], LOWERINGS[name], (logits,), kwargs, dims={"T": 6})
    expected, indices = OPS[name].reference(logits, **kwargs)
    assert torch.equal(chosen.cpu(), indices)
    torch.testing.assert_close(weights.cpu(), expected, equal_nan=True)


def test_rows_that_are_part_of_others() -> None:
    merged = torch.randn(4, 20, generator=torch.Generator().manual_seed(4))
    check("route", (merged[:, 3:12],), {"top_k": 2})


def test_refused() -> None:
    for dtype, shape, strides, reason in (
        (torch.float64, ("T", 8), None, "not f32"),
        (F32, ("T", 8), (16, 2), "strided along its last axis"),
        (F32, ("T", 20_000), None, "a tile of 32768 scores of experts, more than 16384"),
    ):
        logits = Value(TensorType(dtype, shape, strides), input=0)
        results = (TensorType(F32, ("T", 2)), TensorType(torch.int32, ("T", 2)))
        attributes = ops.route.bind([torch.zeros(1, 8)], {"top_k": 2})
        call = Call("route", {"router_logits": logits, "bias": None}, attributes, results)
        with pytest.raises(Refused, match=reason):
            LOWERINGS["route"](call, new_schedule())
