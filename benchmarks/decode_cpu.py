"""Compare decode on a CPU with `transformers.generate`, for a checkpoint and a few batch sizes.

    python benchmarks/decode_cpu.py [--checkpoint models/pico] [--batches 1,16] [--tokens 128] [--threads 2]

Both decode greedily from the same prompts, in the checkpoint's dtype, with the same number of threads. They take turns
in one process, so that both see the same machine state. transformers runs with its default cache, and again with a
static cache; it compiles nothing, as by its defaults on a CPU. A round times `tokens` + 1 output tokens and one; the
time of a decode step is the difference over `tokens`. Only minima count: other work on a machine only adds.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from results import Figure, print_figures, write_result
from transformers import AutoModelForCausalLM

from ingot import LLM, SamplingParams, compile_model

_PROMPT_TOKENS = 32
Generate = Callable[[int], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoint", default=str(Path(__file__).parents[1] / "models" / "pico"))
    parser.add_argument("--batches", default="1,16", help="batch sizes, separated by commas")
    parser.add_argument("--tokens", type=int, default=128, help="tokens decoded in a round")
    parser.add_argument("--threads", type=int, default=2, help="threads of both sides")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory(prefix="ingot-decode-") as folder:
        compile_model(options.checkpoint, Path(folder) / "model.ingot")
        llm = LLM(Path(folder) / "model.ingot")
        peer = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype="auto").eval()
        peer.generation_config.eos_token_id = None  # continue to the last token, as Ingot does with ignore_eos
        for batch in map(int, options.batches.split(",")):
            figures |= measure(llm, peer, batch, options.tokens, options.rounds)
    print_figures(figures)
    settings = {**vars(options), "checkpoint": Path(options.checkpoint).name}
    print(write_result(__file__, "decode_cpu", settings, figures, packages=("torch", "transformers")))


def measure(llm: LLM, peer: torch.nn.Module, batch: int, tokens: int, rounds: int) -> dict[str, Figure]:
    """Measure a decode step of Ingot and of transformers on the CPU, at batch size `batch`.

    `llm` is Ingot's engine, and `peer` the model of transformers. Each of `rounds` rounds times `tokens` decode steps.

    Return figures by name: the seconds of a step, and a ratio. transformers is measured with two kinds of cache. The
    ratio says how many times faster Ingot is than the faster one of the two.
    """
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(10, peer.config.vocab_size, (batch, _PROMPT_TOKENS), generator=generator)
    ways: dict[str, Generate] = {
        "ingot": _ingot(llm, prompts),
        "transformers": _transformers(peer, prompts),
        "transformers_static": _transformers(peer, prompts, cache_implementation="static"),
    }
    least = {(name, count): math.inf for name in ways for count in (1, tokens + 1)}
    for _ in range(rounds + 1):  # the first round is a warm-up, and its times never win
        for name, way in ways.items():
            for count in (1, tokens + 1):
                begin = time.perf_counter()
                way(count)
                least[name, count] = min(least[name, count], time.perf_counter() - begin)
    step = {name: (least[name, tokens + 1] - least[name, 1]) / tokens for name in ways}
    best = min(step["transformers"], step["transformers_static"])
    return {
        **{
            f"batch_{batch}_{name}": Figure(value=value, unit="s", what=f"a decode step of {batch}, {name}, the least")
            for name, value in step.items()
        },
        f"batch_{batch}_ratio": Figure(
            value=best / step["ingot"], unit="", what=f"speed at batch {batch} over the faster of the peer's two"
        ),
    }


def _ingot(llm: LLM, prompts: torch.Tensor) -> Generate:
    requests = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
    return lambda count: llm.generate(requests, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))


def _transformers(peer: torch.nn.Module, prompts: torch.Tensor, **options: str) -> Generate:
    def generate(count: int) -> object:
        with torch.inference_mode():
            return peer.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                **options,
            )

    return generate


if __name__ == "__main__":
    main()
