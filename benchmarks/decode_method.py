"""The method by which every engine's decode is measured: prompts, lengths and formula.

The time of a step is the difference between long and short outputs over the number of tokens between them. One-time
costs of a request, such as its prompt and its start, are in both and cancel. For each length the minimum of some tries
counts, since other work on the machine only adds. A long output is generated before, without being timed. Engines are
measured in their own processes, which cannot import Ingot: this module needs only Python.
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
    """The output lengths of a decode measurement.

    `long` and `short` are the numbers of tokens of long and of short outputs. Each length is timed `tries` times.
    """

    long: int
    short: int
    tries: int

    @property
    def context(self) -> float:
        """Return the mean context length of the measured decode steps.

        The measured steps generate tokens short + 1 to long of an output, counted from 1. The step that generates token
        n attends to PROMPT_TOKENS + n - 1 positions.
        """
        return PROMPT_TOKENS + (self.short + self.long - 1) / 2

    @property
    def tokens(self) -> int:
        """Return the length of the longest sequence in the measurement: the tokens of a prompt and a long output."""
        return PROMPT_TOKENS + self.long


@dataclass(frozen=True)
class Decoded:
    """The results of a decode measurement: the seconds of each try, for long and for short outputs."""

    lengths: Lengths
    long: tuple[float, ...]
    short: tuple[float, ...]

    @property
    def step(self) -> float:
        """Return the seconds of one decode step.

        The time of the fastest short output is subtracted from the time of the fastest long output. The difference is
        divided by the number of tokens between the two lengths.
        """
        return (min(self.long) - min(self.short)) / (self.lengths.long - self.lengths.short)


def lengths_of(batch: int) -> Lengths:
    """Return the default output lengths for a batch size.

    Larger batches have shorter outputs, because prefill takes longer and steps vary less.
    """
    return Lengths(640, 128, 3) if batch == 1 else Lengths(320, 64, 3)


def draw_prompts(vocab: int, batch: int, draw: random.Random | None = None) -> Prompts:
    """Return `batch` random prompts of token ids below `vocab`. Without `draw`, they are the first of a measurement."""
    draw = random.Random(batch) if draw is None else draw
    return [[draw.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]


def measure_decode(generate: Generate, vocab: int, batch: int, lengths: Lengths) -> Decoded:
    """Time `generate` on `batch` random prompts, with long and with short outputs.

    Token ids are below `vocab`. Every engine gets the same prompts. Exits if the long outputs took no longer than the
    short ones: the machine is then too busy.
    """
    draw = random.Random(batch)

    def seconds(count: int) -> float:
        prompts = draw_prompts(vocab, batch, draw)
        begin = time.perf_counter()
        generate(prompts, count)
        return time.perf_counter() - begin

    seconds(lengths.long)  # warm-up, as long as any try: some engines compile kernels while they decode
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
    """Return the fields of Lengths that the command line's options set, with their values."""
    names = [field.name for field in fields(Lengths)]
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def length_arguments(options: argparse.Namespace) -> list[str]:
    """Return the fields of Lengths that the command line's options set, as command line arguments for another
    script."""
    return [item for name, value in length_changes(options).items() for item in (f"--{name}", str(value))]
