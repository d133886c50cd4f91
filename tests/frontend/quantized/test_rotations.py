"""Rotations of compressed-tensors checkpoints, against dense block-diagonal matrices and the library itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import (
    LIMIT_OPTIONS,
    UP,
    Tensors,
    Write,
    Written,
    adopted,
    check_logits,
    formats_of,
    write_quantized,
)

from ingot import LLM, SamplingParams, compile_model
from ingot.frontend.quantized.fields import Fields
from ingot.frontend.quantized.rotations import read_rotations, with_rotations
from ingot.frontend.quantized.stored import Stored
from ingot.frontend.safetensors_header import TensorInfo
from ingot.ir.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.one_in_file(3)

LINEARS = {"type": "hadamard", "head_dim": 16, "randomize": False, "requires_grad": False, "precision": "torch.float32"}


def scheme(*apply: tuple[str, bool], **fields: Any) -> dict[str, Any]:
    """A scheme that is applied to all linears but the head, at (location, inverse)."""
    listed = [
        {"targets": ["Linear"], "location": location, "inverse": inverse, "ignore": ["lm_head"]}
        for location, inverse in apply
    ]
    return {**LINEARS, "apply": listed, **fields}


def sylvester(size: int) -> torch.Tensor:
    """An element is -1 to the number of bits that its row and column have in common."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])


def blocks(matrix: torch.Tensor, size: int) -> torch.Tensor:
    return torch.block_diag(*[matrix.double()] * (size // len(matrix)))


def codes_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """i8 codes with scales that are powers of two, so that products and sums with ±1/4 are exact in float32."""
    scales = torch.exp2((weight.abs().amax(1, keepdim=True) / 127).log2().ceil()).float()
    return (weight / scales).round().clamp(-128, 127).to(torch.int8), scales


def rotated(
    turn_in: torch.Tensor | None, turn_out: torch.Tensor | None = None, stored: Mapping[str, torch.Tensor] | None = None
) -> Write:
    """Store a weight S such that the linear is x -> x R S.T U. It stands for U.T S R.T."""

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if module == "lm_head":
            return None
        right = torch.eye(weight.shape[1]).double() if turn_in is None else blocks(turn_in, weight.shape[1])
        left = torch.eye(weight.shape[0]).double() if turn_out is None else blocks(turn_out, weight.shape[0])
        codes, scales = codes_of(torch.linalg.inv(left.T) @ weight.double() @ torch.linalg.inv(right.T))
        meant = left.T @ (codes.double() * scales.double()) @ right.T
        parts = {"weight": codes, "weight_scale": scales}
        return {**parts, **(stored if stored is not None and module == UP else {})}, meant.float()

    return write


def described(groups: Mapping[str, Any], inputs: Any = None) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "transform_config": {"config_groups": dict(groups)},
    }


H16 = sylvester(16) / 4
ORDER = torch.randperm(16, generator=torch.Generator().manual_seed(0))
RANDOM = torch.randint(0, 2, (16,), generator=torch.Generator().manual_seed(1)).double().mul(2).sub(1).diag()
ONLINE = ("input", False), ("weight_input", True)


def test_weights_are_stored_rotated(tmp_path: Path) -> None:
    """Rotations of weights alone change nothing: they are part of the stored numbers."""
    groups = {"R1": scheme(("weight_output", False), ("weight_input", True))}
    written = write_quantized(tmp_path / "m", described(groups), rotated(None))
    assert formats_of(check_logits(written)) == {"int8"}


def test_inputs(tmp_path: Path) -> None:
    """One matrix is stored, at one linear. All linears share its param, so those that read one value are merged."""
    written = write_quantized(
        tmp_path / "m", described({"v": scheme(*ONLINE)}), rotated(H16, stored={"v_input.weight": sylvester(16)})
    )
    program = check_logits(written)
    assert formats_of(program) == {"i8/1x*:f32/rotated_in=16"}
    assert sum("rotation_in" in name for name in program.params) == 1
    assert adopted(written)[1]["merge-linears"].matches == 2


def test_inputs_and_results(tmp_path: Path) -> None:
    groups = {"v": scheme(*ONLINE), "u": scheme(("weight_output", False), ("output", True))}
    written = write_quantized(tmp_path / "m", described(groups), rotated(H16, H16.T))
    assert formats_of(check_logits(written)) == {"i8/1x*:f32/rotated_in=16/rotated_out=16"}


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("kind", ["hadamard", "random-hadamard"])
def test_orders_and_inverses(tmp_path: Path, kind: str, inverse: bool) -> None:
    held = sylvester(16) if kind == "hadamard" else sylvester(16) @ RANDOM.float()
    turn = held[ORDER][:, ORDER] / 4
    groups = {"v": scheme(("input", inverse), ("weight_input", not inverse), type=kind, randomize=True)}
    stored = {"v_input.weight": held.to(torch.bfloat16), "v_input.perm": ORDER}
    write = rotated(turn.T if inverse else turn, stored=stored)
    check_logits(write_quantized(tmp_path / "m", described(groups), write))


def test_matrix_of_a_whole_input(tmp_path: Path) -> None:
    """Without `head_dim`, linears with inputs of 128 and 256 have a matrix each."""
    groups = {"v": scheme(*ONLINE, head_dim=None)}
    sizes = {size: sylvester(size) * size**-0.5 for size in (128, 256)}

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        return rotated(sizes[weight.shape[1]])(module, weight)

    written = write_quantized(tmp_path / "m", described(groups), write)
    checkpoint = written.request().checkpoint
    names = {str(recipe.attr("format")) for recipe in checkpoint.logical.recipes.values()}
    assert names == {"i8/1x*:f32/rotated_in=128", "i8/1x*:f32/rotated_in=256"}
    for name, recipe in checkpoint.logical.recipes.items():
        found, wanted = recipe.execute(checkpoint.read), written.floats[name]
        assert torch.allclose(found, wanted, atol=1e-6), f"{name}: only 1 / sqrt(128) is rounded"


def test_any_matrix(tmp_path: Path) -> None:
    """The inverse of a "random-matrix" is stored as it is, and is not scaled."""
    turn = (sylvester(16) + torch.eye(16)) / 4
    groups = {"v": scheme(("input", True), ("weight_input", False), type="random-matrix")}
    write = rotated(turn, stored={"v_input.weight": turn})
    check_logits(write_quantized(tmp_path / "m", described(groups), write))


def test_activations_are_rounded_after_the_rotation(tmp_path: Path) -> None:
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    written = write_quantized(tmp_path / "m", described({"v": scheme(*ONLINE)}, inputs), rotated(H16))

    def rounds(module: str, x: torch.Tensor) -> torch.Tensor:
        turn = blocks(H16, x.shape[-1])
        scale = (x @ turn).abs().amax(-1, keepdim=True) / 127
        return (x @ turn / scale).round().clamp(-127, 127) * scale @ turn.T

    program = check_logits(written, rounds)
    assert formats_of(program) == {"i8/1x*:f32/rotated_in=16/x=i8:*"}


def test_a_weight_of_floats_and_a_bias(tmp_path: Path) -> None:
    """The matrices of a linear that is not quantized are multiplied into its weight. A bias is rotated, too."""
    groups = {"v": scheme(*ONLINE), "u": scheme(("weight_output", False), ("output", True))}
    groups["u"]["apply"][1]["targets"] = ["re:.*(o_proj|up_proj)$"]
    left = blocks(H16.T, 128)

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        turned = module.endswith(("o_proj", "up_proj"))
        if not module.endswith("o_proj"):
            return rotated(H16, H16.T if turned else None)(module, weight)
        # Multiples of 1/256, so that sums are exact.
        stored = weight.mul(256).round().div(256)
        meant = (left.T @ stored.double() @ blocks(H16, 128).T).float()
        bias = torch.arange(128) / 64 - 1
        return {"weight": stored, "bias": bias}, meant

    written = write_quantized(tmp_path / "m", described(groups), write)
    checkpoint = written.request().checkpoint
    name = "model.layers.0.self_attn.o_proj"
    for part, wanted in (
        ("weight", written.floats[f"{name}.weight"]),
        ("bias", ((torch.arange(128) / 64 - 1).double() @ left).float()),
    ):
        found = checkpoint.logical.recipes[f"{name}.{part}"].execute(checkpoint.read)
        assert torch.equal(found, wanted)


def test_a_compile_keeps_its_contracts_and_serves(tmp_path: Path) -> None:
    """With rotations on both sides and rounded activations: in float64, the passes change nothing else."""
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    groups = {"v": scheme(*ONLINE), "u": scheme(("weight_output", False), ("output", True))}
    written = write_quantized(tmp_path / "m", described(groups, inputs), rotated(H16, H16.T))
    report = compile_model(written.folder, tmp_path / "m.ingot", check_numerics=True, **LIMIT_OPTIONS)
    assert report.numerics is not None
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (output,) = LLM(tmp_path / "m.ingot").generate([{"prompt_token_ids": [5, 17, 3, 60]}], greedy)
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "butterfly"}, "'type' of the quantization is 'butterfly'"),
        ({"requires_grad": True}, "'requires_grad' of the quantization is True"),
        ({"head_dim": -1}, "'head_dim' of the quantization is -1"),
        ({"speed": 1}, "not understood: speed"),
        ({"apply": [{"targets": ["Linear"], "location": "q_attn"}]}, "'location' of the quantization is 'q_attn'"),
        ({"apply": [{"targets": ["Linear"], "location": "k_cache"}]}, "'location' of the quantization is 'k_cache'"),
        ({"apply": [{"targets": ["Linear"], "location": "input", "twice": 1}]}, "not understood: twice"),
        ({"apply": ["input"]}, "'apply' of the quantization has 'input'"),
    ],
)
def test_fields(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    written = write_quantized(tmp_path / "m", described({"v": {**scheme(*ONLINE), **changes}}), rotated(H16))
    with pytest.raises(ConfigError, match=message):
        written.request()


def _without_matrix(written: Written) -> None:
    written.rewrite(lambda tensors: None, transform_config={"config_groups": {"v": scheme(*ONLINE, randomize=True)}})


def _of_another_size(written: Written) -> None:
    written.rewrite(lambda tensors: None, transform_config={"config_groups": {"v": scheme(*ONLINE, head_dim=48)}})


def _twice(written: Written) -> None:
    groups = {"v": scheme(*ONLINE), "w": scheme(*ONLINE)}
    written.rewrite(lambda tensors: None, transform_config={"config_groups": groups})


def _two_matrices(written: Written) -> None:
    def edit(tensors: Tensors) -> None:
        for name, factor in (("up", 1), ("down", -1)):
            tensors[f"model.layers.0.mlp.{name}_proj.v_input.weight"] = sylvester(16) * factor

    written.rewrite(edit)


def _the_head(written: Written) -> None:
    made = scheme(*ONLINE)
    made["apply"][0]["ignore"] = []

    def edit(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]

    written.rewrite(edit, transform_config={"config_groups": {"v": made}})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_matrix, "has no matrix of 16 x 16 of the transform v"),
        (_of_another_size, "(128|256) inputs of .* are no multiple of 48"),
        (_twice, "two transforms rotate the input of"),
        (_two_matrices, "may share .*, which differ"),
        (_the_head, "rotates lm_head, which has no weight of its own"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, damage: Any, message: str) -> None:
    written = write_quantized(tmp_path / "m", described({"v": scheme(*ONLINE)}), rotated(H16))
    damage(written)
    with pytest.raises(CheckpointError, match=message):
        written.request()


@pytest.mark.parametrize("kind", ["hadamard", "random-hadamard"])
@pytest.mark.parametrize("permuted", [False, True])
def test_the_library_computes_the_same(kind: str, permuted: bool) -> None:
    """A linear with the library's transforms on both sides, and the weight that is read of what it stores."""
    transform = pytest.importorskip("compressed_tensors.transform")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48))
    groups = {
        "v": scheme(*ONLINE, type=kind, randomize=permuted, precision="torch.float64"),
        "u": scheme(
            ("weight_output", False), ("output", True), type=kind, randomize=permuted, precision="torch.float64"
        ),
    }
    made = transform.TransformConfig.model_validate({"config_groups": groups})
    x = torch.randn(5, 64)
    exact = model(x)
    transform.apply_transform_config(model, made)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    assert "0.v_input.weight" in tensors and "0.u_output.weight" in tensors
    infos = {
        name: TensorInfo(name, tensor.dtype, tuple(tensor.shape), Path("model.safetensors"), 0, 0)
        for name, tensor in tensors.items()
    }
    rotations = read_rotations(Fields(made.model_dump(mode="json"), "config.json"))
    logical = with_rotations(Stored(infos, tensors.__getitem__, "m"), {}, rotations)
    assert set(logical.tensors) == {"0.weight", "0.bias"}
    weight, bias = (logical.recipes[f"0.{part}"].execute(tensors.__getitem__) for part in ("weight", "bias"))
    found = torch.nn.functional.linear(x, weight, bias)
    assert torch.allclose(found, model(x), atol=1e-5) and torch.allclose(found, exact, atol=1e-5)
