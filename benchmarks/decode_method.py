"""How decoding is measured, of whatever engine: prompts, lengths and formula.

A step takes what long outputs take less what short ones take, over the tokens between them. What a request costs once,
its prompt and its start, is in both, and goes. Of each length the least of some tries counts, since other work on the
machine only ever adds.

Engines are measured in processes of their own, where nothing of Ingot can be imported: this needs Python alone.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

PROMPT_TOKENS = 128
Prompts = list[list[int]]
Generate = Callable[[Prompts, int], object]  # prompts, and how many tokens to make of each, whatever they are


@dataclass(frozen=True)
class Lengths:
    """Tokens of long and of short outputs, and how often each is tried."""

    long: int
    short: int
    tries: int

    @property
    def context(self) -> float:
        """Positions that a measured step sees, its own included, on average.

        A step that makes the token n of an output, counted from 1, sees PROMPT_TOKENS + n - 1 of them, and measured are
        the steps from short + 1 to long.
        """
        return PROMPT_TOKENS + (self.short + self.long - 1) / 2

    @property
    def tokens(self) -> int:
        """Positions of a sequence at its longest."""
        return PROMPT_TOKENS + self.long


@dataclass(frozen=True)
class Decoded:
    """Seconds of every try."""

    lengths: Lengths
    long: tuple[float, ...]
    short: tuple[float, ...]

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return (min(self.long) - min(self.short)) / (self.lengths.long - self.lengths.short)


def lengths_of(batch: int) -> Lengths:
    """A batch takes longer to prefill and its steps differ less, so that it is measured over fewer tokens."""
    return Lengths(640, 128, 3) if batch == 1 else Lengths(320, 64, 2)


def measure_decode(generate: Generate, vocab: int, batch: int, lengths: Lengths) -> Decoded:
    """Times `generate` on random prompts of `batch` sequences; every engine gets the same ones in the same order.

    Ends the benchmark when the long outputs took no longer than the short ones.
    """
    draw = random.Random(batch)

    def seconds(count: int) -> float:
        prompts = [[draw.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        begin = time.perf_counter()
        generate(prompts, count)
        return time.perf_counter() - begin

    seconds(min(16, lengths.short))  # warms up
    short = tuple(seconds(lengths.short) for _ in range(lengths.tries))
    long = tuple(seconds(lengths.long) for _ in range(lengths.tries))
    decoded = Decoded(lengths, long, short)
    if decoded.step <= 0:
        sys.exit(f"{lengths.long} tokens took no longer than {lengths.short}: the machine is too busy to measure on")
    return decoded


# The options of every script that measures decoding, to measure less of it than its figures are quoted for.


def add_length_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--long", type=int, help="tokens of the long outputs; the default depends on the batch")
    parser.add_argument("--short", type=int, help="tokens of the short ones")
    parser.add_argument("--tries", type=int, help="of each length, of which the least counts")


def length_changes(options: argparse.Namespace) -> dict[str, int]:
    """Fields of Lengths that the options change."""
    names = [field.name for field in fields(Lengths)]
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def length_arguments(options: argparse.Namespace) -> list[str]:
    """The same as arguments of another script."""
    return [item for name, value in length_changes(options).items() for item in (f"--{name}", str(value))]
