"""Compiles that must not succeed: bad checkpoints, places that cannot be written, and full disks.

Whatever happens, it ends in an IngotError that names the place, nothing is visible at the output, and the next compile
starts clean.
"""

import contextlib
import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn
from safetensors.torch import load_file, save_file
from tiny import TINY
from tiny_compile import compile_tiny

from ingot import LLM
from ingot.compile.cache import cache_root
from ingot.ir.errors import CheckpointError, ConfigError, IngotError, OptionError, OutputError

pytestmark = [pytest.mark.xdist_group("compile-faults"), pytest.mark.one_in_file(3)]


def refusal(kind: type[IngotError], checkpoint: Path, tmp_path: Path, **options: Any) -> str:
    """The message that a compile ends with; nothing may be left."""
    place = tmp_path / "place"
    place.mkdir(exist_ok=True)
    with pytest.raises(kind) as caught:
        compile_tiny(checkpoint, place / "a.ingot", **options)
    assert caught.value.exit_code == 2
    assert list(place.iterdir()) == []
    return str(caught.value)


@pytest.fixture
def copied(single: Path, tmp_path: Path) -> Path:
    """A checkpoint to be damaged: links to the files of `single`."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for file in single.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def put(folder: Path, name: str, data: bytes | str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


# --- config.json ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON: not UTF-8"),
        (b"[]", "a value of type list"),
        (b"null", "a value of type NoneType"),
        (b"{}", "field 'architectures' is None"),
        (b'{"architectures": "LlamaForCausalLM"}', "field 'architectures' is 'LlamaForCausalLM'"),
        (b'{"architectures": []}', "a list with one name"),
        (b'{"architectures": ["LlamaForCausalLM"]}', "field 'hidden_size' is missing"),
        (b'{"architectures": ["LamaForCausalLM"]}', "the nearest supported one is 'LlamaForCausalLM'"),
        (b'{"architectures": ["Qwen3NextForCausalLM"]}', "the nearest supported one is 'Qwen3ForCausalLM'"),
        (b'{"architectures": ["x"]}', "architecture 'x' is not supported"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_config_that_is_no_models(copied: Path, tmp_path: Path, data: bytes, message: str) -> None:
    put(copied, "config.json", data)
    assert message in refusal(ConfigError, copied, tmp_path)


def test_a_config_that_is_missing(copied: Path, tmp_path: Path) -> None:
    (copied / "config.json").unlink()
    text = refusal(ConfigError, copied, tmp_path)
    assert "no config.json" in text and "model.safetensors" in text


WRONG: dict[str, Any] = {
    "null": None,
    "text": "many",
    "negative": -1,
    "zero": 0,
    "fraction": 0.5,
    "true": True,
    "list": [3],
    "object": {"value": 3},
    "huge": 10**40,
    "-infinity": -float("inf"),
    "nan": float("nan"),
}
# What each kind of field takes of the above: any other must be a ConfigError that names the field.
TAKES = {
    "size": {"null"},
    "number": {"null", "fraction"},
    "flag": {"null", "true"},
    "name": {"null"},
    "ids": {"null", "zero", "list"},
    "unread": set(WRONG),
    "of others": {"null", "zero"},
}
KINDS = {
    "vocab_size": "size",
    "hidden_size": "size",
    "intermediate_size": "size",
    "num_hidden_layers": "size",
    "num_attention_heads": "size",
    "num_key_value_heads": "size",
    "head_dim": "size",
    "max_position_embeddings": "size",
    "rms_norm_eps": "number",
    "rope_theta": "number",
    "hidden_act": "name",
    "torch_dtype": "name",
    "dtype": "name",
    "tie_word_embeddings": "flag",
    "attention_bias": "flag",
    "mlp_bias": "flag",
    "use_sliding_window": "flag",
    "bos_token_id": "ids",
    "eos_token_id": "ids",
    "model_type": "unread",
    "transformers_version": "unread",
    "auto_map": "unread",
}
ROPE = {"rope_type": "name", "factor": "number", "low_freq_factor": "number", "high_freq_factor": "number"}
ROPE |= {"original_max_position_embeddings": "number", "rope_theta": "number", "partial_rotary_factor": "number"}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 907.0,
    "factor": 6.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 40,
}


def try_config(folder: Path, config: dict[str, Any], field: str, taken: bool, tmp_path: Path, case: str) -> None:
    put(folder, "config.json", json.dumps(config))
    output = tmp_path / "out" / "a.ingot"
    output.parent.mkdir(exist_ok=True)
    try:
        compile_tiny(folder, output, max_seq_len=None)
    except ConfigError as error:
        assert field in str(error), f"{case}: {error}"
        assert len(str(error)) < 1500
    except (CheckpointError, OptionError) as error:
        # A value that is legal by itself: it says that the model is another one than the tensors are of.
        assert taken, f"{case}: {error!r}"
    else:
        assert taken, f"{case} was taken"
        (tmp_path / "out" / "a.ingot").rename(tmp_path / f"made-{time.monotonic_ns()}")
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize(("field", "family"), drawn(len(KINDS) // 2, itertools.product(KINDS, ("llama", "qwen3"))))
def test_each_field_of_a_config_replaced_by_something_wrong(family: str, field: str, tmp_path: Path) -> None:
    name = {"llama": "llama-plain", "qwen3": "qwen3-plain"}[family]
    folder = TINY[name].write(tmp_path / "checkpoint", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    kind = "of others" if (family, field) in {("llama", "use_sliding_window"), ("qwen3", "mlp_bias")} else KINDS[field]
    config.pop({"rope_theta": "rope_parameters", "torch_dtype": "dtype"}.get(field, ""), None)  # the new spelling wins
    # One wrong value is enough where none is read.
    for case, wrong in WRONG.items() if kind != "unread" else [("object", WRONG["object"])]:
        try_config(folder, {**config, field: wrong}, field, case in TAKES[kind], tmp_path, f"{field}: {case}")


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_each_field_of_a_rope_table_replaced_by_something_wrong(single: Path, spelling: str, tmp_path: Path) -> None:
    folder = TINY["llama-plain"].write(tmp_path / "checkpoint", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.pop(name, None)
    for case, wrong in {**WRONG, "unknown": "spiral"}.items():
        if case not in ("null", "object", "unknown"):
            try_config(folder, {**config, spelling: wrong}, spelling, False, tmp_path, f"{spelling}: {case}")
        for field, kind in ROPE.items():
            if case != "null" and case != "fraction":
                table = {**SCALED, field: wrong}
                taken = case in TAKES[kind] or (field == "rope_type" and case == "zero")
                named = spelling if case == "object" else field
                try_config(folder, {**config, spelling: table}, named, taken, tmp_path, f"{field}: {case}")


def test_code_that_a_config_names_is_never_imported(copied: Path, tmp_path: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    put(copied, "config.json", json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    put(copied, "evil.py", "raise SystemExit('imported')")
    compile_tiny(copied, tmp_path / "a.ingot")


# --- tensors --------------------------------------------------------------------------------------------------------


def test_all_that_is_wrong_with_the_tensors_is_listed_at_once(copied: Path, tmp_path: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(2, 2)
    tensors["surprise"] = torch.zeros(3)
    shape = list(tensors["model.embed_tokens.weight"].shape)
    tensors["model.embed_tokens.weight"] = torch.zeros(shape[0] + 1, shape[1])
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    (copied / "model.safetensors").unlink()
    save_file(tensors, copied / "model.safetensors")
    text = refusal(CheckpointError, copied, tmp_path)
    for part in (
        "2 missing",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "2 extra",
        "model.layers.1.mlp.up_proj.weight",
        "surprise [3]",
        f"model.embed_tokens.weight: expected {shape}, found {[shape[0] + 1, shape[1]]}",
        f"{name}: found int8",
        str(copied),
    ):
        assert part in text, part


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_pickles_are_refused_and_not_opened(copied: Path, tmp_path: Path, name: str) -> None:
    (copied / "model.safetensors").unlink()
    put(copied, name, b"\x80\x04not to be read")
    text = refusal(CheckpointError, copied, tmp_path)
    assert name in text and "safetensors" in text and "convert" in text
    assert "pickle" in refusal(CheckpointError, copied / name, tmp_path)


def test_tensor_files_that_are_cut_short_or_damaged(copied: Path, single: Path, tmp_path: Path) -> None:
    data = (single / "model.safetensors").read_bytes()
    for length in sorted({*range(0, 64, 8), *range(0, len(data), len(data) // 42), len(data) - 1}):
        put(copied, "model.safetensors", data[:length])
        assert "model.safetensors" in refusal(CheckpointError, copied, tmp_path)
    for place, byte in ((0, 0xFF), (7, 0x7F), (8, ord("[")), (20, 0)):
        put(copied, "model.safetensors", data[:place] + bytes([byte]) + data[place + 1 :])
        refusal(CheckpointError, copied, tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_tokenizer_files_that_are_damaged_are_refused_by_whoever_reads_them(
    copied: Path, tmp_path: Path, name: str
) -> None:
    put(copied, name, b"{")
    with contextlib.suppress(IngotError):
        compile_tiny(copied, tmp_path / "a.ingot")
        LLM(tmp_path / "a.ingot").generate([[1]])


# --- the output -----------------------------------------------------------------------------------------------------


def test_outputs_that_cannot_be_made(single: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for output, message in (
        ("file", "exists already"),
        ("folder", "exists already"),
        ("link", "exists already"),
        ("absent/a.ingot", "there is no folder"),
        ("file/a.ingot", "there is no folder"),
        ("x" * 300, "cannot be written"),
        ("/proc/a.ingot", "not writable|cannot be written"),
    ):
        with pytest.raises(OutputError, match=message) as caught:
            compile_tiny(single, tmp_path / output)
        assert caught.value.exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_folder_that_is_not_writable(single: Path, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir(mode=0o500)
    with pytest.raises(OutputError, match="not writable"):
        compile_tiny(single, tmp_path / "place" / "a.ingot")


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of `size` bytes; skips where none may be mounted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("part", [0.1, 0.6, 0.9])
def test_a_disk_that_is_too_small_for_the_artifact(single: Path, tmp_path: Path, part: float) -> None:
    compile_tiny(single, tmp_path / "whole.ingot")
    needed = sum(file.stat().st_size for file in (tmp_path / "whole.ingot").rglob("*") if file.is_file())
    with small_disk(tmp_path / "disk", int(needed * part)) as disk:
        with pytest.raises(OutputError, match="the disk is full") as caught:
            compile_tiny(single, disk / "a.ingot")
        assert str(disk) in str(caught.value)
        assert list(disk.iterdir()) == []


@pytest.mark.slow  # half a minute: with an empty cache all is built before the disk is full
def test_a_disk_that_is_too_small_for_the_cache(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        monkeypatch.setenv("INGOT_CACHE", str(disk / "cache"))
        assert str(disk / "cache") in refusal(OutputError, single, tmp_path, backend="inductor")
        # What was whole stays in the cache; of what was being built nothing does.
        building = (disk / "cache" / "build").rglob("*")
        assert not [path for path in building if path.is_file() and path.suffix != ".lock"]


def test_a_cache_that_cannot_be_made(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "file" / "cache"))
    text = refusal(OutputError, single, tmp_path, backend="inductor")
    assert str(cache_root()) in text and "INGOT_CACHE" in text
