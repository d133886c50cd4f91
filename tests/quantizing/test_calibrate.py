"""calibrate: what it runs, what it stores, and that scales that it moves change no result."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ingot.compile.request import Request
from ingot.ir.artifact.quantization import QuantizedLinear
from ingot.ir.errors import CalibrationError, CheckpointError
from ingot.ir.formats import Format, dequantize, find_format
from ingot.ir.formats.grid import Grid
from ingot.ir.interpret import interpret
from ingot.ir.numerics.harness import load_params, step_inputs
from ingot.ir.numerics.quantized_weights import kl_divergence
from ingot.ir.program import Program
from ingot.passes.quantize import Quantize
from ingot.quantizing.calibrate import METHODS, Calibration, Inputs, calibrate
from ingot.quantizing.stream import Lane, Replaced, Stream, weight_of

Tensors = dict[str, torch.Tensor]


def sequences(program: Program, count: int, length: int, seed: int) -> list[Inputs]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 260, (count, length), generator=generator).tolist()
    return [step_inputs(program.input_types(), [tokens])[0] for tokens in drawn]


@pytest.fixture(scope="module")
def texts(program: Program) -> tuple[list[Inputs], list[Inputs]]:
    return sequences(program, 6, 48, 1), sequences(program, 2, 40, 2)


def run(
    program: Program, request: Request, texts: tuple[Sequence[Inputs], Sequence[Inputs]], format: str, method: str
) -> tuple[Calibration, Tensors]:
    stored: Tensors = {}
    formats = Quantize(format=format).select(program).formats
    by_name: dict[str, Format] = {str(weight_of(node).target): one for node, one in formats.items()}
    found = calibrate(program, by_name, method, *texts, request.checkpoint.read, stored.__setitem__)
    return found, stored


def test_a_stream_is_the_interpreter(program: Program, request_of: Request) -> None:
    inputs = sequences(program, 1, 30, 3)[0]
    params = load_params(program.params, request_of.checkpoint.read)
    expected = interpret(program, {**params, **inputs}, exact=True)["logits"]
    ((index, found),) = Stream(program, request_of.checkpoint.read, [Lane(inputs, measured=True)]).run(lambda _: {})
    assert index == 0
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_lane_shares_values_until_its_weights_differ(program: Program, request_of: Request) -> None:
    inputs = sequences(program, 1, 20, 3)[0]
    lanes = [Lane(inputs, measured=True), Lane(inputs, like=0, measured=True)]
    calls = 0
    last = [node for node in program.calls() if node.target.__name__.startswith("linear")][-2]  # the last layer's down

    def at_linear(node: object) -> dict[int, Replaced]:
        nonlocal calls
        calls += 1
        return {1: Replaced(torch.zeros(64, 96))} if node is last else {}

    stream = Stream(program, request_of.checkpoint.read, lanes)
    found = dict(stream.run(at_linear))
    assert calls == 3 * 7 + 1
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("method", METHODS)
def test_the_stored_tensors_are_what_was_measured(
    program: Program, request_of: Request, texts: tuple[list[Inputs], list[Inputs]], method: str
) -> None:
    """Put together by hand from the stored tensors, the program has the measured divergence."""
    found, stored = run(program, request_of, texts, "int4_g32", method)
    params = load_params(program.params, request_of.checkpoint.read)
    original = {name: tensor.double() for name, tensor in params.items() if tensor.is_floating_point()}
    changed = dict(original)
    for name, tensor in found.weights.vectors.items():
        changed[name] = (params[name].float() * stored[tensor]).to(params[name].dtype).double()
    for name in found.weights.formats:
        format = find_format(found.weights.formats[name])
        changed[name] = dequantize({part: stored[f"{name}.{part}"] for part in format.parts}, format, torch.float64)
    assert len(found.weights.formats) == 21
    assert bool(found.weights.vectors) == (method in ("awq", "smoothquant"))
    kl = [
        kl_divergence(*(interpret(program, {**params, **values, **inputs}, exact=True)["logits"] for values in both))
        for inputs in texts[1]
        for both in [(original, changed)]
    ]
    assert found.measured.kl == pytest.approx(sum(kl) / len(kl), rel=2e-3)


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_scales_that_move_keep_the_float_function(
    program: Program, request_of: Request, texts: tuple[list[Inputs], list[Inputs]], method: str
) -> None:
    """The original weights, with only the scales of rows, columns and vectors, compute the same."""
    found, stored = run(program, request_of, texts, "int4_g32", method)
    weights = found.weights
    params = load_params(program.params, request_of.checkpoint.read)
    moved = {name: tensor.double() for name, tensor in params.items() if tensor.is_floating_point()}
    for name, tensor in weights.vectors.items():
        moved[name] = (params[name].float() * stored[tensor]).to(params[name].dtype).double()
    for scales in (weights.rows, weights.columns):
        for name, tensor in scales.items():
            moved[name] = moved[name] * stored[tensor].double()
    # The biases of `up` are rounded to bfloat16 after the division, so they are compared without.
    for name in weights.vectors:
        if name.endswith("bias"):
            moved[name] = params[name].double() * stored[weights.vectors[name]].double()
    inputs = texts[1][0]
    expected = interpret(program, {**params, **inputs}, exact=True)["logits"]
    torch.testing.assert_close(
        interpret(program, {**params, **moved, **inputs}, exact=True)["logits"], expected, rtol=1e-5, atol=1e-5
    )
    # q, k and v from one norm, gate and up from the other, and down from up, in each of the three layers.
    assert len(weights.together) <= 6 and any(name.endswith("up.weight") for name in weights.rows)


def test_gptq_and_awq_lose_less_than_rounding(
    program: Program, request_of: Request, texts: tuple[list[Inputs], list[Inputs]]
) -> None:
    error = {}
    for method in ("rtn", "gptq", "awq"):
        found, _ = run(program, request_of, texts, "int4_g32", method)
        error[method] = sum(one.error for one in found.linears)
    assert error["gptq"] < 0.9 * error["rtn"] and error["awq"] < error["rtn"]


def test_activations_are_rounded_where_the_format_says(
    program: Program, request_of: Request, texts: tuple[list[Inputs], list[Inputs]]
) -> None:
    """With outlier channels, eight-bit activations lose more than eight-bit weights, and SmoothQuant less of it."""
    kl = {
        (format, method): run(program, request_of, texts, format, method)[0].measured.kl
        for format, method in (("int8", "rtn"), ("int8_w8a8", "rtn"), ("int8_w8a8", "smoothquant"))
    }
    assert kl["int8", "rtn"] < kl["int8_w8a8", "smoothquant"] < kl["int8_w8a8", "rtn"]


def test_the_report_of_a_linear(
    program: Program, request_of: Request, texts: tuple[list[Inputs], list[Inputs]]
) -> None:
    found, stored = run(program, request_of, texts, "int8", "rtn")
    one = next(item for item in found.linears if item.weight == "layers.1.mlp.down.weight")
    assert one == QuantizedLinear(
        weight="layers.1.mlp.down.weight", layer=1, format="int8", bytes=64 * 96 + 64 * 4, error=one.error
    )
    assert 0 < one.error < 0.02
    weight = load_params(program.params, request_of.checkpoint.read)["layers.1.mlp.down.weight"].float()
    expected = Grid.of(weight, find_format("int8"))
    assert torch.equal(stored["layers.1.mlp.down.weight.weight"], expected.stored(expected.nearest(weight))["weight"])


def test_equal_runs_store_equal_bits(
    program: Program, request_of: Request, texts: tuple[list[Inputs], list[Inputs]], tmp_path: Path
) -> None:
    (first, one), (second, other) = (run(program, request_of, texts, "int4_g32", "gptq") for _ in range(2))
    assert first == second and one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_only_one_layer_is_in_memory(program: Program, request_of: Request) -> None:
    inputs = sequences(program, 2, 20, 3)
    stream = Stream(program, request_of.checkpoint.read, [Lane(one, measured=True) for one in inputs])
    most = 0

    def at_linear(node: object) -> dict[int, Replaced]:
        nonlocal most
        matrices = [one for one in stream._shared if one.op == "placeholder" and "layers." in str(one.target)]
        most = max(most, len(matrices))
        return {}

    list(stream.run(at_linear))
    assert most <= 2


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("layers.1.mlp.up.weight", float("nan"), CheckpointError, "layers.1.mlp.up.weight"),
        ("norm.weight", float("inf"), CalibrationError, "logits .* not finite"),
        ("layers.1.mlp_norm.weight", float("inf"), CalibrationError, "activations .* not finite"),
    ],
)
def test_numbers_that_are_not_finite(
    program: Program,
    request_of: Request,
    texts: tuple[list[Inputs], list[Inputs]],
    name: str,
    value: float,
    error: type[Exception],
    message: str,
) -> None:
    def read(tensor: str) -> torch.Tensor:
        found = request_of.checkpoint.read(tensor).clone()
        if tensor in program.params[name].recipe.sources():
            found.flatten()[3] = value
        return found

    formats = {
        str(weight_of(node).target): one for node, one in Quantize(format="int8").select(program).formats.items()
    }
    with pytest.raises(error, match=message):
        calibrate(program, formats, "gptq", *texts, read, lambda name, tensor: None)
