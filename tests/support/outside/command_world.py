"""What the tests of commands share: a tiny checkpoint with a tokenizer, and how a command line ended."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, POSITIONS = 260, 32, 2, 4, 2, 16, 48, 128
END = "<end>"
# One turn a line, each closed by the end token.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}> {% endif %}"
)

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": FFN,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}


def write_checkpoint(folder: Path, *, tokenizer: bool = True, **changes: object) -> Path:
    """A tiny random Qwen3 checkpoint; with `tokenizer`, one token a byte."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{layer}.self_attn.q_norm.weight": torch.ones(HEAD_DIM),
            f"{layer}.self_attn.k_norm.weight": torch.ones(HEAD_DIM),
            f"{layer}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": matrix(FFN, HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(FFN, HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, FFN),
        }
    save_file(tensors, folder / "model.safetensors")
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer with one token a byte, and an end token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))


@dataclass(frozen=True)
class Done:
    """How a command line ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]


@dataclass(frozen=True)
class World:
    """Checkpoints, artifacts, and how compiling the first ended."""

    checkpoint: Path
    artifact: Path
    compiled: Done
    wordless: Path


def in_process(*command: object, cwd: Path | None = None) -> Done:
    """A command line in a process of its own."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd, timeout=240)
    return Done(done.returncode, done.stdout, done.stderr)


LIMITS = ("--max-batch", "4", "--max-tokens", "32", "--max-seq-len", "64", "-j", "1")
