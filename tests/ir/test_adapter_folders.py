"""Reading PEFT folders: what is read, and what is refused by name."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_folder import write_adapter
from run_seed import again, run_seed
from safetensors.torch import load_file, save_file

from ingot.ir.adapters.config import read_lora_config
from ingot.ir.adapters.folder import read_adapter
from ingot.ir.adapters.names import match_modules
from ingot.ir.errors import AdapterError, IngotError

Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
MODULES = {Q: (8, 6), V: (4, 6)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", MODULES)


def change(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def config(**fields: Any) -> Any:
    return read_lora_config(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16, **fields}).encode(), "here")


def test_a_folder_is_read(folder: Path) -> None:
    adapter = read_adapter(folder)
    assert adapter.modules.keys() == MODULES.keys() and adapter.rank == 4 and not adapter.transposed
    one = adapter.modules[Q]
    assert (one.a.shape, one.b.shape, one.scale) == ((4, 6), (8, 4), 2.0)
    before = adapter.digest
    change(folder, lora_alpha=9)
    assert read_adapter(folder).digest != before


def test_scales_are_those_of_peft() -> None:
    assert config().scale_of(Q) == 2.0
    assert config(use_rslora=True, r=16).scale_of(Q) == 4.0
    some = config(rank_pattern={"q_proj": 4, "layers.1.self_attn.v_proj": 2}, alpha_pattern={r"^model.*v_proj": 6})
    assert (some.rank_of(Q), some.scale_of(Q)) == (4, 4.0)
    assert (some.rank_of(V), some.scale_of(V)) == (2, 3.0)
    assert some.rank_of(V.replace("layers.1", "layers.11")) == 8
    assert some.rank_of("model.layers.0.self_attn.xq_proj") == 8  # a pattern matches whole words


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"r": 0}, "r is 0"),
        ({"r": 1 << 20}, "r is 1048576"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
        ({"lora_alpha": 1e300}, "lora_alpha is 1e+300"),
        ({"rank_pattern": {"(a+)+$": 4}}, "too complex"),
        ({"rank_pattern": {"(": 4}}, "malformed"),
        ({"rank_pattern": [4]}, "rank_pattern is [4]"),
        ({"alpha_pattern": {"q_proj": True}}, "alpha_pattern of q_proj is True"),
        ({"target_modules": [1]}, "target_modules is [1]"),
        ({"layers_to_transform": ["a"]}, "layers_to_transform"),
        ({"fan_in_fan_out": "yes"}, "fan_in_fan_out is 'yes'"),
        ({"tomorrow": 1}, "'tomorrow' is not known"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(AdapterError) as caught:
        config(**fields)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"base_model.model.{Q}.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embedding"),
        ("base_model.model.lm_head.modules_to_save.weight", "modules_to_save"),
        (f"base_model.model.{Q}.lora_B.bias", "a bias"),
        (f"base_model.model.{Q}.weight", "no factor"),
    ],
)
def test_other_tensors_are_refused_by_name(folder: Path, name: str, said: str) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), name: torch.ones(2, 2)}, file)
    with pytest.raises(AdapterError, match=said):
        read_adapter(folder)


def test_ranks_and_modules_must_agree_with_the_configuration(folder: Path) -> None:
    for fields, said in (
        ({"r": 8}, "ranks of lora_A and lora_B"),
        ({"r": 4, "target_modules": ["q_proj"]}, "target_modules has only q_proj"),
        ({"target_modules": "all-linear", "layers_to_transform": [0]}, "lacks layer 1"),
    ):
        change(folder, **fields)
        with pytest.raises(AdapterError, match=said):
            read_adapter(folder)


def test_links_and_pickles_are_refused(folder: Path, tmp_path: Path) -> None:
    file = folder / "adapter_model.safetensors"
    moved = file.rename(tmp_path / "elsewhere.safetensors")
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(AdapterError, match="pickle"):
        read_adapter(folder)
    file.symlink_to(moved)
    with pytest.raises(AdapterError, match="is a link"):
        read_adapter(folder)
    file.unlink()
    file.mkdir()
    with pytest.raises(AdapterError, match="is no regular file"):
        read_adapter(folder)
    with pytest.raises(AdapterError, match="there is no folder"):
        read_adapter(tmp_path / "nowhere")


def test_values_that_are_not_finite_are_refused(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"base_model.model.{V}.lora_B.weight"][1, 1] = float("nan")
    save_file(tensors, file)
    with pytest.raises(AdapterError, match="not finite"):
        read_adapter(folder)


def test_damaged_folders_end_in_an_error(folder: Path) -> None:
    draw = random.Random(run_seed())
    whole = {name: (folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    for number in range(150):
        name = draw.choice(list(whole))
        data = bytearray(whole[name])
        for _ in range(draw.randint(1, 4)):
            match draw.randrange(3):
                case 0:
                    del data[draw.randrange(len(data) + 1) :]
                case 1:
                    place = draw.randrange(len(data) + 1)
                    data[place:place] = draw.randbytes(draw.randint(1, 9))
                case _ if data:
                    data[draw.randrange(min(len(data), 400))] = draw.randrange(256)
        (folder / name).write_bytes(bytes(data))
        try:
            read_adapter(folder)
        except IngotError as error:
            assert error.exit_code == 2, again(number)
        (folder / name).write_bytes(whole[name])
    read_adapter(folder)


def test_names_match_with_other_leading_words(folder: Path) -> None:
    adapter = read_adapter(folder)
    for prefix in ("", "model.", "language_model.model."):
        shapes = {
            f"{prefix}layers.{number}.self_attn.{end}.weight": shape
            for number, end, shape in ((0, "q_proj", (8, 6)), (1, "v_proj", (4, 6)))
        }
        assert match_modules(adapter, shapes).keys() == shapes.keys()
    with pytest.raises(AdapterError, match="does not compute as a linear"):
        match_modules(adapter, {"vision.encoder.layers.0.self_attn.q_proj.weight": (8, 6)})
    with pytest.raises(AdapterError, match=r"make a matrix \[8, 6\]"):
        match_modules(adapter, {f"{Q}.weight": (8, 7), f"{V}.weight": (4, 6)})
