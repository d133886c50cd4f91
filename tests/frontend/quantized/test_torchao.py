"""TorchAO checkpoints in safetensors: quantized and flattened by the library."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import MODEL, Round, Written, check_logits, formats_of
from safetensors.torch import load_file, save_file

from ingot.ir.errors import CheckpointError, ConfigError

UP = "model.layers.0.mlp.up_proj"
DESCRIBED = {"quant_method": "torchao", "quant_type": {"default": {}}, "modules_to_not_convert": ["lm_head"]}


def write(folder: Path, config: Callable[[Any], Any], edit: Callable[[dict[str, str]], None] | None = None) -> Written:
    """Quantize every linear but the head by the library."""
    quantization = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    MODEL.write(folder, quantization_config=DESCRIBED)
    state, floats = load_file(folder / "model.safetensors"), {}
    for name, tensor in state.items():
        floats[name] = tensor
        if tensor.dim() == 2 and "embed" not in name and "head" not in name:
            linear = torch.nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
            linear.weight = torch.nn.Parameter(tensor, requires_grad=False)
            quantization.quantize_(linear, config(quantization))
            state[name] = linear.weight.data
            floats[name] = linear.weight.dequantize().float()
    tensors, metadata = support.flatten_tensor_state_dict(state)
    if edit is not None:
        edit(metadata)
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    return Written(folder, floats)


def int8_rows(_: str, x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


CASES: dict[str, tuple[Callable[[Any], Any], Round | None, str]] = {
    "float8": (lambda q: q.Float8WeightOnlyConfig(), None, "f8e4m3/1x*:f32"),
    "int8": (lambda q: q.Int8WeightOnlyConfig(version=2), None, "int8"),
    "int8 activations": (lambda q: q.Int8DynamicActivationInt8WeightConfig(version=2), int8_rows, "int8_w8a8"),
    "int4 groups": (
        lambda q: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=q.PerGroup(32)),
        None,
        "int4_g32",
    ),
    "int4 asymmetric": (
        lambda q: q.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=q.PerGroup(32), mapping_type=q.MappingType.ASYMMETRIC
        ),
        None,
        "int4_g32_asym",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_by_the_library(tmp_path: Path, name: str) -> None:
    config, rounds, format = CASES[name]
    assert formats_of(check_logits(write(tmp_path / "m", config), rounds)) == {format}


def _change(**fields: Any) -> Callable[[dict[str, str]], None]:
    def edit(metadata: dict[str, str]) -> None:
        found = json.loads(metadata[f"{UP}.weight"])
        data = {**found["_data"], **fields.pop("_data", {})}
        metadata[f"{UP}.weight"] = json.dumps({**found, "_data": data, **fields})

    return edit


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (_change(_type="Int4TilePackedTo4dTensor"), "is a Int4TilePackedTo4dTensor, which cannot be read"),
        (_change(_tensor_data_names=["qdata", "act_pre_scale"]), "has the part act_pre_scale"),
        (_change(_data={"rank": 3}), "not understood: rank"),
        (_change(_data={"block_size": [2, 32]}), "has blocks [2, 32]"),
        (lambda metadata: metadata.pop(f"{UP}.weight"), "the metadata does not describe"),
    ],
)
def test_what_is_not_understood(tmp_path: Path, edit: Any, problem: str) -> None:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        write(tmp_path / "m", lambda q: q.Int8WeightOnlyConfig(version=2), edit).request()
    assert problem in caught.value.what
