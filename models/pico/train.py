#!/usr/bin/env python3
"""Train pico, the small Python-source language model bundled with Ingot.

One script does everything on the machine it runs on:

1. collects the ``.py`` files of the Python standard library and splits them by file into train and held-out;
2. trains a byte-level BPE tokenizer of 4096 tokens on the train files;
3. trains a 7 M parameter Qwen3 model (AdamW, warmup + cosine, bf16 autocast over fp32 master weights), keeping
   the weights of the best held-out loss;
4. saves a Hugging Face checkpoint in bf16, measures held-out perplexity on the saved files and draws the loss.

    python models/pico/train.py --output models/pico

It needs torch, transformers, tokenizers, safetensors and matplotlib, and takes minutes on one large GPU. On a CPU,
try it with ``--steps 3 --batch 2 --held-out 0.003 --output /tmp/pico``. Some systems install Python without Lib/test,
more than half of the text; ``--stdlib`` names another copy of the library.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

EOT = "<|endoftext|>"
EOT_ID = 0
VOCAB_SIZE = 4096

# Excluded folders. Installed packages are not the standard library; `pydoc_data` and `encodings` are generated tables
# rather than code, `lib2to3/tests` is Python 2, and folders named `data`, `tokenizedata` and `encoded_modules` hold
# test inputs, not programs. The rest of Lib/test, idlelib and lib2to3 is ordinary Python and is included: the tests
# alone are more than half of the text.
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
    "data",
    "tokenizedata",
    "encoded_modules",
}
SKIPPED_PATHS = ("lib2to3/tests/",)
# Written when Python was built, with that machine's paths in it.
SKIPPED_PREFIX = "_sysconfigdata"

# The published checkpoint's config.json. All contracted dimensions of matmuls are multiples of 128.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-06,
    "use_sliding_window": False,
    "sliding_window": None,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": EOT_ID,
    "eos_token_id": EOT_ID,
    "torch_dtype": "bfloat16",
}

# Explicitly no mask: attention without a mask is causal and uses the fast kernel. By default, transformers builds a
# mask tensor under torch.compile: the same attention, slower.
CAUSAL: dict[str, None] = {"full_attention": None}

LossFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Corpus:
    """The source files of Python's standard library as texts. Each file is a training text or a held-out text."""

    train: list[str]
    held_out: list[str]

    @property
    def held_out_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.held_out)


@dataclass
class History:
    """The record of a training run.

    best_step   the step with the lowest held-out loss
    train       points of the training loss curve: {"step": step, "loss": loss}
    held_out    points of the held-out loss curve
    """

    steps: int
    minutes: float
    best_step: int
    train: list[dict[str, float]]
    held_out: list[dict[str, float]]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train pico on the Python standard library.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--stdlib", type=Path, help="library folder (default: the running Python's)")
    parser.add_argument("--stdlib-version", help="its CPython version (default: the running Python's)")
    parser.add_argument("--steps", type=int, default=5500, help="optimizer steps")
    parser.add_argument("--minutes", type=float, default=8.0, help="finish the schedule early after this long")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step")
    parser.add_argument("--context", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=200, help="steps of linear warmup")
    parser.add_argument("--weight-decay", type=float, default=1.5, help="AdamW weight decay of matrices")
    parser.add_argument("--dropout", type=float, default=0.2, help="dropout while training")
    parser.add_argument("--held-out", type=float, default=0.03, help="fraction of files held out")
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args()


def collect(stdlib: Path, held_out_fraction: float) -> Corpus:
    """Read the source files in the folder `stdlib`, and split them into training and held-out texts.

    Excluded files are skipped, and equal files count once. A hash of its content decides whether a file is held out.
    About `held_out_fraction` of the files are.
    """
    parts: tuple[list[str], list[str]] = ([], [])
    seen: set[bytes] = set()
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if SKIPPED_FOLDERS & set(relative.parts) or relative.as_posix().startswith(SKIPPED_PATHS):
            continue
        if path.name.startswith(SKIPPED_PREFIX):
            continue
        raw = path.read_bytes()
        try:
            text = raw.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:  # tests of other source encodings
            continue
        digest = hashlib.sha256(raw).digest()
        if not text.strip() or digest in seen:
            continue
        seen.add(digest)
        # By hash, not by a shuffle: a file stays in its part when other files are added or removed.
        parts[int.from_bytes(digest[:8]) / 2**64 < held_out_fraction].append(text)
    return Corpus(train=parts[0], held_out=parts[1])


def train_tokenizer(texts: list[str], output: Path) -> Tokenizer:
    """Train a byte-level BPE tokenizer like GPT-2's on the texts, save it in the folder `output`, and return it.

    Every byte has a token, so any text can be encoded and decoded without loss.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE and tokenizer.token_to_id(EOT) == EOT_ID
    tokenizer.save(str(output / "tokenizer.json"))
    write_json(
        output / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": EOT,
            "eos_token": EOT,
            "pad_token": EOT,
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    )
    return tokenizer


def tokenize(tokenizer: Tokenizer, texts: list[str], device: torch.device) -> torch.Tensor:
    """Return the token ids of all texts as one tensor [tokens].

    An end-of-text token comes before each text and at the end.
    """
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        stream.append(EOT_ID)
        stream.extend(encoding.ids)
    stream.append(EOT_ID)
    return torch.tensor(stream, dtype=torch.long, device=device)


def make_loss(model: Qwen3ForCausalLM, autocast: bool) -> LossFunction:
    """Return a function from token ids [batch, tokens] to the sum of the next-token losses.

    With `autocast`, the model computes in bf16.
    """

    def loss(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=autocast):
            logits = model(input_ids=batch[:, :-1], attention_mask=CAUSAL, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")

    return loss


@torch.no_grad()
def evaluate(loss: LossFunction, stream: torch.Tensor, context: int, batch: int) -> float:
    """Return the mean loss per token over all of `stream`.

    The stream is cut into consecutive windows of `context` tokens, and the model reads `batch` windows at a time.
    """
    total = torch.zeros((), dtype=torch.float64, device=stream.device)
    windows = (len(stream) - 1) // context
    starts = torch.arange(windows, device=stream.device) * context
    offsets = torch.arange(context + 1, device=stream.device)
    for some in torch.split(starts, batch):
        total += loss(stream[some[:, None] + offsets])
    if len(rest := stream[windows * context :]) > 1:
        total += loss(rest[None])
    return float(total) / (len(stream) - 1)


def decay_groups(model: Qwen3ForCausalLM, weight_decay: float) -> list[dict[str, Any]]:
    """Return the optimizer's two parameter groups: matrices with weight decay, and norm weights without."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def add_dropout(model: Qwen3ForCausalLM, probability: float) -> None:
    """Add dropout as in GPT-2: to the embedding, and to the results of attention and MLP before the residual addition.

    It acts in training mode only, so the checkpoint does not need it.
    """

    # The model has about as many parameters as the library has tokens. Without dropout, and without a weight decay of
    # fifteen times the usual 0.1, it memorizes the files: its held-out loss rises after eight passes over the data.
    def drop(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, probability, training=module.training)

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(drop)


def train(model: Qwen3ForCausalLM, stream: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace) -> History:
    """Train `model` in place, restore its weights at the best held-out loss, and return the record of the run.

    `stream` and `held_out` are the token ids to train on and to evaluate on. `args` are the command's options.
    """
    add_dropout(model, args.dropout)
    model.train()
    device = stream.device
    on_gpu = device.type == "cuda"
    eager_loss = make_loss(model, autocast=True)
    # Only the training step is compiled; evaluation is rare and runs on windows of other shapes.
    step_loss: LossFunction = torch.compile(eager_loss, dynamic=False) if on_gpu else eager_loss
    optimizer = torch.optim.AdamW(
        decay_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95), eps=1e-8, fused=on_gpu
    )
    tokens_per_step = args.batch * args.context
    offsets = torch.arange(args.context + 1, device=device)
    history = History(steps=0, minutes=0.0, best_step=0, train=[], held_out=[])
    best_loss, best_state = math.inf, {}
    report_every, evaluate_every = 20, 100
    window_loss, window_steps = torch.zeros((), device=device), 0
    start = 0.0
    step, progress = 0, 0.0
    while progress < 1.0:
        # Windows start anywhere in the stream, so each pass over the data splits it differently.
        first = torch.randint(len(stream) - args.context, (args.batch, 1), device=device)
        # The schedule follows the steps, or the clock if the time limit comes first.
        rate = args.lr * min(1.0, (step + 1) / args.warmup) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = step_loss(stream[first + offsets]) / tokens_per_step
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        window_loss += loss.detach()
        window_steps += 1
        step += 1
        if step == 1:
            float(window_loss)  # wait for the device: the clock starts after compilation
            start = time.perf_counter()
        minutes = (time.perf_counter() - start) / 60
        progress = max(step / args.steps, minutes / args.minutes)
        if step % report_every == 0 or progress >= 1.0:
            # Reading the loss synchronizes: otherwise the host, and `minutes`, would run ahead of the device.
            mean = float(window_loss) / window_steps
            history.train.append({"step": step, "loss": round(mean, 4)})
            speed = step * tokens_per_step / max(time.perf_counter() - start, 1e-9)
            print(f"step {step:5d}  {minutes:5.2f} min  lr {rate:.2e}  loss {mean:.4f}  {speed:,.0f} tok/s", flush=True)
            window_loss.zero_()
            window_steps = 0
        if step % evaluate_every == 0 or progress >= 1.0:
            model.train(False)
            mean = evaluate(eager_loss, held_out, args.context, args.batch)
            model.train()
            history.held_out.append({"step": step, "loss": round(mean, 4)})
            print(f"step {step:5d}  held-out loss {mean:.4f}", flush=True)
            if mean < best_loss:
                best_loss, history.best_step = mean, step
                best_state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.train(False)
    history.steps, history.minutes = step, round((time.perf_counter() - start) / 60, 2)
    model.load_state_dict(best_state)
    return history


def save(model: Qwen3ForCausalLM, output: Path) -> None:
    """Save the weights in bf16 as a Hugging Face checkpoint in the folder `output`, with config files.

    The head is tied to the embedding, so it is not stored.
    """
    weights = {
        name: value.to(torch.bfloat16).cpu().contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    (output / "model.safetensors").chmod(0o644)
    write_json(output / "config.json", CONFIG)
    write_json(output / "generation_config.json", {"bos_token_id": EOT_ID, "eos_token_id": EOT_ID, "do_sample": False})


def draw(history: History, output: Path) -> None:
    """Draw the loss curves as loss.png in the folder `output`. High losses of the first steps are cut off."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    for points, label, colour, width in (
        (history.train, "train", "#9ab8d8", 1.0),
        (history.held_out, "held-out", "#b5402a", 1.8),
    ):
        axes.plot([p["step"] for p in points], [p["loss"] for p in points], label=label, color=colour, linewidth=width)
    losses = sorted(point["loss"] for point in history.train + history.held_out)
    axes.set_ylim(losses[0] - 0.1, min(losses[-1], losses[0] + 3.0) + 0.1)
    axes.set_xlim(0, history.steps)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("pico on the Python standard library")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(output / "loss.png")


def load(output: Path, device: torch.device) -> Any:
    """Load the checkpoint saved in the folder `output` with transformers, as a user would."""
    model: Any = AutoModelForCausalLM.from_pretrained(output, dtype=torch.bfloat16)
    return model.to(device).eval()


def greedy(model: Any, output: Path, prompt: str, tokens: int) -> str:
    """Return `prompt` and up to `tokens` greedily generated tokens, as text.

    An end-of-text token comes before the prompt, as at the start of a file. `output` is the folder of the checkpoint
    with the tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(output)
    inputs = tokenizer(EOT + prompt, return_tensors="pt").to(model.device)
    generated = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(generated[0], skip_special_tokens=True))


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    corpus = collect(args.stdlib or Path(sysconfig.get_path("stdlib")), args.held_out)
    tokenizer = train_tokenizer(corpus.train, args.output)
    stream = tokenize(tokenizer, corpus.train, device)
    held_out = tokenize(tokenizer, corpus.held_out, device)
    for name, files, tokens in (("train", corpus.train, stream), ("held-out", corpus.held_out, held_out)):
        print(f"{name}: {len(files)} files, {len(tokens):,} tokens", flush=True)

    # Without the config's dtype the parameters are fp32; autocast makes the bf16 copies.
    config = Qwen3Config(**{name: value for name, value in CONFIG.items() if name != "torch_dtype"})
    model = Qwen3ForCausalLM(config)
    torch.nn.Module.to(model, device)  # in place; transformers' own `to` is not typed
    assert all(p.dtype == torch.float32 for p in model.parameters())
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters", flush=True)
    history = train(model, stream, held_out, args)
    save(model, args.output)

    # Measure the files just written, in plain bf16: the figure is for the checkpoint, not for the master weights.
    saved = load(args.output, device)
    nats = evaluate(make_loss(saved, autocast=False), held_out, args.context, args.batch)
    tokens_seen = history.steps * args.batch * args.context
    report = {
        "seed": args.seed,
        "data": f"CPython {args.stdlib_version or platform.python_version()} standard library",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "parameters": parameters,
        "train_files": len(corpus.train),
        "train_tokens": len(stream),
        "held_out_files": len(corpus.held_out),
        "held_out_tokens": len(held_out),
        "held_out_bytes": corpus.held_out_bytes,
        "batch": args.batch,
        "context": args.context,
        "learning_rate": args.lr,
        "warmup_steps": args.warmup,
        "weight_decay": args.weight_decay,
        "dropout": args.dropout,
        "steps": history.steps,
        "best_step": history.best_step,
        "minutes": history.minutes,
        "tokens_seen": tokens_seen,
        "epochs": round(tokens_seen / len(stream), 1),
        "held_out_loss": round(nats, 4),
        "held_out_perplexity": round(math.exp(nats), 3),
        "held_out_bits_per_byte": round(nats / math.log(2) * (len(held_out) - 1) / corpus.held_out_bytes, 4),
        "train_curve": history.train,
        "held_out_curve": history.held_out,
    }
    write_json(args.output / "training.json", report)
    draw(history, args.output)
    print(json.dumps({k: v for k, v in report.items() if not k.endswith("curve")}, indent=2))
    for prompt in ("def fibonacci(n):", "import os\nimport sys\n\n", "class Stack:\n    def __init__(self"):
        print("-" * 80 + "\n" + greedy(saved, args.output, prompt, 96), flush=True)


if __name__ == "__main__":
    main()
