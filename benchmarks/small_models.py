"""Train three small language models on a CPU: the checkpoints on which quality.py tries `--quantize auto`.

    python benchmarks/small_models.py FOLDER [--steps 500]

They have one token a byte, and learn the text that comes with Ingot for calibrations. Each takes about a minute of one
core. They are no use as models, but unlike random weights they have directions that matter and others that do not.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from random_tokenizer import write_tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config

from ingot.quantizing.texts import BUILTIN_FILE, read_documents

VOCAB, LENGTH, BATCH = 257, 128, 16
_END = 256
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": _END,
    "eos_token_id": _END,
}
# A gated feed-forward part, biases and a tied head, and a layer norm with matrices stored by columns.
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SIZES),
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=128, n_layer=3, n_head=4, bos_token_id=_END, eos_token_id=_END),
}


def train(name: str, folder: Path, steps: int) -> Path:
    """Train the model `name` of CONFIGS, write its checkpoint into `folder`/NAME in bfloat16, and return that folder.

    Equal calls on one machine write equal bytes.
    """
    torch.manual_seed(0)
    data = torch.tensor([*itertools.chain(*((*text.encode(), _END) for text in read_documents(BUILTIN_FILE)))])
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        places = torch.randint(len(data) - LENGTH, (BATCH,)).tolist()
        tokens = torch.stack([data[place : place + LENGTH] for place in places])
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
    print(f"{name}: a loss of {float(loss.detach()):.3f} nats a byte after {steps} steps", flush=True)
    made = folder / name
    model.to(torch.bfloat16).save_pretrained(made)
    write_tokenizer(made, VOCAB)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    for name in CONFIGS:
        train(name, options.folder, options.steps)


if __name__ == "__main__":
    main()
