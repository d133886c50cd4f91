"""Compare decode on a CPU with weights in bfloat16, int8 and int4, all by Ingot.

    python benchmarks/decode_quantized_cpu.py [--checkpoint models/pico] [--shape 1b --layers 16] [--batches 1,16]

`--shape` writes a checkpoint of a published shape with random weights (`random_checkpoint.py`), and `--layers` changes
its number of layers. The head is in int8 in both quantized models. The models take turns in one process, a few tokens
each, so that all see the same machine state. A step is the time from a request's token to its next one, as
`LLM.stream` yields them. The least and the median count: other work on a machine only adds, and a single step is short
enough to meet none.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from random_checkpoint import SHAPES, config_of, write_checkpoint
from results import Figure, print_figures, write_result

from ingot import LLM, SamplingParams, compile_model

_PROMPT_TOKENS = 32
# The options with which each model is compiled.
_HEAD: dict[str, Any] = {"quantize_head": True, "quantize_overrides": {"lm_head": "int8"}}
MODELS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantize": "int8", "quantize_head": True},
    "int4": {"quantize": "int4_g128", **_HEAD},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoint", default=str(Path(__file__).parents[1] / "models" / "pico"))
    parser.add_argument("--shape", choices=SHAPES, help="a published shape with random weights, instead")
    parser.add_argument("--layers", type=int, help="layers of the shape")
    parser.add_argument("--batches", default="1,16", help="batch sizes, separated by commas")
    parser.add_argument("--tokens", type=int, default=32, help="tokens decoded in a try")
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory(prefix="ingot-decode-") as name:
        folder, checkpoint = Path(name), Path(options.checkpoint)
        if options.shape:
            changes = {"num_hidden_layers": options.layers} if options.layers else {}
            checkpoint = write_checkpoint(folder / "checkpoint", config_of(options.shape, **changes))
        for model, quantized in MODELS.items():
            limits = {"max_batch": 16, "max_tokens": 512, "max_seq_len": 512}
            compile_model(checkpoint, folder / f"{model}.ingot", **quantized, **limits)
        llms = {model: LLM(folder / f"{model}.ingot") for model in MODELS}
        for batch in map(int, options.batches.split(",")):
            figures |= measure(llms, batch, options.tokens, options.tries)
    print_figures(figures)
    settings = {**vars(options), "checkpoint": options.shape or checkpoint.name}
    del settings["shape"]  # it is the checkpoint
    result = "decode_quantized_cpu" + (f"_{options.shape}" if options.shape else "")
    print(write_result(__file__, result, settings, figures, packages=("torch",)))


def measure(llms: dict[str, LLM], batch: int, tokens: int, tries: int) -> dict[str, Figure]:
    """Measure a decode step of each model at batch size `batch`. Each of `tries` tries times `tokens` decode steps.

    Return figures by name: the seconds of a step, the least and the median, and the ratio of both speeds to bf16.
    """
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(10, 4000, (batch, _PROMPT_TOKENS), generator=generator).tolist()
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    steps: dict[str, list[float]] = {name: [] for name in llms}
    for attempt in range(tries + 1):  # the first one warms up
        for name, llm in llms.items():
            found = _steps(llm, requests, tokens)
            steps[name] += found if attempt else []
    figures = {}
    for kind, reduce in (("least", min), ("median", statistics.median)):
        seconds = {name: reduce(found) for name, found in steps.items()}
        for name, value in seconds.items():
            what = f"a decode step of {batch}, {name}, the {kind}"
            figures[f"batch_{batch}_{name}_{kind}"] = Figure(value=value, unit="s", what=what)
        for name in list(llms)[1:]:
            what = f"speed of {name} over bf16 at batch {batch}, by the {kind}"
            ratio = seconds["bf16"] / seconds[name]
            figures[f"batch_{batch}_{name}_{kind}_ratio"] = Figure(value=ratio, unit="", what=what)
    return figures


def _steps(llm: LLM, requests: list[dict[str, list[int]]], tokens: int) -> list[float]:
    """Generate `tokens` + 1 tokens for each request, and return the seconds between the tokens of the first one."""
    times = []
    first = None
    for output in llm.stream(requests, SamplingParams(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True)):
        first = first or output.request_id
        if output.request_id == first:
            times.append(time.perf_counter())
    # The first may hold prompts of other requests. The last two tokens come together.
    return [end - begin for begin, end in itertools.pairwise(times)][1:-1]


if __name__ == "__main__":
    main()
