"""Weight statistics against numbers that were planted, and against plain torch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from staged import LIMITS

from ingot.compile.weight_statistics import MEASURES, WeightStatistic, weight_statistics
from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.trace import trace
from ingot.ir.program import Model
from ingot.models.architectures import read_spec

Tensors = dict[str, torch.Tensor]
Statistics = Callable[[Callable[[Tensors], None]], dict[tuple[str, str], WeightStatistic]]
UP, NORM = "model.layers.{}.mlp.up_proj.weight", "model.layers.{}.post_attention_layernorm.weight"


@pytest.fixture(scope="module")
def opened(checkpoint: Callable[[str], Path]) -> tuple[Model, Tensors]:
    folder = checkpoint("llama-plain")  # three layers, a head of its own
    found = Checkpoint.open(folder)
    stored = {name: info.dtype for name, info in found.tensors.items()}
    return trace(read_spec(found.config), LIMITS, stored), load_file(folder / "model.safetensors")


@pytest.fixture
def statistics(opened: tuple[Model, Tensors]) -> Statistics:
    """The statistics by kind and measure, after an edit of the checkpoint's tensors."""
    model, stored = opened

    def get(edit: Callable[[Tensors], None]) -> dict[tuple[str, str], WeightStatistic]:
        tensors = {name: tensor.clone() for name, tensor in stored.items()}
        edit(tensors)
        found = weight_statistics(model.entries.values(), tensors.__getitem__)
        return {(one.kind, one.measure.name): one for one in found}

    return get


def test_ordinary_weights_are_no_risk(statistics: Statistics, opened: tuple[Model, Tensors]) -> None:
    found = statistics(lambda tensors: None)
    assert {measure for _, measure in found} == set(MEASURES) and not any(one.is_risk for one in found.values())
    up = [opened[1][UP.format(layer)] for layer in range(3)]
    worst = [float((one.abs().amax(1) / one.pow(2).mean(1).sqrt()).max()) for one in up]
    one = found["layers.*.mlp.up.weight", "outlier in a row: largest / rms"]
    assert one.value == pytest.approx(max(worst)) and one.layer == worst.index(max(worst)) and one.params == 3
    assert one.param == f"layers.{one.layer}.mlp.up.weight"
    gains = torch.stack([opened[1][NORM.format(layer)] for layer in range(3)]).abs()
    assert found["layers.*.mlp_norm.weight", "largest gain"].value == pytest.approx(float(gains.max()))


def _set(name: str, place: object, value: float) -> Callable[[Tensors], None]:
    return lambda tensors: tensors[name].__setitem__(place, value)


EMBED, NORM_2, UP_1 = "model.embed_tokens.weight", NORM.format(2), UP.format(1)


def _louder_channel(tensors: Tensors) -> None:
    tensors[EMBED][:, 5] *= 60


@pytest.mark.parametrize(
    ("edit", "kind", "measure", "layer", "value"),
    [
        (_set(NORM_2, 7, -96.0), "layers.*.mlp_norm.weight", "largest gain", 2, 96.0),
        (_set(NORM_2, slice(0, 2), 0.0), "layers.*.mlp_norm.weight", "zero gains", 2, 2.0),
        (_set(UP_1, (3, 4), 50.0), "layers.*.mlp.up.weight", "outlier in a row: largest / rms", 1, None),
        (_louder_channel, "embed.weight", "outlier channel: rms / rms of all", None, None),
        (_set(EMBED, (9, 9), 5000.0), "embed.weight", "massive values: largest / median", None, None),
        (_set(UP_1, slice(0, 3), 0.0), "layers.*.mlp.up.weight", "rows of zeros", 1, 3.0),
        (_set(UP_1, (0, 0), float("nan")), "layers.*.mlp.up.weight", "values that are not finite", 1, 1.0),
        (_set("lm_head.weight", 4, float("inf")), "head.weight", "values that are not finite", None, None),
    ],
)
def test_a_planted_risk_is_found_where_it_is(
    edit: Callable[[Tensors], None],
    kind: str,
    measure: str,
    layer: int | None,
    value: float | None,
    statistics: Statistics,
) -> None:
    one = statistics(edit)[kind, measure]
    assert one.is_risk and one.exceed == 1 and one.layer == layer and one.value > one.measure.bound
    assert value is None or one.value == value
