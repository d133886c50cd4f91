"""Experts: the op against transformers' experts, its grouping, and arguments that do not fit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ingot.ir import build, ops
from ingot.ir.errors import VerifyError
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops.experts import group_by_expert
from ingot.ir.program import Program, Stage
from ingot.ir.types import Dim, TensorType

EXPERTS, HIDDEN, WIDTH, TOP_K = 7, 48, 20, 3


def _qwen(activation: str) -> tuple[nn.Module, Callable[[nn.Module], tuple[Any, ...]], dict[str, Any]]:
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN, num_experts=EXPERTS, moe_intermediate_size=WIDTH, hidden_act=activation
    )
    options = {"silu": {}, "gelu": {"activation": "gelu"}, "gelu_pytorch_tanh": {"activation": "gelu_tanh"}}
    return Qwen3MoeExperts(config), lambda one: (one.gate_up_proj, one.down_proj), options[activation]


def _gpt_oss() -> tuple[nn.Module, Callable[[nn.Module], tuple[Any, ...]], dict[str, Any]]:
    config = transformers.GptOssConfig(
        hidden_size=HIDDEN, num_local_experts=EXPERTS, intermediate_size=WIDTH, swiglu_limit=0.7, swiglu_alpha=1.3
    )

    def weights(one: nn.Module) -> tuple[Any, ...]:
        gate_up = one.gate_up_proj.mT.unflatten(1, (WIDTH, 2)).transpose(1, 2).flatten(1, 2)
        bias = one.gate_up_proj_bias.unflatten(1, (WIDTH, 2)).transpose(1, 2).flatten(1, 2)
        return gate_up, one.down_proj.mT, bias, one.down_proj_bias

    return GptOssExperts(config), weights, {"activation": "clamped", "limit": 0.7, "alpha": 1.3}


CASES = {
    **{activation: partial(_qwen, activation) for activation in ("silu", "gelu", "gelu_pytorch_tanh")},
    "clamped": _gpt_oss,
}


def _arguments(name: str, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[Any], dict[str, Any]]:
    """What transformers' experts return, and the arguments with which the op computes the same."""
    module, weights_of, options = CASES[name]()
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (noise * 1.5 / HIDDEN**0.5).to(dtype)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    weights = torch.rand(tokens, TOP_K, generator=generator)
    chosen = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K].contiguous()
    with torch.no_grad():
        expected = module(x, chosen, weights)
    return expected, [x, weights, chosen.int(), *(one.detach() for one in weights_of(module))], options


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("name", CASES)
def test_op_is_transformers_experts(name: str, tokens: int) -> None:
    expected, args, options = _arguments(name, tokens, torch.float32)
    for function in (ops.experts.reference, ops.experts.rowwise, ops.experts):
        assert compare(function(*args, **options), expected, torch.float32) is None


@pytest.mark.parametrize("name", ["silu", "clamped"])
def test_op_in_bfloat16_is_no_further_from_the_truth_than_transformers_experts(name: str) -> None:
    """They round each share and each sum of two, the op its sum once."""
    theirs, args, options = _arguments(name, 64, torch.bfloat16)
    wide = [one.double() if one.is_floating_point() else one for one in args]
    exact = ops.experts.reference(*wide, **options)
    for function in (ops.experts.reference, ops.experts.rowwise):
        error, their_error = (function(*args, **options).double() - exact).abs(), (theirs.double() - exact).abs()
        assert 0 < error.mean() <= their_error.mean() and error.max() <= 1.25 * their_error.max()


def test_weights_on_the_input_are_llama_4s() -> None:
    config = transformers.Llama4TextConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, intermediate_size=WIDTH)
    module, generator = Llama4TextExperts(config), torch.Generator().manual_seed(4)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 1.5 / HIDDEN**0.5
    x, weights = torch.randn(9, HIDDEN, generator=generator), torch.rand(9, 2, generator=generator)
    chosen = torch.rand(9, EXPERTS, generator=generator).argsort(-1)[:, :2].contiguous()
    scores = torch.zeros(9, EXPERTS).scatter(1, chosen, weights)
    with torch.no_grad():
        expected = module(x.repeat(EXPERTS, 1) * scores.T.reshape(-1, 1)).view(EXPERTS, 9, HIDDEN).sum(0)
    matrices = module.gate_up_proj.mT.detach(), module.down_proj.mT.detach()
    for function in (ops.experts.reference, ops.experts.rowwise):
        found = function(x, weights, chosen.int(), *matrices, weigh_input=True)
        assert compare(found, expected, torch.float32) is None


def test_choices_are_grouped_by_expert_and_counted_on_the_device() -> None:
    """T * top_k rows however the tokens are spread; each expert's stand together, in the order of tokens."""
    chosen = torch.rand(9, 5, generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :2]
    chosen[chosen == 3] = 4  # no token chooses expert 3
    order, counts = group_by_expert(chosen, 5)
    assert order.shape == (18,) and counts.shape == (5,) and int(counts.sum()) == 18 and counts[3] == 0
    assert sorted(order.tolist()) == list(range(18))
    rows = iter(order.tolist())
    for expert in range(5):
        mine = [next(rows) for _ in range(int(counts[expert]))]
        assert mine == [t * 2 + i for t in range(9) for i in range(2) if chosen[t, i] == expert]


F32, I32 = torch.float32, torch.int32


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"gate_up": (F32, 4, 39, 24)}, {}, "expert weights"),
        ({"down": (F32, 3, 24, 20)}, {}, "expert weights"),
        ({"chosen": (torch.int64, "T", 2)}, {}, "experts torch.int64"),
        ({"weights": (F32, "T", 3)}, {}, r"weights \[T, 3\]|weights \["),
        ({"chosen": (I32, "T", 5), "weights": (F32, "T", 5)}, {}, "5 experts for each token"),
        ({"gate_up_bias": (F32, 4, 20)}, {}, "gate_up_bias is"),
        ({"down_bias": (F32, 4, 20)}, {}, "down_bias is"),
        ({}, {"activation": "relu"}, "activation 'relu'"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "x": (F32, "T", 24),
        "weights": (F32, "T", 2),
        "chosen": (I32, "T", 2),
        "gate_up": (F32, 4, 40, 24),
        "down": (F32, 4, 24, 20),
    }

    def call(types: dict[str, Any], **options: Any) -> Any:
        program = Program("p", Stage.NORMAL, {"T": Dim("T", 1, 64)})
        nodes = {name: program.add_input(name, TensorType(one[0], one[1:])) for name, one in types.items()}
        biases = [nodes.get(name) for name in ("gate_up_bias", "down_bias")]
        first = tuple(nodes[name] for name in given)
        return build.call(program, ops.experts.overload, (*first, *biases), options)

    assert str(call(given).meta["type"]) == "f32[T, 24]"
    with pytest.raises(VerifyError, match=message):
        call({**given, **changes}, **options)
