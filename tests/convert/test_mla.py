"""`ingot convert --to mla`: equal logits while nothing is cut, the order of rotated pairs, and what is refused."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated_model import MODEL, write_text
from command_world import write_tokenizer
from quantized_files import not_the_head, write_quantized
from safetensors.torch import load_file, save_file
from tiny import TINY

from ingot import LLM, SamplingParams, compile_model
from ingot.compile.folder_writer import FolderWriter
from ingot.compile.request import Request
from ingot.convert.convert import ConvertReport, convert_model
from ingot.convert.mla import rotation
from ingot.convert.mla.convert import Conversion, perplexity
from ingot.convert.mla.rotation import find_matrices
from ingot.convert.mla.sizes import Sizes, check_sizes
from ingot.convert.mla.source import TARGETS, read_heads
from ingot.convert.tensor_shards import TensorShards
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.errors import CalibrationError, ConversionError, IngotError, OptionError, OutputError
from ingot.ir.numerics.harness import InterpreterRun, load_params, teacher_forced
from ingot.models.architectures import read_spec
from ingot.quantizing.texts import read_text

pytestmark = pytest.mark.one_in_file(3)

PROMPT = [3, 77, 41, 9, 200, 15, 62, 7, 7, 120, 33, 250, 18, 90, 4, 61]
WIDTH, KEYS = 16, 32  # of MODEL: two k/v heads
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "mlp_bias": ...}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}
SOURCES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False},
    "llama3": {"attention_bias": False, "rope_parameters": LLAMA3, "rope_theta": ..., "tie_word_embeddings": True},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
        "attention_bias": ...,
        "mlp_bias": ...,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_bias": ..., "mlp_bias": ...},
    "qwen3": {**QWEN3},
    "qwen3 with biases": {**QWEN3, "attention_bias": True},
}


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt", words=100)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that writes a source of SOURCES with a tokenizer, once."""
    root = tmp_path_factory.mktemp("sources")

    def write(name: str) -> Path:
        folder = root / name.replace(" ", "-")
        if not folder.exists():
            changed = {**MODEL.config, **SOURCES[name]}
            replace(MODEL, config={key: value for key, value in changed.items() if value is not ...}).write(folder)
            write_tokenizer(folder)
        return folder

    return write


def logits(folder: Path) -> torch.Tensor:
    request = Request.read(folder, target="cpu", backend="reference", dtype="float32", max_seq_len=64)
    program = request.trace().entries["main"]
    run = InterpreterRun(program, load_params(program.params, request.checkpoint.read))
    return teacher_forced(program.input_types(), run, [PROMPT])[0]


def convert(source: Path, output: Path, text: Path, **options: Any) -> ConvertReport:
    given = {"calibrate": text, "dtype": "float32", "max_seq_len": 64, **options}
    return convert_model(source, output, to="mla", **given)


@pytest.mark.parametrize("source", SOURCES)
def test_rotation_alone_keeps_the_logits(
    written: Callable[[str], Path], text: Path, tmp_path: Path, source: str
) -> None:
    report = convert(written(source), tmp_path / "out", text, keep_all=True)
    assert (report.rank, report.rope_dim, report.freqfold) == (KEYS, KEYS, 1)
    assert [one.name for one in report.gates] == ["source", "rotation"]
    before, after = logits(written(source)), logits(tmp_path / "out")
    assert float(before.abs().max()) > 1  # not equal because they are all small
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    first, last = report.gates
    assert last.perplexity == pytest.approx(first.perplexity, rel=1e-4)


@pytest.mark.parametrize("source", ["qwen2", "qwen3"])
def test_other_prefixes_of_names_are_read_and_not_written(
    written: Callable[[str], Path], text: Path, tmp_path: Path, source: str
) -> None:
    shutil.copytree(written(source), tmp_path / "renamed")
    tensors = load_file(tmp_path / "renamed" / "model.safetensors")
    save_file({f"module.{name}": one for name, one in tensors.items()}, tmp_path / "renamed" / "model.safetensors")
    options: dict[str, Any] = {"rank": 20, "rope_dim": WIDTH, "freqfold": 1}
    sources = {"out": written(source), "again": tmp_path / "renamed"}
    reports = [convert(folder, tmp_path / name, text, **options) for name, folder in sources.items()]
    assert reports[0].gates == reports[1].gates
    first, second = (load_file(report.output / "model.safetensors") for report in reports)
    assert first.keys() == second.keys() and all(torch.equal(one, second[name]) for name, one in first.items())


def test_rotation_alone_keeps_the_logits_of_pico(tmp_path: Path) -> None:
    """The bundled model, whose q and k have norms with trained gains."""
    pico = Path(__file__).parents[2] / "models" / "pico"
    (tmp_path / "code.txt").write_text((pico / "train.py").read_text()[:2500])
    convert(pico, tmp_path / "out", tmp_path / "code.txt", keep_all=True)
    before, after = logits(pico), logits(tmp_path / "out")
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", ["qwen2", "qwen3"])
def test_the_written_checkpoint_has_the_last_perplexity(
    written: Callable[[str], Path], text: Path, tmp_path: Path, source: str
) -> None:
    """A program traced from the written files measures what the conversion measured before it wrote them."""
    report = convert(written(source), tmp_path / "out", text, rank=20, rope_dim=WIDTH, freqfold=2, dtype="bfloat16")
    assert [one.name for one in report.gates] == ["source", "rotation", "rope cut", "rank cut"]
    assert [one.cache for one in report.gates] == [1, 1, 1, (20 + WIDTH) / (2 * KEYS)]
    request = Request.read(tmp_path / "out", target="cpu", backend="reference", max_seq_len=64)
    held_out = read_text(str(text), tmp_path / "out", request.spec.vocab_size, 64).held_out
    found = perplexity(request.trace().entries["main"], held_out, request.checkpoint.read, lambda done, total: None)
    assert found == pytest.approx(report.gates[-1].perplexity, rel=1e-6)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"], config["torch_dtype"]) == (20, WIDTH, "bfloat16")
    recorded = config["transmla"]
    assert recorded["freqfold"] == 2 and recorded["source"] == SOURCES[source]["architectures"][0]
    assert recorded["perplexity"] == {one.name: one.perplexity for one in report.gates}


def test_a_converted_model_is_compiled_and_generates_the_same(
    written: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    convert(written("llama"), tmp_path / "out", text, keep_all=True)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for name, folder in (("before", written("llama")), ("after", tmp_path / "out")):
        artifact = tmp_path / f"{name}.ingot"
        compile_model(folder, output=artifact, target="cpu", backend="reference", dtype="float32", max_seq_len=64)
        (answer,) = LLM(artifact).generate([{"prompt_token_ids": PROMPT}], params)
        found.append(answer.outputs[0].token_ids)
    assert len(set(found[0])) > 3 and found[0] == found[1]


def test_the_search_for_folded_frequencies_takes_the_best(
    written: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    report = convert(written("llama"), tmp_path / "out", text, rank=40, rope_dim=WIDTH)
    request = Request.read(written("llama"), target="cpu", backend="reference", dtype="float32", max_seq_len=64)
    given = read_text(str(text), written("llama"), request.spec.vocab_size, 64)
    conversion = Conversion.of(request, given, lambda done, total: None)
    sizes = check_sizes(conversion.heads, None, WIDTH, 1, "")
    measured = {
        fold: conversion.made(replace(sizes, freqfold=fold), {}).perplexity(given.sequences, lambda done, total: None)
        for fold in (1, 2, 4, 8)
    }
    assert measured[report.freqfold] <= min(measured[fold] for fold in measured if fold <= 2 * report.freqfold)


def _moment(seed: int, keys: int = KEYS) -> torch.Tensor:
    """Of keys and values of which some directions are much larger than others."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(300, 12, generator=generator, dtype=torch.float64)
    mixed = mixed @ torch.randn(12, 2 * keys, generator=generator, dtype=torch.float64)
    rows = mixed + 0.1 * torch.randn(300, 2 * keys, generator=generator, dtype=torch.float64)
    rows[:, :keys] *= 20
    return rows.T @ rows


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rope_dim", "fold"), [(KEYS, 1), (WIDTH, 1), (WIDTH, 4), (WIDTH // 2, 2), (WIDTH // 4, 8)])
def test_the_whole_rank_keeps_keys_and_values(rope_dim: int, fold: int, interleaved: bool) -> None:
    sizes = Sizes(2 * KEYS - rope_dim, rope_dim, fold, WIDTH, KEYS)
    made = find_matrices(_moment(1), sizes, interleaved=interleaved)
    eye = torch.eye(2 * KEYS, dtype=torch.float64)
    keys = made.rotated.T @ torch.cat([made.rotated, torch.zeros_like(made.rotated)], 1) + made.k_up @ made.down
    torch.testing.assert_close(keys, eye[:KEYS], rtol=0, atol=1e-9)
    torch.testing.assert_close(made.v_up @ made.down, eye[KEYS:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rope_dim", "fold"), [(KEYS, 1), (KEYS, 4), (WIDTH, 1), (WIDTH, 8), (8, 2), (8, 4), (4, 4)])
def test_rotated_pairs_have_a_frequency_of_their_group(rope_dim: int, fold: int, interleaved: bool) -> None:
    """Adjacent rows are the two elements of a pair, and each mixes source elements of one group of frequencies, of all
    heads alike. The table's frequency of the pair, every n-th of the source's, is one of this group."""
    sizes = Sizes(2 * KEYS - rope_dim, rope_dim, fold, WIDTH, KEYS)
    rotated = find_matrices(_moment(2), sizes, interleaved=interleaved).rotated
    by_head = rotated.view(rope_dim, -1, WIDTH)
    pairs = by_head.unflatten(2, (-1, 2)) if interleaved else by_head.unflatten(2, (2, -1)).transpose(2, 3)
    first, second = pairs[..., 0], pairs[..., 1]
    torch.testing.assert_close(first[::2], second[1::2], rtol=0, atol=0)
    assert not first[1::2].any() and not second[::2].any()
    in_part = min(rope_dim, WIDTH) // 2
    for pair in range(rope_dim // 2):
        used = first[2 * pair].abs().sum(0).nonzero().flatten() // fold
        assert set(used.tolist()) == {pair % in_part * sizes.stride // fold}


def test_rotation_gathers_energy_in_the_rotated_key() -> None:
    moment = _moment(3)
    sizes = Sizes(1, WIDTH, 1, WIDTH, KEYS)
    energy = [
        float((one @ moment[:KEYS, :KEYS] @ one.T).trace())
        for one in (
            find_matrices(moment, sizes, interleaved=False).rotated,
            find_matrices(moment, replace(sizes, freqfold=8), interleaved=False).rotated,
        )
    ]
    of_heads = moment.diagonal()[:KEYS].view(-1, WIDTH).sum(1)
    assert energy[1] > energy[0] > 1.05 * float(of_heads.max())
    assert energy[1] < float(of_heads.sum())


def test_balance_keeps_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are twenty times larger than values. Unless that is balanced, a small latent keeps keys alone."""
    moment, sizes = _moment(4), Sizes(8, WIDTH, 1, WIDTH, KEYS)

    def lost() -> float:
        """The share of the energy of values that the latent does not have."""
        made = find_matrices(moment, sizes, interleaved=False)
        left = made.v_up @ made.down - torch.eye(2 * KEYS, dtype=torch.float64)[KEYS:]
        return float((left @ moment @ left.T).trace() / moment[KEYS:, KEYS:].trace())

    balanced = lost()
    monkeypatch.setattr(rotation, "_ratio", lambda joint, keys: 1.0)
    assert balanced < 0.8 * lost()


@pytest.mark.parametrize("what", ["halves", "swapped heads", "no balance"])
def test_mutations_show_in_the_logits(
    written: Callable[[str], Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The rotated key in the order of halves, as in Llama; queries rotated as those of another head; keys that are
    divided by a ratio and not multiplied by it again."""
    original = rotation.find_matrices

    def wrong(moment: torch.Tensor, sizes: Sizes, *, interleaved: bool) -> rotation.Matrices:
        made = original(moment, sizes, interleaved=interleaved)
        if what == "halves":
            parts = made.rotated.view(-1, sizes.width // 2, 2, sizes.keys).transpose(1, 2)
            return replace(made, rotated=parts.reshape(made.rotated.shape))
        if what == "swapped heads":
            return replace(made, v_up=made.v_up.roll(sizes.width, 0))
        return replace(made, k_up=made.k_up / 2)

    monkeypatch.setattr("ingot.convert.mla.convert.find_matrices", wrong)
    options: dict[str, Any] = {"rank": 2 * KEYS - WIDTH, "rope_dim": WIDTH, "freqfold": 1}
    convert(written("llama"), tmp_path / "wrong", text, **options)
    monkeypatch.undo()
    convert(written("llama"), tmp_path / "right", text, **options)
    moved = (logits(tmp_path / "wrong") - logits(tmp_path / "right")).abs().max()
    assert float(moved) > 0.01


REFUSED = {
    "gpt_oss-yarn": "attention sinks",
    "mistral-window": "a window",
    "llama4_text-chunks": "chunks",
    "bloom-tied": "ALiBi",
    "gpt2-learned": "without a rotary embedding",
    "phi-plain": "a rotary embedding of 8 of 16",
    "llama-yarn": "the rotary type yarn",
    "phimoe-long": "the rotary type longrope",
    "llama-dynamic": "the rotary type dynamic",
    "olmo-clipped": "a limit on q, k and v",
    "olmo2-biased": "norms of q and k",
    "telechat2-tied": "one stored tensor",
    "decilm-heads": "another attention in layer 1",
    "nemotron_nas-late": "no attention of its own",
    "mimo_v2_flash-wide": "a factor on values",
    "step3_text-listed": "queries that are made of a latent",
    "gemma3n_text-plain": "several residual streams",
    "deepseek_v3-groups": "latent attention already",
    "llama-biased": "a bias in the output linear",
    "gemma-tied": "no converted architecture",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(name: str) -> None:
    config = TINY[name].config
    with pytest.raises(ConversionError, match=re.escape(REFUSED[name])) as caught:
        read_heads(read_spec(config), "the folder")
    assert config["architectures"][0] in caught.value.what and caught.value.where == "the folder"


def test_no_other_attention_is_taken() -> None:
    """Of all tiny checkpoints, only those of four architectures are converted."""
    taken = set()
    for tiny in TINY.values():
        with contextlib.suppress(ConversionError):
            read_heads(read_spec(tiny.config), "")
            taken.add(tiny.config["architectures"][0])
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM"} <= taken <= TARGETS.keys()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 0, "rope_dim": WIDTH}, "--rank 0"),
        ({"rank": 49, "rope_dim": WIDTH}, "1 to 48"),
        ({"rank": 8, "rope_dim": 6}, "--rope-dim 6"),
        ({"rank": 8, "rope_dim": 2 * KEYS}, "--rope-dim 64"),
        ({"rank": 8}, "--rope-dim 64"),
        ({"rank": 8, "rope_dim": 0}, "--rope-dim 0"),
        ({"rank": 8, "rope_dim": -WIDTH}, "--rope-dim -16"),
        ({"rank": 8, "rope_dim": WIDTH, "freqfold": 3}, "--freqfold 3"),
        ({"rank": 8, "rope_dim": WIDTH // 2, "freqfold": 1}, "a multiple of 2"),
        ({"rank": 8, "rope_dim": WIDTH, "freqfold": 0}, "--freqfold 0"),
        ({"keep_all": True, "freqfold": 16}, "--freqfold 16"),
        ({"keep_all": True, "rank": 8}, "--keep-all with --rank"),
        ({"keep_all": True, "rope_dim": WIDTH}, "--keep-all with --rope-dim"),
        ({}, "without --rank"),
        ({"rank": 8, "rope_dim": WIDTH, "dtype": "int8"}, "int8"),
        ({"rank": 8, "rope_dim": WIDTH, "calibrate": "no such file"}, "no such file"),
    ],
)
def test_bad_options(
    written: Callable[[str], Path], text: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(IngotError, match=re.escape(said)):
        convert(written("llama"), tmp_path / "out", text, **options)
    assert not [*tmp_path.iterdir()]


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    def eight_bits(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        stored, blocks = weight.to(torch.float8_e4m3fn), [-(-size // 128) for size in weight.shape]
        return {"weight": stored, "weight_scale_inv": torch.ones(blocks)}, stored.float()

    described = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    stored = write_quantized(tmp_path / "stored", described, not_the_head(eight_bits))
    with pytest.raises(ConversionError, match="quantized weights"):
        convert_model(stored.folder, tmp_path / "out", to="mla", keep_all=True)
    assert not (tmp_path / "out").exists()


def test_other_bad_input(written: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="gqa"):
        convert_model(written("llama"), tmp_path / "out", to="gqa")
    short = tmp_path / "short.txt"
    short.write_text("a few words of text")
    with pytest.raises(CalibrationError, match="64 elements of keys and values"):
        convert(written("llama"), tmp_path / "out", short, keep_all=True)
    (tmp_path / "taken").mkdir()
    with pytest.raises(OutputError, match="exists"):
        convert(written("llama"), tmp_path / "taken", text, keep_all=True)
    assert {path.name for path in tmp_path.iterdir()} == {"short.txt", "taken"}


def test_large_checkpoints_are_several_files(tmp_path: Path) -> None:
    with FolderWriter(tmp_path / "out") as writer:
        shards = TensorShards(writer, file_bytes=100)
        tensors = {f"t{index}": torch.full((size,), float(index)) for index, size in enumerate((20, 5, 60, 3))}
        for name, tensor in tensors.items():
            shards.store(name, tensor)
        shards.finish()
        writer.publish_folder()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 88 and index["weight_map"].keys() == tensors.keys()
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], tensors[name])
    (tmp_path / "out" / "config.json").write_text("{}")
    assert Checkpoint.open(tmp_path / "out").tensors.keys() == tensors.keys()
