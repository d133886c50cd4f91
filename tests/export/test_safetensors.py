"""The export to safetensors: merged, quantized and sharded weights with a manifest, also of an artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import in_one_of
from exported_model import decode, export_onnx_of
from quantized_files import MODEL
from safetensors.torch import load_file

from ingot import compile_model
from ingot.export.export import export_model
from ingot.ir.errors import CheckpointError, OptionError
from ingot.ir.formats import dequantize, find_format

SMALL = {"target": "cpu", "backend": "reference", "max_seq_len": 96}


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    manifest = json.loads((folder / "weights.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("weights/*.safetensors")):
        tensors |= load_file(path)
    return manifest, tensors


def test_weights_are_merged_and_their_origins_are_told(tmp_path: Path) -> None:
    checkpoint = MODEL.write(tmp_path / "ck")
    export_model(checkpoint, tmp_path / "out", to="safetensors")
    manifest, tensors = read(tmp_path / "out")
    source = load_file(checkpoint / "model.safetensors")
    layer = "model.layers.0.self_attn"
    (merged,) = [name for name, one in manifest.items() if f"{layer}.q_proj.weight" in one["from"]]
    assert set(manifest[merged]["from"]) == {f"{layer}.{part}_proj.weight" for part in "qkv"}
    expected = torch.cat([source[f"{layer}.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(tensors[merged], expected)
    assert manifest[merged]["shape"] == list(expected.shape) and manifest[merged]["dtype"] == "f32"
    assert {name for one in manifest.values() for name in one["from"]} == set(source)
    assert not any("format" in one for one in manifest.values())


def test_parts_of_quantized_weights_have_their_format(tmp_path: Path) -> None:
    checkpoint = MODEL.write(tmp_path / "ck")
    export_model(checkpoint, tmp_path / "out", to="safetensors", quantize="int4_g32_asym")
    manifest, tensors = read(tmp_path / "out")
    source = load_file(checkpoint / "model.safetensors")
    down = "model.layers.0.mlp.down_proj.weight"
    parts = {one["part"]: name for name, one in manifest.items() if down in one["from"]}
    assert parts.keys() == {"weight", "scales", "zeros"}
    assert {manifest[name]["format"] for name in parts.values()} == {"int4_g32_asym"}
    decoded = dequantize({part: tensors[name] for part, name in parts.items()}, find_format("int4_g32_asym"))
    step = tensors[parts["scales"]].repeat_interleave(32, 1)
    assert bool(((decoded - source[down]).abs() <= 0.5001 * step).all())


def test_ranks_have_their_parts(tmp_path: Path) -> None:
    checkpoint = MODEL.write(tmp_path / "ck")
    export_model(checkpoint, tmp_path / "out", to="safetensors", mesh={"tp": 2})
    manifest = json.loads((tmp_path / "out" / "weights.json").read_text())
    source = load_file(checkpoint / "model.safetensors")
    down = "model.layers.0.mlp.down_proj.weight"
    (name,) = [name for name, one in manifest.items() if one["from"] == [down]]
    ranks = [load_file(tmp_path / "out" / place["file"])[name] for place in manifest[name]["parts"]]
    assert torch.equal(torch.cat(ranks, 1), source[down]) and ranks[0].shape[1] * 2 == source[down].shape[1]


@in_one_of(3)
def test_an_artifact_is_exported_like_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    checkpoint, artifact = MODEL.write(tmp_path / "ck"), tmp_path / "model.ingot"
    compile_model(checkpoint, artifact, quantize="int4_g32", **SMALL)
    export_model(artifact, tmp_path / "a", to="onnx")
    other = export_onnx_of(checkpoint, tmp_path / "b", quantize="int4_g32", max_seq_len=96)
    for name in ("model.onnx", "model.onnx.data", "genai_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert decode(tmp_path / "a", [5, 17], 2)[0] == decode(other.folder, [5, 17], 2)[0]
    with pytest.raises(OptionError, match="--quantize with an artifact"):
        export_model(artifact, tmp_path / "c", to="onnx", quantize="int8")
    checkpoint.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="is not there"):
        export_model(artifact, tmp_path / "c", to="safetensors")
    export_model(artifact, tmp_path / "c", to="safetensors", checkpoint=tmp_path / "moved")
    manifest, tensors = read(tmp_path / "c")
    written = json.loads((artifact / "weights.json").read_text())
    shared = [name for name, one in manifest.items() if one.get("part") == "scales" and name in written]
    assert shared
    for name in shared:
        stored = load_file(artifact / written[name]["file"])[name]
        assert torch.equal(stored.flatten().sort().values, tensors[name].flatten().sort().values)


@pytest.mark.slow
def test_calibrated_weights_keep_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQ depends on activations: a float32 export of a bfloat16 artifact must not quantize again in float32."""
    from calibrated_model import write_model, write_text

    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    checkpoint, text = write_model(tmp_path / "ck", torch_dtype="bfloat16"), write_text(tmp_path / "text.txt")
    artifact = tmp_path / "model.ingot"
    compile_model(checkpoint, artifact, quantize="int4_g32", calibrate=text, **SMALL)
    export_model(artifact, tmp_path / "bf16", to="safetensors")
    _, tensors = read(tmp_path / "bf16")
    export_model(artifact, tmp_path / "onnx", to="onnx")
    import onnx
    from onnx import numpy_helper

    model = onnx.load(str(tmp_path / "onnx" / "model.onnx"))
    codes = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer if one.name.endswith(".codes")}
    compared = 0
    for name, array in codes.items():
        stored = tensors.get(name.removesuffix(".codes"))
        if stored is not None:
            assert torch.equal(stored.flatten(), torch.from_numpy(array.copy()).flatten()), name
            compared += 1
    assert compared
