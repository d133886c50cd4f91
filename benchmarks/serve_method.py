"""How serving is measured, of whatever engine; as in decode_method.py. A count of 0 leaves a part out.

prompt     the first token behind one long prompt
requests   many requests of equal lengths, given at once
arrivals   requests that arrive one by one, as a Poisson process, with lengths like those of ShareGPT's conversations
prefix     requests that are given at once and begin with the same tokens

Of ingot.bench this takes what is plain Python alone.
"""

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from decode_method import Generate, Prompts

from ingot.bench.drive import DrivenEngine, Record, Run, drive
from ingot.bench.workload import BenchRequest, Lengths, arrival_times, equal_lengths, make_workload, sharegpt_lengths

_TRIES = 3  # of the long prompt
_WARM_UP = (64, 8)  # requests, and tokens of each, in front of the load
_PREFIX_OUTPUT = 64  # tokens to make behind each prompt with the common beginning
_PREFIX_OWN = 128  # tokens of each such prompt behind it


@dataclass(frozen=True)
class Load:
    """Tokens of the long prompt; of many requests at once how many, and their tokens in and out; of those that arrive
    how many, how many of them in a second, and the tokens of the longest; of those with a common beginning how many,
    and its tokens."""

    prompt: int = 4000
    requests: int = 512
    input: int = 512
    output: int = 256
    arrivals: int = 256
    rate: float = 16.0
    conversation: int = 2048
    sharing: int = 64
    prefix: int = 2048

    @property
    def longest(self) -> int:
        """Positions of the longest sequence that is asked for."""
        return max(
            (self.prompt + 1) * (self.prompt > 0),
            (self.input + self.output) * (self.requests > 0),
            self.conversation * (self.arrivals > 0),
            (self.prefix + _PREFIX_OWN + _PREFIX_OUTPUT) * (self.sharing > 0),
        )


@dataclass(frozen=True)
class Served:
    """Seconds of every try of the long prompt with one token behind it, and of all requests together, 0 of none; and
    what became of the requests that arrived, and of those with a common beginning."""

    load: Load
    prompt: tuple[float, ...]
    requests: float
    arrivals: Run
    prefix: Run

    @property
    def throughput(self) -> float:
        """Tokens made in a second."""
        return self.load.requests * self.load.output / self.requests


def measure_serving(generate: Generate, engine: DrivenEngine, vocab: int, load: Load) -> Served:
    """Times `generate` and drives `engine`, which are one, on random prompts; every engine gets the same ones in the
    same order."""
    draw = random.Random(load.prompt)

    def prompts(count: int, tokens: int) -> Prompts:
        return [[draw.randrange(vocab) for _ in range(tokens)] for _ in range(count)]

    def seconds(given: Prompts, count: int) -> float:
        begin = time.perf_counter()
        generate(given, count)
        return time.perf_counter() - begin

    prompt: tuple[float, ...] = ()
    if load.prompt:
        seconds(prompts(1, load.prompt), 1)  # warms up
        prompt = tuple(seconds(prompts(1, load.prompt), 1) for _ in range(_TRIES))
    requests = 0.0
    if load.requests:
        few, output = (min(pair) for pair in zip(_WARM_UP, (load.requests, load.output), strict=True))
        seconds(prompts(few, load.input), output)
        requests = seconds(prompts(load.requests, load.input), load.output)
    lengths = sharegpt_lengths(load.arrivals, 0, load.conversation)
    times = arrival_times(load.arrivals, load.rate, 1.0, 0) if load.arrivals else []
    arrivals = _drive(engine, vocab, lengths, times)
    alike = equal_lengths(load.sharing, load.prefix + _PREFIX_OWN, _PREFIX_OUTPUT)
    return Served(load, prompt, requests, arrivals, _drive(engine, vocab, alike, [0.0] * load.sharing, load.prefix))


def _drive(
    engine: DrivenEngine, vocab: int, lengths: Sequence[Lengths], arrivals: Sequence[float], prefix: int = 0
) -> Run:
    """After others of the same kind, which warm up."""
    few = min(len(lengths), _WARM_UP[0])
    short = [Lengths(one.prompt, min(one.output, _WARM_UP[1])) for one in lengths[:few]]
    drive(engine, make_workload(short, range(vocab), 1, shared_prefix=prefix))
    run = drive(engine, make_workload(lengths, range(vocab), 2, arrivals=arrivals, shared_prefix=prefix))
    if len(run.completed) < len(lengths):
        raise RuntimeError(f"{len(lengths) - len(run.completed)} of {len(lengths)} requests did not come to their end")
    return run


def served_of(answer: Mapping[str, Any]) -> Served:
    """What `dataclasses.asdict` made of it, after JSON."""
    runs = [_run_of(answer[name]) for name in ("arrivals", "prefix")]
    return Served(Load(**answer["load"]), tuple(answer["prompt"]), answer["requests"], *runs)


def _run_of(answer: Mapping[str, Any]) -> Run:
    records = []
    for one in answer["records"]:
        request = BenchRequest(**{**one["request"], "prompt": tuple(one["request"]["prompt"])})
        records.append(Record(**{**one, "request": request}))
    return Run(**{**answer, "records": tuple(records)})


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """The sizes of a load, as options of every script that measures one."""
    for field in fields(Load):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default, help="see Load")


def load_of(options: argparse.Namespace) -> Load:
    return Load(**{field.name: getattr(options, field.name) for field in fields(Load)})


def load_arguments(load: Load) -> list[str]:
    """The same as arguments of another script."""
    return [item for name, value in asdict(load).items() for item in (f"--{name}", str(value))]
