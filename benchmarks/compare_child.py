"""Start an artifact once, then decode and serve, in a process that compare_commits.py starts.

    PYTHONPATH=CHECKOUT python benchmarks/compare_child.py ARTIFACT --checkout CHECKOUT --json FILE

It uses only what every commit of Ingot has: `LLM`, and its `generate`, `idle` and `timings`. Times are in seconds.
decode_method.py measures a decode step, once per process unless --tries says otherwise. For a long prompt the minimum
of three tries counts. All CUDA graphs are captured before measuring, as an idle engine does.
"""

import time

BEGUN = time.time()

import ingot  # noqa: E402  # the clock is read before anything is imported
from ingot import LLM, SamplingParams  # noqa: E402

IMPORTED = time.time()

import argparse  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402

from decode_method import (  # noqa: E402
    PROMPT_TOKENS,
    Prompts,
    add_length_options,
    length_changes,
    lengths_of,
    measure_decode,
)

_PROMPT_TRIES = 3
_WARM_UP = (64, 8)  # requests, and output tokens of each, before the measured ones


class Engine:
    """Ingot's `LLM`, set to decode greedily. It ignores end tokens and does not detokenize."""

    def __init__(self, artifact: Path) -> None:
        self.llm = LLM(artifact)

    def generate(self, prompts: Prompts, count: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        assert all(len(output.outputs[0].token_ids) == count for output in outputs)

    def seconds(self, prompts: Prompts, count: int) -> float:
        begin = time.perf_counter()
        self.generate(prompts, count)
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--checkout", type=Path, required=True, help="the checkout that Ingot must be imported from")
    parser.add_argument("--vocab", type=int, required=True, help="prompts contain ids below it")
    parser.add_argument("--batch", default="", help="batch sizes, separated by commas")
    add_length_options(parser)
    parser.add_argument("--prompt", type=int, default=0, help="tokens of the long prompt; 0: none")
    parser.add_argument("--requests", type=int, default=0, help="requests submitted at once; 0: none")
    parser.add_argument("--input", type=int, default=512, help="prompt tokens of each request")
    parser.add_argument("--output", type=int, default=256, help="output tokens of each request")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    imported = Path(str(ingot.__file__)).resolve().parents[1]
    if imported != options.checkout.resolve():
        sys.exit(f"Ingot was imported from {imported}, not from {options.checkout}")
    engine = Engine(options.artifact)
    loaded = time.time()
    engine.generate([[1] * PROMPT_TOKENS], 1)
    first = time.time()
    clock = {"begun": BEGUN, "imported": IMPORTED, "loaded": loaded, "first": first}
    timings = engine.llm.timings
    while engine.llm.idle():
        pass
    options.json.write_text(
        json.dumps({"clock": clock, "timings": timings, "figures": dict(figures(engine, options))}), encoding="utf-8"
    )


def figures(engine: Engine, options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    for batch in map(int, filter(None, options.batch.split(","))):
        lengths = replace(lengths_of(batch), **{"tries": 1, **length_changes(options)})
        yield f"batch_{batch}_step", measure_decode(engine.generate, options.vocab, batch, lengths).step
    draw = random.Random(0)

    def prompts(count: int, tokens: int) -> Prompts:
        return [[draw.randrange(options.vocab) for _ in range(tokens)] for _ in range(count)]

    if options.prompt:
        _, *tries = [engine.seconds(prompts(1, options.prompt), 1) for _ in range(1 + _PROMPT_TRIES)]
        yield f"prompt_{options.prompt}", min(tries)
    if options.requests:
        few, tokens = _WARM_UP
        engine.generate(prompts(min(few, options.requests), options.input), min(tokens, options.output))
        took = engine.seconds(prompts(options.requests, options.input), options.output)
        yield "throughput", options.requests * options.output / took


if __name__ == "__main__":
    main()
