"""Ops of several streams and of sparse activations against transformers' Gemma 3n and against einsum, in float64."""

from statistics import NormalDist

import pytest
import torch
from op_values import F32, F64, FLOATS, check, generator, randn
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp, Gemma3nTextMLP

from ingot.ir.errors import VerifyError
from ingot.ir.ops import OPS, concat


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("streams", "mixed"), [(1, 1), (4, 4), (1, 3), (5, 2)])
def test_mix_is_a_product_for_each_token(dtype: torch.dtype, streams: int, mixed: int) -> None:
    g = generator(streams)
    x, weights = randn(g, dtype, 7, streams, 37), randn(g, dtype, 7, mixed, streams)
    expected = torch.einsum("tmn,tnd->tmd", weights.double(), x.double())
    check(OPS["mix"].reference(x, weights), expected, dtype)


@pytest.mark.parametrize("active", [0, 2])
def test_mix_predicts_and_corrects_as_altup_does(active: int) -> None:
    config = Gemma3nTextConfig(
        hidden_size=24, num_attention_heads=2, altup_num_inputs=3, altup_active_idx=active, num_hidden_layers=1
    )
    altup, g = Gemma3nTextAltUp(config).to(F64), generator(3)
    for weight in altup.parameters():
        weight.data.copy_(randn(g, F64, *weight.shape))
    streams, activated = randn(g, F64, 3, 1, 5, 24), randn(g, F64, 1, 5, 24)
    ours = streams[:, 0].transpose(0, 1)  # [T, streams, hidden]
    with torch.no_grad():
        modalities = altup.compute_router_modalities(streams[active])
        predicted = altup.predict(streams)
        coefficients = altup.prediction_coefs(modalities)[0].view(5, 3, 3)
        corrected = altup.correct(predicted, activated)
        weights = altup.correction_coefs(altup.compute_router_modalities(activated))[0].view(5, 3, 1) + 1
    found = OPS["mix"].reference(ours, coefficients) + ours
    check(found, predicted[:, 0].transpose(0, 1), F64)
    missed = activated[0] - predicted[active, 0]
    check(OPS["mix"].reference(missed[:, None], weights) + found, corrected[:, 0].transpose(0, 1), F64)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [1, 2])
def test_concat_is_torchs(dtype: torch.dtype, dim: int) -> None:
    g = generator()
    x, y = randn(g, dtype, 5, 3, 4), randn(g, dtype, *((5, 2, 4) if dim == 1 else (5, 3, 9)))
    assert torch.equal(OPS["concat"].reference(x, y, dim=dim), torch.cat([x, y], dim))


@pytest.mark.parametrize("dim", [0, -1, 2])
def test_tokens_are_not_put_one_after_the_other(dim: int) -> None:
    with pytest.raises(VerifyError, match=f"concat along axis {dim} of 2"):
        concat(torch.ones(2, 3), torch.ones(2, 3), dim=dim)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e2])
def test_match_rms_gives_one_the_size_of_the_other(dtype: torch.dtype, scale: float) -> None:
    g = generator(2)
    x, like = (randn(g, dtype, 7, 3, 40) * scale).to(dtype), randn(g, dtype, 7, 1, 40)
    # As Gemma3nTextModel has it, where the mean square is bounded, and not its root.
    target = like.double().pow(2).mean(-1, keepdim=True) ** 0.5
    size = x.double().pow(2).mean(-1, keepdim=True).clamp(min=1e-5).sqrt()
    found = OPS["match_rms"].reference(x, like, least=1e-5)
    check(found, x.double() * target / size, dtype)
    if scale == 1.0:
        check(found.double().pow(2).mean(-1).sqrt().to(dtype), target.expand(7, 3, 1)[..., 0], dtype, 4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("part", [0.3, 0.5, 0.95])
def test_gaussian_top_k_keeps_what_lies_above_the_quantile(dtype: torch.dtype, part: float) -> None:
    x, quantile = (randn(generator(4), F64, 6, 512) * 3 + 1).to(dtype), NormalDist().inv_cdf(part)
    found, wide = OPS["gaussian_top_k"].reference(x, deviations=quantile), x.double()
    cutoff = wide.mean(-1, keepdim=True) + quantile * wide.std(-1, keepdim=True, unbiased=False)
    check(found, (wide - cutoff).clamp(min=0), dtype)
    assert abs(float((found == 0).double().mean()) - part) < 0.03


def test_gaussian_top_k_is_gemma_3ns() -> None:
    config = Gemma3nTextConfig(
        hidden_size=8, num_attention_heads=2, num_hidden_layers=1, activation_sparsity_pattern=[0.8]
    )
    x = randn(generator(4), F32, 6, 512) * 3 + 1
    found = OPS["gaussian_top_k"].reference(x, deviations=NormalDist().inv_cdf(0.8))
    check(found, Gemma3nTextMLP(config)._gaussian_topk(x), F32, 4)
