"""GGUF files: blocks bit by bit against the package gguf, names, permuted q and k, norms, configuration, tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_files import LIMIT_OPTIONS, MODEL, PROMPTS, formats_of
from safetensors.torch import load_file, save_file
from staged import LIMITS, logits_of, staged
from tiny import TINY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from ingot.compile.request import Request
from ingot.debug.bisect.execution.recipe_meanings import step_problem
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.errors import CheckpointError, ConfigError, IngotError
from ingot.ir.formats import ELEMENTS, Scales, dequantize, format_of
from ingot.ir.numerics.tolerances import compare
from ingot.ir.recipe import STEPS
from ingot.ir.stored.gguf_blocks import BLOCK_TYPES, read_blocks
from ingot.runtime.text.tokenizer import Tokenizer as Ours

gguf: Any = pytest.importorskip("gguf")

# The places of halves in a block, by type.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip


def random_rows(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    """Random blocks of a type, and the numbers that the package reads from them: of about 0.05."""
    block, draw = BLOCK_TYPES[kind], np.random.default_rng(seed)
    raw = draw.integers(0, 256, (rows, columns // block.count, block.bytes), dtype=np.uint8)
    for place in HALVES[kind]:
        small = draw.uniform(0.5, 1.0, raw.shape[:2]) / 2 ** (9 if block.scales is torch.float32 else 7)
        raw[..., place : place + 2] = small.astype(np.float16)[..., None].view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = draw.integers(118, 122, raw.shape[:2])
    raw = raw.reshape(rows, -1)
    return raw, torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_are_the_packages(kind: str) -> None:
    raw, wanted = random_rows(kind, 6, 512)
    block = BLOCK_TYPES[kind]
    packing = "low_first" if ELEMENTS[block.element].bits == 4 else "plain"
    level = Scales(1, block.group, dtype=block.scales, offsets=block.offsets)
    format = format_of(block.element, (level,), packing=packing)
    parts = read_blocks(torch.from_numpy(raw), kind)
    stored = {**parts, "weight": format.layout.pack(parts["weight"])}
    assert torch.equal(dequantize(stored, format), wanted)
    args, attrs = [torch.from_numpy(raw)], {"type": kind}
    assert step_problem("gguf_blocks", args, attrs, STEPS["gguf_blocks"](args, attrs)) is None
    wrong = {**parts, "scales": (parts["scales"].float() * 2).to(parts["scales"].dtype)}
    assert "expected" in (step_problem("gguf_blocks", args, attrs, wrong) or "")


CONFIG = {**MODEL.config, "hidden_size": 256, "head_dim": 64}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def their_name(name: str) -> str:
    for ours, theirs in LAYER.items():
        if f".{ours}." in name:
            return f"blk.{name.split('.')[2]}.{theirs}.{name.rpartition('.')[2]}"
    return NAMES[name]


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp stores q and k of Llama: the rotary pairs of a head are neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def base(path: Path, architecture: str, config: dict[str, Any], **changes: Any) -> Any:
    """A writer with the keys of a configuration."""
    writer = gguf.GGUFWriter(path, architecture)
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config["head_dim"],
        "rope.freq_base": config["rope_theta"],
        **changes,
    }
    for key, value in keys.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{key}", value)
    return writer


def close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A Llama whose tensors have all types in turn, and its weights in the order of Hugging Face."""
    folder = tmp_path_factory.mktemp("gguf")
    tensors = load_file(MODEL.write(folder / "floats", **CONFIG) / "model.safetensors")
    path, kinds = folder / "model.gguf", iter([*BLOCK_TYPES] * 3)
    writer = base(path, "llama", CONFIG)
    for name, tensor in tensors.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
        if tensor.dim() == 1:
            writer.add_tensor(their_name(name), tensor.numpy())
            continue
        kind = next(kinds)
        raw, wanted = random_rows(kind, *tensor.shape, seed=len(name))
        stored = interleaved(raw, heads) if heads else raw
        writer.add_tensor(their_name(name), stored, raw_dtype=gguf.GGMLQuantizationType[kind])
        tensors[name] = wanted.contiguous()
    close(writer)
    save_file(tensors, folder / "floats" / "model.safetensors", metadata={"format": "pt"})
    return path, tensors


def logits(path: Path, **options: Any) -> tuple[torch.Tensor, set[str]]:
    request = Request.read(path, **{**LIMIT_OPTIONS, "dtype": "float32", **options})
    program = staged(request.trace(), request.pipeline(), LIMITS)[1].fused
    return logits_of(program, request.checkpoint.read, PROMPTS).exact, formats_of(program)


def theirs(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])


def test_a_model_of_all_types(written: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = written
    request = Request.read(path, **LIMIT_OPTIONS)
    request.trace()  # totality
    recipes = request.checkpoint.logical.recipes
    assert recipes.keys() == tensors.keys()
    for name, recipe in recipes.items():
        assert torch.equal(recipe.execute(request.checkpoint.read), tensors[name]), name
    found, formats = logits(path)
    assert compare(found, theirs(path.parent / "floats"), torch.float32, factor=20) is None
    assert len(formats) >= 6


def test_q_and_k_are_permuted(written: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """The stored rows are in another order than those of the model."""
    path, tensors = written
    request = Request.read(path, **LIMIT_OPTIONS)
    raw = request.checkpoint.read("blk.0.attn_q.weight").numpy()
    kind = next(one.tensor_type for one in gguf.GGUFReader(path).tensors if one.name == "blk.0.attn_q.weight")
    stored = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    assert not torch.equal(stored, tensors["model.layers.0.self_attn.q_proj.weight"])


def test_a_folder_with_one_file(written: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    shutil.copy(written[0], tmp_path / "a.gguf")
    assert Request.read(tmp_path, **LIMIT_OPTIONS).spec.family == "llama"
    shutil.copy(written[0], tmp_path / "b.gguf")
    with pytest.raises(ConfigError, match=r"there is no config\.json") as caught:
        Request.read(tmp_path, **LIMIT_OPTIONS)
    assert "name one of the GGUF files: a.gguf, b.gguf" in caught.value.hint


def test_norms_of_gemma_are_stored_plus_one(tmp_path: Path) -> None:
    tiny = TINY["gemma-tied"]
    folder = tiny.write(tmp_path / "floats", torch_dtype="float32")
    config, tensors = dict(tiny.config), load_file(folder / "model.safetensors")
    writer = base(tmp_path / "m.gguf", "gemma", config)
    for name, tensor in tensors.items():
        wide = tensor.float() + (1.0 if "norm" in name else 0.0)
        writer.add_tensor(their_name(name), wide.numpy())
    close(writer)
    found, formats = logits(tmp_path / "m.gguf", max_seq_len=96)
    save_file({name: one.float() for name, one in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    assert compare(found, theirs(folder), torch.float32, factor=20) is None and not formats


TEXTS = ["def f(x): return x + 1", "it's  a test,\n\n  with 1234 numbers", "tokens and more tokens"]


def test_the_tokenizer_of_bytes(tmp_path: Path) -> None:
    """Trained by the library, written as GGUF, and read back."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    made.train_from_iterator(TEXTS * 5, trainer)
    merges = [" ".join(one) for one in json.loads(made.to_str())["model"]["merges"]]
    vocabulary = made.get_vocab()
    tokens = sorted(vocabulary, key=lambda text: vocabulary[text])
    config = {**CONFIG, "vocab_size": len(tokens)}
    writer = base(tmp_path / "m.gguf", "llama", config)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([3 if text in ("<s>", "</s>") else 1 for text in tokens])
    writer.add_bos_token_id(vocabulary["<s>"])
    writer.add_eos_token_id(vocabulary["</s>"])
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 256), np.float32))
    close(writer)
    opened = Checkpoint.open(tmp_path / "m.gguf")
    ours = Ours.load(opened.tokenizer_files["tokenizer.json"].parent)
    assert opened.config["eos_token_id"] == vocabulary["</s>"] and ours.bos_token_id == vocabulary["<s>"]
    for text in TEXTS:
        ids = ours.backend.encode(text, add_special_tokens=False).ids
        assert ids == made.encode(text).ids and ours.backend.decode(ids) == text


def test_the_tokenizer_of_pieces(tmp_path: Path) -> None:
    """Merges come from scores: the pair whose union has the highest score is merged first."""
    texts = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "▁abc"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *texts]
    scores = [0.0] * 259 + [-20.0, -21.0, -22.0, -23.0, -3.0, -1.0, -5.0, -2.0, -4.0]
    writer = base(tmp_path / "m.gguf", "llama", {**CONFIG, "vocab_size": len(tokens)})
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(texts)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 256), np.float32))
    close(writer)
    opened = Checkpoint.open(tmp_path / "m.gguf")
    backend = Tokenizer.from_file(str(opened.tokenizer_files["tokenizer.json"]))
    # b and c are merged before a and b, as the union has the higher score.
    assert backend.encode("cabc", add_special_tokens=False).tokens == ["▁", "c", "a", "bc"]
    assert backend.encode("ab é", add_special_tokens=False).tokens == ["▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert backend.decode(backend.encode("ab é", add_special_tokens=False).ids) == "ab é"


@pytest.mark.parametrize(
    ("architecture", "changes", "problem"),
    [
        ("rwkv7", {}, "the architecture 'rwkv7' of a GGUF file cannot be read"),
        ("llama", {"expert_count": 8}, "the model has 8 experts"),
        ("llama", {"new_key": 1}, "the model has keys that are not understood: new_key"),
        ("llama", {"rope.dimension_count": 32}, "llama.rope.dimension_count is 32"),
        ("llama", {"rope.freq_base": -1.0}, "llama.rope.freq_base is -1.0"),
    ],
)
def test_what_is_not_understood(tmp_path: Path, architecture: str, changes: dict[str, Any], problem: str) -> None:
    close(base(tmp_path / "m.gguf", architecture, CONFIG, **changes))
    with pytest.raises(ConfigError) as caught:
        Request.read(tmp_path / "m.gguf", **LIMIT_OPTIONS)
    assert problem in caught.value.what


def test_tensors_that_are_not_known(tmp_path: Path) -> None:
    for name, kind, problem in (
        ("blk.0.attn_sinks.weight", "F32", "the tensor blk.0.attn_sinks.weight of the GGUF file is not known"),
        ("token_embd.weight", "I32", "the tensor token_embd.weight has the type I32"),
    ):
        writer = base(tmp_path / "m.gguf", "llama", CONFIG)
        writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
        writer.add_tensor(name, np.zeros((4, 8), np.float32 if kind == "F32" else np.int32))
        close(writer)
        with pytest.raises(CheckpointError) as caught:
            Request.read(tmp_path / "m.gguf", **LIMIT_OPTIONS)
        assert problem in caught.value.what


@pytest.mark.parametrize("size", [0, 3, 20, 200, 4000])
def test_a_damaged_file(written: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, size: int) -> None:
    (tmp_path / "m.gguf").write_bytes(written[0].read_bytes()[:size])
    with pytest.raises(IngotError):
        Request.read(tmp_path / "m.gguf", **LIMIT_OPTIONS)
