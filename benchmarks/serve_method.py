"""Measure the serving of any engine, as decode_method.py measures decode. A count of 0 leaves a part out.

prompt     the first token after one long prompt, for each length
requests   many requests of equal lengths, submitted at once
spread     requests of 100 to 1024 tokens in and out, uniformly drawn, submitted at once, as in nano-vllm's bench.py
arrivals   requests that arrive as a Poisson process, with lengths like ShareGPT's
prefix     requests with a common prefix, submitted at once
From ingot.bench this imports only modules of plain Python.
"""

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from ingot.bench.drive import DrivenEngine, Record, Run, drive
from ingot.bench.workload import BenchRequest, Lengths, arrival_times, equal_lengths, make_workload, sharegpt_lengths

_TRIES = 3  # tries of the long prompt
_WARM_UP = (64, 8)  # requests, and output tokens of each, before the load
_SPREAD = (100, 1024)
_PREFIX_OUTPUT = 64  # output tokens after each prompt with the common prefix
_PREFIX_OWN = 128  # tokens of each such prompt after the prefix


@dataclass(frozen=True)
class Load:
    """The sizes of a serving measurement, which has five parts. A count of 0 leaves a part out.

    prompt         long prompts: the tokens of each
    requests       equal requests at once: how many
    input          equal requests at once: the tokens of each prompt
    output         equal requests at once: the tokens of each output
    spread         requests of random lengths at once: how many
    arrivals       requests that arrive over time: how many
    rate           requests that arrive over time: how many per second, for each run
    conversation   requests that arrive over time: the maximum tokens of a prompt and its output
    sharing        requests with a common prefix: how many
    prefix         requests with a common prefix: the tokens of the prefix
    """

    prompt: tuple[int, ...] = (4000,)
    requests: int = 512
    input: int = 512
    output: int = 256
    spread: int = 256
    arrivals: int = 256
    rate: tuple[float, ...] = (16.0,)
    conversation: int = 2048
    sharing: int = 64
    prefix: int = 2048

    @property
    def longest(self) -> int:
        """Return the length of the longest sequence in any part of the measurement: prompt and output together."""
        return max(
            *(tokens + 1 for tokens in self.prompt),
            (self.input + self.output) * (self.requests > 0),
            2 * _SPREAD[1] * (self.spread > 0),
            self.conversation * (self.arrivals > 0),
            (self.prefix + _PREFIX_OWN + _PREFIX_OUTPUT) * (self.sharing > 0),
        )


@dataclass(frozen=True)
class Served:
    """The recorded runs of a serving measurement, by part. A part that was left out is empty.

    `prompt` has all tries of each long prompt, with one output token. `arrivals` has a run for each request rate.
    """

    load: Load
    prompt: tuple[tuple[Run, ...], ...]
    requests: Run
    spread: Run
    arrivals: tuple[Run, ...]
    prefix: Run


def measure_serving(at_end: DrivenEngine, by_token: DrivenEngine, vocab: int, load: Load) -> Served:
    """Run all parts of the serving measurement `load`. Return the recorded runs.

    Prompts are random token ids below `vocab`. Every engine gets the same prompts in the same order.

    `at_end` and `by_token` are two interfaces of one engine. `at_end` reports a request only when it has ended.
    `by_token` reports it at every token, which costs time. It is used for requests that arrive over time, and for
    requests with a common prefix.
    """
    draw = random.Random(0)
    spread = [Lengths(draw.randint(*_SPREAD), draw.randint(*_SPREAD)) for _ in range(load.spread)]
    arriving = sharegpt_lengths(load.arrivals, 0, load.conversation)
    alike = equal_lengths(load.sharing, load.prefix + _PREFIX_OWN, _PREFIX_OUTPUT)
    return Served(
        load,
        prompt=tuple(_tries(at_end, vocab, tokens) for tokens in load.prompt),
        requests=_warm_drive(at_end, vocab, "requests", equal_lengths(load.requests, load.input, load.output)),
        spread=_warm_drive(at_end, vocab, "spread", spread),
        arrivals=tuple(
            _warm_drive(
                by_token,
                vocab,
                f"arrivals at {rate:g}",  # other prompts at each rate, so that the prefix cache has no hits
                arriving,
                arrivals=arrival_times(load.arrivals, rate, 1.0, 0),
            )
            for rate in load.rate
            if load.arrivals
        ),
        prefix=_warm_drive(by_token, vocab, "prefix", alike, prefix=load.prefix),
    )


def _tries(engine: DrivenEngine, vocab: int, tokens: int) -> tuple[Run, ...]:
    lengths = [Lengths(tokens, 1)]
    _, *runs = (_drive(engine, vocab, f"{tokens} tokens, {index}", lengths) for index in range(1 + _TRIES))
    return tuple(runs)  # the first one is the warm-up


def _warm_drive(
    engine: DrivenEngine,
    vocab: int,
    seed: str,
    lengths: Sequence[Lengths],
    *,
    arrivals: Sequence[float] | None = None,
    prefix: int = 0,
) -> Run:
    """Serve requests with these `lengths`. Return the recorded run.

    A few similar, shorter requests are served before as a warm-up. They are not in the run. `seed` determines the
    random prompts. They begin with `prefix` common tokens. Requests arrive at the times `arrivals`. If it is None, all
    arrive at once.
    """
    few, tokens = _WARM_UP
    short = [Lengths(one.prompt, min(one.output, tokens)) for one in lengths[:few]]
    _drive(engine, vocab, f"before {seed}", short, prefix=prefix)
    return _drive(engine, vocab, seed, lengths, arrivals=arrivals, prefix=prefix)


def _drive(
    engine: DrivenEngine,
    vocab: int,
    seed: str,
    lengths: Sequence[Lengths],
    *,
    arrivals: Sequence[float] | None = None,
    prefix: int = 0,
) -> Run:
    run = drive(engine, make_workload(lengths, range(vocab), seed, arrivals=arrivals, shared_prefix=prefix))
    if run.interrupted:
        raise KeyboardInterrupt
    if len(run.completed) < len(lengths):
        raise RuntimeError(f"{len(lengths) - len(run.completed)} of {len(lengths)} requests did not end")
    return run


def served_of(answer: Mapping[str, Any]) -> Served:
    """Decode a Served object from `answer`, the JSON form of its `dataclasses.asdict`."""
    runs = {name: _run_of(answer[name]) for name in ("requests", "spread", "prefix")}
    load = Load(**{name: tuple(value) if isinstance(value, list) else value for name, value in answer["load"].items()})
    prompt = tuple(tuple(map(_run_of, tries)) for tries in answer["prompt"])
    return Served(load, prompt=prompt, arrivals=tuple(map(_run_of, answer["arrivals"])), **runs)


def _run_of(answer: Mapping[str, Any]) -> Run:
    records = []
    for one in answer["records"]:
        request = BenchRequest(**{**one["request"], "prompt": tuple(one["request"]["prompt"])})
        records.append(Record(**{**one, "request": request}))
    return Run(**{**answer, "records": tuple(records)})


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add a command line option to the parser for each field of Load, the sizes of a serving measurement."""
    for field in fields(Load):
        kind = type(field.default)
        if kind is tuple:  # all elements have the type of the first one
            kind = partial(_above_zero, type(field.default[0]))
        parser.add_argument(f"--{field.name}", type=kind, default=field.default, help="see Load in serve_method.py")


def _above_zero(kind: type[int] | type[float], text: str) -> tuple[int | float, ...]:
    """Parse numbers from a text such as "16,32". Numbers that are 0 are left out. `kind` is int or float."""
    return tuple(filter(None, map(kind, text.split(","))))


def load_of(options: argparse.Namespace) -> Load:
    return Load(**{field.name: getattr(options, field.name) for field in fields(Load)})


def load_settings(load: Load) -> dict[str, int | str]:
    """Return the fields of a Load by name, as settings to record in a result.

    A field with several values becomes a text, with commas between the values.
    """
    return {
        name: (",".join(f"{one:g}" for one in value) or "0") if isinstance(value, tuple) else value
        for name, value in asdict(load).items()
    }


def load_arguments(load: Load) -> list[str]:
    """Return the fields of a Load as command line arguments for another script."""
    return [item for name, value in load_settings(load).items() for item in (f"--{name}", str(value))]
