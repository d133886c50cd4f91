"""Norms, linears, gates and embeddings against the functions of torch and transformers."""

import re

import pytest
import torch
import torch.nn.functional as F
from op_values import BF16, F16, F32, F64, FLOATS, check, generator, ints, randn
from transformers.activations import ACT2FN
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ingot.ir.errors import VerifyError
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS


@pytest.mark.parametrize("dtype", FLOATS)
def test_embedding_is_torchs(dtype: torch.dtype) -> None:
    g = generator()
    weight, ids = randn(g, dtype, 41, 13), torch.randint(0, 41, (29,), generator=g, dtype=torch.int32)
    assert torch.equal(OPS["embedding"].reference(ids, weight), F.embedding(ids, weight))
    assert torch.equal(OPS["embedding"].reference(ids.long(), weight), F.embedding(ids, weight))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 1, 1), (5, 48, 72), (7, 37, 3), (3, 515, 129)])
def test_linear_is_a_float64_matmul(dtype: torch.dtype, rows: int, inner: int, outer: int) -> None:
    g = generator(rows)
    x, weight, bias = randn(g, dtype, rows, inner), randn(g, dtype, outer, inner), randn(g, dtype, outer)
    product = x.double() @ weight.double().T
    check(OPS["linear"].reference(x, weight), product, dtype)
    # In float16 and bfloat16 torch may add the bias to the rounded product: one rounding more.
    check(OPS["linear"].reference(x, weight, bias), product + bias.double(), dtype, 1 if dtype in (F32, F64) else 4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "heads", "inner", "outer"), [(1, 1, 1, 1), (5, 4, 24, 16), (7, 3, 37, 5)])
def test_head_linear_is_a_linear_of_each_head(
    dtype: torch.dtype, rows: int, heads: int, inner: int, outer: int
) -> None:
    g = generator(rows)
    x, weight = randn(g, dtype, rows, heads, inner), randn(g, dtype, heads, outer, inner)
    expected = torch.stack([x[:, head].double() @ weight[head].double().T for head in range(heads)], 1)
    check(OPS["head_linear"].reference(x, weight), expected, dtype)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    check(OPS["head_linear"].reference(x, turned), expected, dtype)


@pytest.mark.parametrize(
    ("x", "weight"),
    [((5, 4, 24), (3, 16, 24)), ((5, 4, 24), (4, 16, 23)), ((5, 24), (1, 16, 24)), ((5, 4, 24), (4, 24))],
)
def test_head_linear_of_other_sizes_is_refused(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    for function in (OPS["head_linear"].reference, OPS["head_linear"].fake):
        with pytest.raises(VerifyError, match=r"heads .* and matrices"):
            function(torch.zeros(x), torch.zeros(weight))


@pytest.mark.parametrize("shape", [(1,), (23,), (), (1, 24)])
def test_rounded_linear_needs_a_bias_for_each_row_of_the_weight(shape: tuple[int, ...]) -> None:
    op = OPS["rounded_linear"]
    for sample in op.samples(generator(), BF16):
        given = sample.args[:4]
        assert op.fake(*given, torch.zeros(24, dtype=BF16), **sample.kwargs).shape == (5, 24)
        with pytest.raises(ValueError, match=rf"has a bias \[24\], and {re.escape(str([*shape]))} are given"):
            op.fake(*given, torch.zeros(shape, dtype=BF16), **sample.kwargs)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(6, 40), (1, 1), (5, 3, 17)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], scale: float) -> None:
    g = generator(1)
    x, weight = randn(g, dtype, *shape) * scale, randn(g, dtype, shape[-1])
    found = OPS["rms_norm"].reference(x, weight, eps=1e-5)
    # torch rounds once where Llama rounds the normed value first.
    check(found, F.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5), dtype)
    if dtype != F64:  # transformers computes in float32 whatever it is given
        theirs = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
        theirs.weight.data.copy_(weight)
        assert torch.equal(found, theirs(x))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_rms_norm_with_a_wider_weight_is_gemmas(dtype: torch.dtype) -> None:
    """Gains in float32: nothing is rounded before the product, and the result is x's dtype."""
    g = generator(21)
    x, weight = randn(g, dtype, 7, 40) * 3, randn(g, dtype, 40)
    theirs = gemma2.Gemma2RMSNorm(40, eps=1e-6)
    theirs.weight.data.copy_(weight)
    found = OPS["rms_norm"].reference(x, 1 + weight.float(), eps=1e-6)
    assert found.dtype == dtype and torch.equal(found, theirs(x))
    assert not torch.equal(found, OPS["rms_norm"].reference(x, 1 + weight, eps=1e-6))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(6, 40), (5, 3, 17), (1, 2)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2])
def test_layer_norm_is_torchs(dtype: torch.dtype, shape: tuple[int, ...], scale: float) -> None:
    g = generator(22)
    x, weight = (randn(g, dtype, *shape) + 2) * scale, randn(g, dtype, shape[-1])
    expected = F.layer_norm(x.double(), shape[-1:], weight.double(), eps=1e-5)
    # In float16 and bfloat16 the quotient is rounded before the product.
    check(OPS["layer_norm"].reference(x, weight, eps=1e-5), expected, dtype, 10 if dtype in (F32, F64) else 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(6, 40), (5, 3, 17)])
def test_layer_norm_with_a_bias_is_torchs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    g = generator(25)
    x, weight, bias = randn(g, dtype, *shape) + 2, randn(g, dtype, shape[-1]), randn(g, dtype, shape[-1])
    expected = F.layer_norm(x.double(), shape[-1:], weight.double(), bias.double(), eps=1e-5)
    check(OPS["layer_norm"].reference(x, weight, bias, eps=1e-5), expected, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("kind", "theirs"), [("gelu", "gelu"), ("gelu_tanh", "gelu_new"), ("relu", "relu"), ("relu_squared", "relu2")]
)
def test_activations_are_transformers(dtype: torch.dtype, kind: str, theirs: str) -> None:
    x = randn(generator(26), dtype, 5, 37) * 3
    found = OPS["activate"].reference(x[:, 5:], kind=kind)
    assert found.is_contiguous()
    check(found, ACT2FN[theirs](x[:, 5:].double()), dtype)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(VerifyError, match="activation 'gelu_new'"):
        OPS["activate"].reference(torch.ones(1, 2), kind="gelu_new")


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("gains", [(4, 16), (16,)])
def test_layer_norm_with_float32_gains_is_coheres(dtype: torch.dtype, gains: tuple[int, ...]) -> None:
    """One weight for all heads, or one for each."""
    g = generator(23)
    x, weight = randn(g, dtype, 6, 4, 16) + 1, randn(g, F32, *gains)
    theirs = cohere.CohereLayerNorm(gains, eps=1e-5)
    theirs.weight.data.copy_(weight)
    found = OPS["layer_norm"].reference(x, weight, eps=1e-5)
    assert found.dtype == dtype
    problem = compare(found, theirs(x), dtype)
    assert problem is None, problem


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_mul_is_torchs(dtype: torch.dtype, approximate: str) -> None:
    g = generator(24)
    gate, up = randn(g, dtype, 5, 37) * 3, randn(g, dtype, 5, 37)
    expected = F.gelu(gate.double(), approximate=approximate) * up.double()
    found = OPS["gelu_mul"].reference(gate, up, approximate=approximate)
    check(found, expected, dtype)
    other = F.gelu(gate.double(), approximate="tanh" if approximate == "none" else "none") * up.double()
    if dtype in (F32, F64):
        assert compare(found, other, dtype) is not None, "the two approximations differ by more than rounding"
    merged = torch.cat([gate, up], 1)
    sliced = OPS["gelu_mul"].reference(merged[:, :37], merged[:, 37:], approximate=approximate)
    assert sliced.is_contiguous()
    check(sliced, found, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cap", [1.0, 30.0, 50])
def test_soft_cap(dtype: torch.dtype, cap: float) -> None:
    x = randn(generator(25), dtype, 6, 33) * 60
    found = OPS["soft_cap"].reference(x, cap=cap)
    check(found, cap * torch.tanh(x.double() / cap), dtype)
    assert bool((found.abs() <= cap).all()) and bool((found * x >= 0).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("limit", [0.5, 30.0])
def test_clamp_is_torchs(dtype: torch.dtype, limit: float) -> None:
    x = randn(generator(27), dtype, 6, 33) * 60
    x[0, 0], x[0, 1] = float("nan"), float("inf")
    found = OPS["clamp"].reference(x[:, :20], limit=limit)
    assert found.is_contiguous() and torch.equal(found.nan_to_num(7e4), x[:, :20].clamp(-limit, limit).nan_to_num(7e4))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_add_rms_norm_rounds_the_sum_first(dtype: torch.dtype) -> None:
    g = generator(2)
    x, residual, weight = randn(g, dtype, 6, 40), randn(g, dtype, 6, 40) * 50, randn(g, dtype, 40)
    normed, total = OPS["add_rms_norm"].reference(x, residual, weight, eps=1e-6)
    theirs = LlamaRMSNorm(40, eps=1e-6).to(dtype)
    theirs.weight.data.copy_(weight)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, theirs(x + residual))


@pytest.mark.parametrize("dtype", FLOATS)
def test_silu_mul(dtype: torch.dtype) -> None:
    g = generator(3)
    gate, up = randn(g, dtype, 5, 37) * 5, randn(g, dtype, 5, 37)
    check(OPS["silu_mul"].reference(gate, up), F.silu(gate.double()) * up.double(), dtype)
    merged = torch.cat([gate, up], 1)
    sliced = OPS["silu_mul"].reference(merged[:, :37], merged[:, 37:])
    assert sliced.is_contiguous()
    check(sliced, OPS["silu_mul"].reference(gate, up), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_select_rows_and_cast(dtype: torch.dtype) -> None:
    x = randn(generator(4), dtype, 6, 3, 5)
    assert torch.equal(OPS["select_rows"].reference(x, ints(5, 0, 0, 2)), x[[5, 0, 0, 2]])
    for other in FLOATS:
        assert torch.equal(OPS["cast"].reference(x, dtype=other), x.to(other))
