"""Checkpoints of architectures without a definition: the error names what would fit, and no code of theirs is run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TINY

from ingot.compile.request import Request
from ingot.frontend.unsupported import name_code
from ingot.ir.errors import ConfigError
from ingot.models.architectures import ARCHITECTURES

CODE = {"AutoConfig": "configuration_my.MyConfig", "AutoModelForCausalLM": "org/other--modeling_my.MyForCausalLM"}


def write(folder: Path, name: str, **changes: Any) -> Path:
    """A tiny checkpoint, as one whose authors call it "MyForCausalLM"."""
    return TINY[name].write(folder, **{"architectures": ["MyForCausalLM"], "model_type": "mine", **changes})


def refusal(folder: Path) -> ConfigError:
    with pytest.raises(ConfigError, match="architecture 'MyForCausalLM' is not supported") as caught:
        Request.read(folder, backend="reference")
    return caught.value


def test_a_llama_of_another_name_is_named_and_not_taken(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", "llama-plain")
    hint = refusal(folder).hint
    assert "the configuration and all 30 tensors, by name and shape, fit LlamaForCausalLM, " in hint
    assert "does not assume that it is the same" in hint and 'write "architectures": ["LlamaForCausalLM"]' in hint


def test_what_it_says_to_write_is_taken(tmp_path: Path) -> None:
    """Of the families of the same tensors, the one that the model_type says, or else Llama."""
    for model_type, expected in (("llama", "LlamaForCausalLM"), ("mistral", "MistralForCausalLM")):
        folder = write(tmp_path / model_type, "llama-plain", model_type=model_type)
        hint = refusal(folder).hint
        assert hint.count(f'write "architectures": ["{expected}"] into config.json') == 1
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [expected]}))
        Request.read(folder, backend="reference").trace()


@pytest.mark.parametrize("name", ["qwen3-plain", "gemma2-capped", "gpt2-learned", "phi3-short", "olmo2-biased"])
def test_other_families_are_found_too(name: str, tmp_path: Path) -> None:
    mine = TINY[name].config["architectures"][0]
    hint = refusal(write(tmp_path / name, name, model_type=TINY[name].family)).hint
    assert f'write "architectures": ["{mine}"]' in hint


def test_tensors_of_another_spelling_fit(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", "llama-plain")
    file = folder / "model.safetensors"
    save_file({f"module.{name}": tensor for name, tensor in load_file(file).items()}, file)
    assert "fit LlamaForCausalLM" in refusal(folder).hint


def test_a_model_of_one_tensor_more_is_named_by_its_name_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", "llama-plain", model_type="llama")
    file = folder / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.self_attn.gate.weight": torch.ones(3)}, file)
    assert refusal(folder).hint.startswith("the nearest supported one is ")


def test_a_field_with_a_meaning_of_its_own_fits_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", "llama-plain", model_type="llama", clip_qkv=8.0)
    assert refusal(folder).hint.startswith("the nearest supported one is ")


def test_without_tensors_the_model_type_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", "llama-plain", model_type="llama")
    (folder / "model.safetensors").unlink()
    hint = refusal(folder).hint
    assert "'LlamaForCausalLM' has its model_type 'llama'" in hint
    (folder / "config.json").write_text(json.dumps({"architectures": ["MyForCausalLM"], "model_type": "llama"}))
    assert refusal(folder).hint.startswith("the nearest supported one is ")


def test_code_that_comes_with_it_is_named_and_not_run(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", "llama-plain", auto_map=CODE)
    for name in ("configuration_my", "modeling_my"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported')")
    error = refusal(folder)
    assert error.hint.startswith(
        "the checkpoint has its own code (configuration_my.py, modeling_my.py), which Ingot does not run"
    )
    assert "fit LlamaForCausalLM" in error.hint and error.expected == ", ".join(ARCHITECTURES)


def test_code_beside_a_supported_architecture_is_a_note(tmp_path: Path) -> None:
    folder = TINY["llama-plain"].write(tmp_path / "a", auto_map=CODE, remark="mine", lora_alpha=16)
    file = folder / "model.safetensors"
    save_file({f"_orig_mod.{name}": tensor for name, tensor in load_file(file).items()}, file)
    request = Request.read(folder, backend="reference")
    assert request.notes(request.trace()) == (
        "fields of config.json that no definition knows, and that are not read: lora_alpha, remark",
        "code that the checkpoint brings, and that is not run: configuration_my.py, modeling_my.py",
        "names of tensors in which '_orig_mod.' is omitted",
    )
    plain = Request.read(TINY["llama-plain"].write(tmp_path / "b"), backend="reference")
    assert plain.notes(plain.trace()) == ()


@pytest.mark.parametrize("code", [None, {}, [], "x", {"AutoModel": 3}, {"AutoModel": "Model"}])
def test_an_auto_map_that_names_no_file(code: object) -> None:
    assert name_code({"auto_map": code}) == ""
