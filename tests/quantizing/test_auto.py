"""auto: sensitivities, the order of steps, and a bound that is kept with the fewest bytes."""

from pathlib import Path

import pytest
import torch

from ingot.compile.request import Request
from ingot.ir.formats import find_format
from ingot.ir.numerics.harness import step_inputs
from ingot.ir.program import Program
from ingot.passes.select_linears import select_linears
from ingot.quantizing.auto import CANDIDATES, Sensitivity, find_sensitivity
from ingot.quantizing.calibrate import calibrate

FORMATS = (*map(find_format, CANDIDATES), None)


def test_the_next_step_saves_most_divergence_per_byte() -> None:
    kl = {0: (1.0, 0.9, 0.8, 0.1, 0.0), 1: (8.0, 4.0, 2.0, 0.2, 0.0)}
    sizes = (10, 11, 12, 20, 40)
    weights = {0: ("a",), 1: ("b",)}
    found = Sensitivity(weights, {"a": FORMATS, "b": FORMATS}, kl, dict.fromkeys(kl, sizes))
    assert found.steps() == ((1, 1), (1, 2), (1, 3), (0, 1), (0, 2), (0, 3), (1, 4), (0, 4))
    assert found.levels(3) == {0: 0, 1: 3}
    assert found.expected_steps(1.2) == 3 and found.expected_steps(100.0) == 0
    assert {name: one.name for name, one in found.chosen(3).items()} == {"a": "int4_g128", "b": "int8"}
    assert found.chosen(len(found.steps())) == {}


def test_a_step_may_skip_a_level_that_saves_nothing() -> None:
    kl = {0: (1.0, 1.0, 1.0, 0.1, 0.0)}
    found = Sensitivity({0: ("a",)}, {"a": FORMATS}, kl, {0: (10, 11, 12, 20, 40)})
    assert found.steps() == ((0, 3), (0, 4))


def test_sensitivities_are_those_of_single_layers(program: Program, request_of: Request) -> None:
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(0, 260, (2, 40), generator=generator).tolist()
    texts = [step_inputs(program.input_types(), [tokens])[0] for tokens in drawn]
    linears = list(select_linears(program, "plain").formats)
    found = find_sensitivity(program, linears, texts, request_of.checkpoint.read)
    assert set(found.weights) == {0, 1, 2} and all(len(names) == 7 for names in found.weights.values())
    # Rows of 64 and 96 elements fit no group of 128; those of 96 fit groups of 32 only.
    assert [one and one.name for one in found.formats["layers.0.mlp.up.weight"]] == [
        "int4_g64", "int4_g64", "int4_g32", "int8", None
    ]  # fmt: skip
    assert [one and one.name for one in found.formats["layers.0.mlp.down.weight"]][:3] == ["int4_g32"] * 3
    for layer, names in found.weights.items():
        formats = {name: one for name in names if (one := found.formats[name][0]) is not None}
        alone = calibrate(program, formats, "rtn", texts, texts, request_of.checkpoint.read, lambda name, tensor: None)
        assert found.kl[layer][0] == pytest.approx(alone.measured.kl, rel=1e-3)
        assert found.kl[layer][0] > found.kl[layer][3] > found.kl[layer][4] == 0
        assert list(found.bytes[layer]) == sorted(found.bytes[layer])


@pytest.mark.parametrize("bound", [1e-9, 2e-3, 10.0])
def test_the_bound_is_kept(checkpoint: Path, text: Path, bound: float) -> None:
    request = Request.read(
        checkpoint,
        target="cpu",
        backend="reference",
        quantize="auto",
        calibrate=text,
        max_kl=bound,
        quantize_method="rtn",
        max_seq_len=128,
    )
    model = request.trace()
    record = request.calibrated(model, request.identity(model)).calibration.record  # type: ignore[union-attr]
    assert record.kl <= bound == record.max_kl
    formats = {one.format for one in record.layers}
    if bound == 10.0:
        assert formats == {"int4_g128"} and record.perplexity != record.reference
    elif bound == 1e-9:
        assert formats == {None} and record.linears == () and record.perplexity == record.reference
    else:
        assert record.linears
