"""Measure decode of any engine: prompts, lengths and formula.

The time of a step is the difference between long and short outputs over the number of tokens between them. One-time
costs of a request, such as its prompt and its start, are in both and cancel. For each length the minimum of some tries
counts, since other work on the machine only adds.
Engines are measured in their own processes, which cannot import Ingot: this module needs only Python.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

PROMPT_TOKENS = 128
Prompts = list[list[int]]
Generate = Callable[[Prompts, int], object]  # prompts, and the number of tokens to generate for each


@dataclass(frozen=True)
class Lengths:
    """Tokens of long and of short outputs, and the tries of each."""

    long: int
    short: int
    tries: int

    @property
    def context(self) -> float:
        """Return the mean number of positions that a measured step attends to, its own included.

        A step that makes token n of an output, counted from 1, attends to PROMPT_TOKENS + n - 1 of them; the measured
        steps are those from short + 1 to long.
        """
        return PROMPT_TOKENS + (self.short + self.long - 1) / 2

    @property
    def tokens(self) -> int:
        """Return the positions of a sequence at its longest."""
        return PROMPT_TOKENS + self.long


@dataclass(frozen=True)
class Decoded:
    """The seconds of every try."""

    lengths: Lengths
    long: tuple[float, ...]
    short: tuple[float, ...]

    @property
    def step(self) -> float:
        """Return the seconds of a step."""
        return (min(self.long) - min(self.short)) / (self.lengths.long - self.lengths.short)


def lengths_of(batch: int) -> Lengths:
    """Return the lengths to measure. A larger batch uses fewer tokens: its prefill is longer, its steps vary less."""
    return Lengths(640, 128, 3) if batch == 1 else Lengths(320, 64, 2)


def measure_decode(generate: Generate, vocab: int, batch: int, lengths: Lengths) -> Decoded:
    """Time `generate` on random prompts of `batch` sequences; every engine gets the same ones in the same order.

    Exits if the long outputs took no longer than the short ones.
    """
    draw = random.Random(batch)

    def seconds(count: int) -> float:
        prompts = [[draw.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        begin = time.perf_counter()
        generate(prompts, count)
        return time.perf_counter() - begin

    seconds(min(16, lengths.short))  # warm-up
    short = tuple(seconds(lengths.short) for _ in range(lengths.tries))
    long = tuple(seconds(lengths.long) for _ in range(lengths.tries))
    decoded = Decoded(lengths, long, short)
    if decoded.step <= 0:
        sys.exit(f"{lengths.long} tokens took no longer than {lengths.short}: the machine is too busy to measure on")
    return decoded


# Options of every script that measures decode, to measure less than for published figures.


def add_length_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--long", type=int, help="tokens of the long outputs; the default depends on the batch")
    parser.add_argument("--short", type=int, help="tokens of the short outputs")
    parser.add_argument("--tries", type=int, help="tries of each length; the minimum counts")


def length_changes(options: argparse.Namespace) -> dict[str, int]:
    """Return the fields of Lengths that the options change."""
    names = [field.name for field in fields(Lengths)]
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def length_arguments(options: argparse.Namespace) -> list[str]:
    """Return these fields as arguments of another script."""
    return [item for name, value in length_changes(options).items() for item in (f"--{name}", str(value))]
