"""How a long prompt and many requests at once are measured, of whatever engine; as in decode_method.py."""

import argparse
import random
import time
from dataclasses import asdict, dataclass, fields

from decode_method import Generate, Prompts

_TRIES = 3  # of the long prompt
_WARM_UP = (64, 8)  # requests, and tokens of each, in front of the load


@dataclass(frozen=True)
class Load:
    """Tokens of the long prompt; and of many requests at once how many, and their tokens in and out."""

    prompt: int = 4000
    requests: int = 512
    input: int = 512
    output: int = 256


@dataclass(frozen=True)
class Served:
    """Seconds of every try of the long prompt with one token behind it, and of all requests together."""

    load: Load
    prompt: tuple[float, ...]
    requests: float

    @property
    def throughput(self) -> float:
        """Tokens made in a second."""
        return self.load.requests * self.load.output / self.requests


def measure_serving(generate: Generate, vocab: int, load: Load) -> Served:
    """Times `generate` on random prompts, all given at once; every engine gets the same ones in the same order."""
    draw = random.Random(load.prompt)

    def prompts(count: int, tokens: int) -> Prompts:
        return [[draw.randrange(vocab) for _ in range(tokens)] for _ in range(count)]

    def seconds(given: Prompts, count: int) -> float:
        begin = time.perf_counter()
        generate(given, count)
        return time.perf_counter() - begin

    seconds(prompts(1, load.prompt), 1)  # warms up
    prompt = tuple(seconds(prompts(1, load.prompt), 1) for _ in range(_TRIES))
    requests, output = (min(pair) for pair in zip(_WARM_UP, (load.requests, load.output), strict=True))
    seconds(prompts(requests, load.input), output)
    return Served(load, prompt, seconds(prompts(load.requests, load.input), load.output))


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """The sizes of a load, as options of every script that measures one."""
    for field in fields(Load):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help="see serve_method.py")


def load_of(options: argparse.Namespace) -> Load:
    return Load(**{field.name: getattr(options, field.name) for field in fields(Load)})


def load_arguments(load: Load) -> list[str]:
    """The same as arguments of another script."""
    return [item for name, value in asdict(load).items() for item in (f"--{name}", str(value))]
