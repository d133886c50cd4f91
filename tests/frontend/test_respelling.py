"""Names of tensors with other prefixes than the definition's: read where all of them fit in one way, named else."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TINY

from ingot.compile.request import Request
from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.respelling import Respelling, find_respelling, nearest_respelling
from ingot.ir.errors import CheckpointError
from ingot.ir.numerics.harness import load_params

TENSORS = "model.safetensors"
NEEDED = ("model.embed.weight", "model.layers.0.q.weight", "model.layers.1.q.weight", "lm_head.weight")


def spelled_by(name: str, rename: Callable[[str], str], folder: Path, **more: torch.Tensor) -> Path:
    """A tiny checkpoint with other names of its tensors, and more tensors."""
    tensors = load_file(TINY[name].write(folder) / TENSORS)
    save_file({**{rename(key): tensor for key, tensor in tensors.items()}, **more}, folder / TENSORS)
    return folder


def params(folder: Path) -> dict[str, torch.Tensor]:
    program = Request.read(folder, backend="reference").trace().entries["main"]
    return load_params(program.params, Checkpoint.open(folder).read)


def inside(name: str) -> str:
    return re.sub(r"(layers\.\d+)\.", r"\1._fsdp_wrapped_module._checkpoint_wrapped_module.", name)


WAYS: dict[str, tuple[Callable[[str], str], str]] = {
    "compiled": (lambda name: f"_orig_mod.{name}", "'_orig_mod.' is omitted"),
    "parallel": (lambda name: f"module.{name}", "'module.' is omitted"),
    "both": (lambda name: f"module._orig_mod.{name}", "'module._orig_mod.' is omitted"),
    "bare": (lambda name: name.removeprefix("model."), "'model.' is added"),
    "part": (lambda name: f"language_model.{name}", "'language_model.' is omitted"),
    "newer part": (
        lambda name: name.replace("model.", "model.language_model.", 1),
        "'language_model.' is omitted",
    ),
    "another body": (lambda name: name.replace("model.", "transformer.", 1), "'transformer.' is 'model.'"),
    "layers wrapped": (inside, "'_checkpoint_wrapped_module.' is omitted, '_fsdp_wrapped_module.' is omitted"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_in_another_spelling_is_the_same_model(way: str, tmp_path: Path) -> None:
    rename, text = WAYS[way]
    plain = params(TINY["llama-plain"].write(tmp_path / "plain"))
    folder = spelled_by("llama-plain", rename, tmp_path / "other")
    other = params(folder)
    assert plain.keys() == other.keys() and all(torch.equal(plain[name], other[name]) for name in plain)
    assert text == str(Respelling.of(Request.read(folder, backend="reference").trace().respelled))


def test_tensors_that_nothing_reads_are_known_in_every_spelling(tmp_path: Path) -> None:
    frequencies = {f"module.model.layers.{index}.self_attn.rotary_emb.inv_freq": torch.ones(7) for index in range(3)}
    params(spelled_by("llama-plain", lambda name: f"module.{name}", tmp_path / "a", **frequencies))
    copy = {"_orig_mod.lm_head.weight": torch.ones(2)}
    params(spelled_by("qwen3-plain", lambda name: f"_orig_mod.{name}", tmp_path / "b", **copy))
    masks = {f"_orig_mod.h.{index}.attn.bias": torch.ones(1, 1, 4, 4) for index in range(2)}
    gpt2 = spelled_by(
        "gpt2-tied", lambda name: "_orig_mod." + name.removeprefix("transformer."), tmp_path / "c", **masks
    )
    params(gpt2)


@pytest.mark.parametrize(
    ("rename", "more", "told"),
    [
        # One tensor of twenty-nine is elsewhere, missing, or there twice.
        (
            lambda name: f"module.{name}" if "layers.1.mlp.up" not in name else name,
            {},
            r"if 'module\.' is omitted, 29 of 30 tensors are found, otherwise 1",
        ),
        (
            lambda name: f"module.{name}" if "layers.1.mlp.up" not in name else "module.elsewhere",
            {},
            "29 of 30 tensors are found, otherwise 0",
        ),
        (lambda name: f"module.{name}", {"model.norm.weight": torch.ones(75)}, "29 of 30 tensors are found"),
        # All fit, and something is left over.
        (
            lambda name: f"module.{name}",
            {"module.vision.weight": torch.ones(3)},
            r"1 extra(.|\n)*module\.vision\.weight",
        ),
    ],
    ids=["mixed", "missing", "twice", "extra"],
)
def test_names_that_do_not_fit_as_a_whole_are_refused(
    rename: Callable[[str], str], more: dict[str, torch.Tensor], told: str, tmp_path: Path
) -> None:
    folder = spelled_by("llama-plain", rename, tmp_path / "a", **more)
    with pytest.raises(CheckpointError, match=told):
        Request.read(folder, backend="reference").trace()


def test_a_checkpoint_of_the_right_names_is_not_respelled() -> None:
    stored = [*NEEDED, *(f"module.{name}" for name in NEEDED)]
    assert find_respelling(NEEDED, stored).names == {}
    assert nearest_respelling(NEEDED, NEEDED[:3]) == ""


def test_a_word_that_is_no_prefix_is_not_left_out() -> None:
    assert find_respelling(NEEDED, [f"decoder.{name}" for name in NEEDED]).names == {}
    assert nearest_respelling(NEEDED, [f"decoder.{name}" for name in NEEDED]) == ""
    lacking = [name.removeprefix("model.") for name in ("model.w", "model.v")]
    needed = ("backbone.w", "backbone.v")
    assert find_respelling(needed, lacking).names == {}
    assert find_respelling(needed, lacking, "backbone.").names == {"backbone.w": "w", "backbone.v": "v"}


def test_names_that_differ_by_prefix_alone_are_not_mistaken() -> None:
    needed = ("model.w", "language_model.w")
    assert find_respelling(needed, ("module.model.w", "module.language_model.w")).names == {}
