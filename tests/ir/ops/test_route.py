"""Routers: `route` and `sparse_mixer` against transformers' routers, ties, groups, and arguments that do not fit."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.phimoe.modeling_phimoe import sparsemixer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ingot.ir import build, ops
from ingot.ir.errors import VerifyError
from ingot.ir.program import Program, Stage
from ingot.ir.types import Dim, TensorType

EXPERTS, HIDDEN = 12, 16
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": 3}


def _deepseek(**fields: Any) -> torch.nn.Module:
    config = {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, **fields}
    return DeepseekV3TopkRouter(transformers.DeepseekV3Config(**SIZES, **config))


GROUPED = {"scores": "sigmoid", "least_sum": 1e-20, "groups": 4, "kept_groups": 2, "scale": 2.5, "renormalize": True}
# Transformers' router, and the options of `route` that compute the same.
ROUTERS: dict[str, tuple[torch.nn.Module, dict[str, Any]]] = {
    "softmax": (Qwen3MoeTopKRouter(transformers.Qwen3MoeConfig(**SIZES, num_experts=EXPERTS)), {}),
    "softmax of the chosen": (
        GptOssTopKRouter(transformers.GptOssConfig(**SIZES, num_local_experts=EXPERTS)),
        {"renormalize": True},
    ),
    "a bias for the choice": (
        Ernie4_5_MoeTopKRouter(transformers.Ernie4_5_MoeConfig(hidden_size=HIDDEN, moe_k=3, moe_num_experts=EXPERTS)),
        {"renormalize": True, "least_sum": 1e-12},
    ),
    "groups": (_deepseek(), GROUPED),
    "groups, not renormalized": (_deepseek(norm_topk_prob=False), {**GROUPED, "renormalize": False, "least_sum": 0.0}),
    "one group": (_deepseek(n_group=1, topk_group=1), {**GROUPED, "groups": 1, "kept_groups": 1}),
}


def _randomized(router: torch.nn.Module) -> torch.Tensor | None:
    """Give the router random weights, and return its bias for the choice."""
    generator, choice_bias = torch.Generator().manual_seed(1), None
    for name, tensor in router.state_dict().items():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
        if name.endswith("correction_bias"):
            choice_bias = tensor.flatten()
    return choice_bias


@pytest.mark.parametrize("name", ROUTERS)
def test_route_is_transformers_router(name: str) -> None:
    router, options = ROUTERS[name]
    bias = _randomized(router)
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(2)) / 2
    with torch.no_grad():
        logits, weights, experts = router(x)
    for function in (ops.route.reference, ops.route.rowwise, ops.route):
        found_weights, found = function(logits.float(), bias, top_k=3, **options)
        order, same = experts.argsort(-1), found.argsort(-1)
        assert torch.equal(found.gather(-1, same).long(), experts.gather(-1, order))
        torch.testing.assert_close(found_weights.gather(-1, same), weights.gather(-1, order))
    if bias is not None:
        assert not torch.equal(ops.route(logits.float(), top_k=3, **options)[1], found), "the bias changes no choice"


def test_route_by_logits_is_llama_4s_router() -> None:
    """Which orders logits. From 17 on their scores are all 1, and the first experts would be chosen."""
    config = transformers.Llama4TextConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=3)
    router = Llama4Router(config)
    _randomized(router)
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(2)) * 20
    with torch.no_grad():
        scores, logits = router(x)
    assert int((scores == 1).sum(-1).max()) == 3
    for function in (ops.route.reference, ops.route.rowwise, ops.route):
        weights, chosen = function(logits, top_k=3, scores="sigmoid", by_logits=True)
        assert torch.equal(chosen.long(), logits.topk(3, dim=-1).indices)
        torch.testing.assert_close(torch.zeros_like(scores).scatter(-1, chosen.long(), weights), scores)
    assert not torch.equal(ops.route(logits, top_k=3, scores="sigmoid")[1], chosen), "no scores are equal"


@pytest.mark.parametrize("jitter", [0.01, 0.2, 0.8])
def test_sparse_mixer_is_transformers(jitter: float) -> None:
    logits = torch.randn(60, EXPERTS, generator=torch.Generator().manual_seed(3))
    weights, experts = sparsemixer(logits, jitter, training=False)
    for function in (ops.sparse_mixer.reference, ops.sparse_mixer.rowwise):
        found, chosen = function(logits, jitter=jitter)
        assert torch.equal(chosen.long(), experts)
        torch.testing.assert_close(found, weights)


def test_of_equal_experts_the_first_is_chosen() -> None:
    zeros = torch.zeros(2, 6)
    assert ops.route(zeros, top_k=3)[1].tolist() == [[0, 1, 2]] * 2
    assert ops.route(zeros, top_k=2, groups=3, kept_groups=1)[1].tolist() == [[0, 1]] * 2
    assert ops.sparse_mixer(zeros, jitter=0.1)[1].tolist() == [[0, 1]] * 2


def test_a_sum_of_zero_is_no_divisor() -> None:
    weights, _ = ops.route(torch.full((1, 4), -200.0), top_k=2, scores="sigmoid", renormalize=True, least_sum=1e-20)
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (torch.bfloat16, {"top_k": 2}, "the router's logits are torch.bfloat16"),
        (torch.float32, {"top_k": 13}, "top_k is 13"),
        (torch.float32, {"top_k": 0}, "top_k is 0"),
        (torch.float32, {"top_k": 2, "scores": "tanh"}, "scores 'tanh'"),
        (torch.float32, {"top_k": 4, "groups": 2, "kept_groups": 1, "by_logits": True}, "chosen by logits"),
        (torch.float32, {"top_k": 2, "groups": 5}, "12 experts in 5 groups"),
        (torch.float32, {"top_k": 2, "groups": 0}, "12 experts in 0 groups"),
        (torch.float32, {"top_k": 2, "groups": 3, "kept_groups": 4}, "4 of 3 groups are kept"),
        (torch.float32, {"top_k": 5, "groups": 3, "kept_groups": 1}, "top_k is 5"),
        (torch.float32, {"top_k": 2, "groups": 12, "kept_groups": 4}, "the sum of its 2 best"),
    ],
)
def test_arguments_that_do_not_fit(dtype: torch.dtype, options: dict[str, Any], message: str) -> None:
    program = Program("p", Stage.NORMAL, {"T": Dim("T", 1, 64)})
    logits = program.add_input("logits", TensorType(dtype, ("T", EXPERTS)))
    with pytest.raises(VerifyError, match=message):
        build.call(program, ops.route.overload, (logits,), options)


def test_a_bias_of_another_size() -> None:
    with pytest.raises(VerifyError, match=r"bias torch.float32 \[3\]"):
        ops.route(torch.zeros(2, 4), torch.zeros(3), top_k=2)
    with pytest.raises(VerifyError, match="top_k is 2"):
        ops.sparse_mixer(torch.zeros(2, 1), jitter=0.1)
