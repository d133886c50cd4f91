"""Tile sizes of the kernels of linear, tried on this GPU: how near to the memory's bandwidth each comes.

    python benchmarks/kernels/tune_linear.py [--out tune_linear.json] [--seconds 120] [--tokens 1,32,8,64]

Times the products of three decoders' layers as a step calls them, with the norm, gate or residual that a region has
around them. A CUDA graph holds a row of launches, each of which may begin before the one in front has ended, over
weights that lie far apart in 3 GB, so that no cache holds any. Bytes are those of the weights. The fraction is of a
copy in the same run, read and write together. Kernels are compiled in other processes, ahead of the measurements. At
the end whole stacks of layers run, with a pause in place of attention, and each product in turn takes those of its best
sizes that serve the stack best: there a kernel also has to leave room for the next one, which loads its first weights
meanwhile.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import triton
from linear_bench import PAUSE, Bench, Call, compile_all, pause
from linear_products import (
    CORES,
    DECODERS,
    Chosen,
    Decoder,
    Part,
    best_known,
    candidates,
    for_other_tokens,
    more_candidates,
)

from ingot.backends.triton.lower.linear_tiles import MatvecTiles, Tiles

Job = tuple[str, Part, Chosen]  # with the decoder's name
_KEPT = 8  # of the best tiles for one number of tokens are tried for another


@dataclass(frozen=True)
class Found:
    """One measurement: what a launch took, and the share of a copy's bandwidth at which it read its weights."""

    decoder: str
    part: Part
    tokens: int
    chosen: Chosen
    microseconds: float
    fraction: float

    def row(self) -> dict[str, Any]:
        part = self.part
        return {
            "decoder": self.decoder,
            "part": part.name,
            **_sizes(part, self.tokens, self.chosen),
            "microseconds": round(self.microseconds, 2),
            "gb_per_second": round(part.bytes / self.microseconds / 1e3),
            "fraction": round(self.fraction, 4),
        }


def _sizes(part: Part, tokens: int, chosen: Chosen) -> dict[str, Any]:
    return {"columns": part.columns, "depth": part.depth, "gated": part.gated, "tokens": tokens, **asdict(chosen)}


def tune(
    bench: Bench, pool: ProcessPoolExecutor, tokens: int, earlier: Sequence[Found], deadline: float
) -> list[Found]:
    """Measurements of all parts for steps of `tokens`: of all candidates, or, where there are `earlier` ones for
    another number of tokens, of those that did best there."""
    jobs: list[list[Job]] = []
    for decoder in DECODERS:
        for part in (*decoder.layer(), decoder.head()):
            known = sorted((one for one in earlier if one.part == part), key=_time)
            kept = [one.chosen for one in known[:_KEPT] if isinstance(one.chosen, Tiles)]
            tried = [for_other_tokens(part, tokens, chosen) for chosen in kept] or candidates(part, tokens)
            first = best_known(part, tokens)
            jobs.append([(decoder.name, part, chosen) for chosen in dict.fromkeys([first, *tried])])
    in_turns = [job for turn in zip_longest(*jobs) for job in turn if job is not None]  # the deadline hits all alike
    now = time.monotonic()
    found = _measure_all(bench, pool, tokens, in_turns, now + 0.75 * (deadline - now))
    more = [
        (one.decoder, one.part, chosen)
        for one in best_of(found)
        for chosen in more_candidates(one.part, tokens, one.chosen)
    ]
    return found + _measure_all(bench, pool, tokens, more, deadline)


def _measure_all(
    bench: Bench, pool: ProcessPoolExecutor, tokens: int, jobs: Sequence[Job], deadline: float
) -> list[Found]:
    """In the order in which the kernels come out of the compiler; what is left at the deadline is left out."""
    found: list[Found] = []
    compiled = {pool.submit(compile_all, part, tokens, chosen): (name, part, chosen) for name, part, chosen in jobs}
    try:
        for future in as_completed(compiled, timeout=max(1.0, deadline - time.monotonic())):
            name, part, chosen = compiled[future]
            try:
                future.result()
                seconds = bench.measure(part, tokens, chosen)
                share = part.bytes / seconds / bench.copy
                found.append(Found(name, part, tokens, chosen, seconds * 1e6, share))
            except (triton.runtime.errors.TritonError, triton.CompilationError, RuntimeError) as error:
                print(f"{name} {part.name}, {tokens} tokens, {chosen}: {error}"[:300])
            if time.monotonic() > deadline:
                raise TimeoutError
    except TimeoutError:
        print(f"out of time: {len(found)} of {len(jobs)} measured for {tokens} tokens")
        for future in compiled:
            future.cancel()
    return found


def best_of(found: Sequence[Found]) -> list[Found]:
    """The fastest for each part and number of tokens, in the order of the parts."""
    best: dict[tuple[str, Part, int], Found] = {}
    for one in sorted(found, key=_time):
        best.setdefault((one.decoder, one.part, one.tokens), one)
    names = [decoder.name for decoder in DECODERS]
    parts = ["qkv", "o", "gate_up", "down", "head"]
    return sorted(best.values(), key=lambda one: (one.tokens, names.index(one.decoder), parts.index(one.part.name)))


def _time(found: Found) -> float:
    return found.microseconds


class Stack:
    """All products of a decoder's step in a row, with a pause where attention runs."""

    def __init__(self, bench: Bench, decoder: Decoder, tokens: int) -> None:
        self.bench, self.decoder, self.tokens = bench, decoder, tokens
        self.parts = (*decoder.layer(), decoder.head())
        self.calls: dict[tuple[Part, Chosen], Call] = {}

    def seconds(self, chosen: Mapping[Part, Chosen]) -> float:
        """Raises what Triton raises for tiles that do not fit."""
        for part in self.parts:
            if (part, chosen[part]) not in self.calls:  # made, and loaded, outside of the recording
                call = self.calls[part, chosen[part]] = Call(part, self.tokens, chosen[part])
                call(self.bench.inputs(part, self.tokens))
        return self.bench.graph_seconds(self._launches(chosen))

    def _launches(self, chosen: Mapping[Part, Chosen]) -> Iterator[Callable[[], None]]:
        *layer, head = self.parts
        for part in (*layer * self.decoder.layers, head):
            yield partial(self.calls[part, chosen[part]], self.bench.inputs(part, self.tokens))
            if part.name == "qkv":
                yield pause

    def refine(
        self, pool: ProcessPoolExecutor, found: Sequence[Found], deadline: float
    ) -> tuple[dict[Part, Chosen], float, float]:
        """The best sizes for the stack, what it takes with the best for each product by itself, and with these."""
        tried = {part: self._tried(part, found) for part in self.parts}
        wait([pool.submit(compile_all, part, self.tokens, one) for part in self.parts for one in tried[part]])
        best = {part: tried[part][0] for part in self.parts}
        first = least = self.seconds(best)
        for part in (*self.parts, *self.parts):
            for chosen in tried[part]:
                if chosen == best[part] or time.monotonic() > deadline:
                    continue
                try:
                    seconds = self.seconds({**best, part: chosen})
                except triton.runtime.errors.OutOfResources:
                    continue
                if seconds < least:
                    best, least = {**best, part: chosen}, seconds
        return best, first, least

    def _tried(self, part: Part, found: Sequence[Found]) -> list[Chosen]:
        """The fastest by themselves, first of all the very fastest; some with weights fetched ahead; the known."""
        fastest = [one.chosen for one in sorted(found, key=_time) if one.part == part][:_KEPT]
        ahead: list[Chosen] = [replace(one, lines=lines) for one in fastest[:3] for lines in (0, 16)]
        for one in fastest[:4]:
            if isinstance(one, MatvecTiles):
                waves = part.columns // (one.block_n * 2 * CORES)  # that follow the first
                ahead += [replace(one, ahead=later) for later in (1, 2, 4, 8) if later < waves]
        return list(dict.fromkeys([*fastest, *ahead, best_known(part, self.tokens)]))

    def row(self, pool: ProcessPoolExecutor, found: Sequence[Found], deadline: float) -> dict[str, Any]:
        best, first, least = self.refine(pool, found, deadline)
        moved = sum(part.bytes for part in (*self.decoder.layer() * self.decoder.layers, self.decoder.head()))
        return {
            "decoder": self.decoder.name,
            "tokens": self.tokens,
            "microseconds_by_itself": round(first * 1e6, 1),
            "microseconds": round(least * 1e6, 1),
            "fraction": round(moved / least / self.bench.copy, 4),
            "pauses": round(PAUSE * 1e-3 * self.decoder.layers, 1),
            "best": [{"part": part.name, **_sizes(part, self.tokens, chosen)} for part, chosen in best.items()],
        }


def print_table(found: Sequence[Found]) -> None:
    """The best by themselves, as lines for the tables of lower/linear_tiles.py."""
    for one in best_of(found):
        part = one.part
        place = f"{one.tokens:2} tokens, {one.decoder} {part.name}:"
        key = f"Product({part.columns}, {part.depth}{', gated=True' if part.gated else ''})"
        print(f"{place:24}{one.microseconds:7.1f} µs  {key}: {one.chosen},  # {one.fraction:.0%}")


def _share_of(deadline: float, part: float) -> float:
    """When `part` of the time until the deadline is over."""
    now = time.monotonic()
    return now + part * max(0.0, deadline - now)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tune_linear.json"))
    parser.add_argument("--seconds", type=float, default=120.0, help="after which no more is tried")
    parser.add_argument("--tokens", default="1,32,8,64", help="of a step, separated by commas; 64 follows 32")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds - 10.0  # for the stacks, and to write
    found: list[Found] = []
    stacks: list[dict[str, Any]] = []
    workers = max(1, (os.cpu_count() or 1) - 2)
    # Forked workers would share the device's context, which does not outlive a fork.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        bench = Bench()
        print(f"copy: {bench.copy / 1e9:.0f} GB/s on {torch.cuda.get_device_name()}")
        steps = [int(tokens) for tokens in options.tokens.split(",")]
        for place, tokens in enumerate(steps):
            # Of the time that is left, more than the last ones get: those begin from the measurements of the first.
            until = _share_of(deadline, min(1.0, 1.6 / (len(steps) - place)))
            earlier = [one for one in found if one.tokens == 32 and tokens == 64]
            mine = tune(bench, pool, tokens, earlier, _share_of(until, 0.65))
            found += mine
            for index, decoder in enumerate(DECODERS):
                stop = _share_of(until, 1 / (len(DECODERS) - index))
                stacks.append(Stack(bench, decoder, tokens).row(pool, mine, stop))
                print(stacks[-1], flush=True)
        pool.shutdown(cancel_futures=True)
    print_table(found)
    document = {
        "device": torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "copy_gb_per_second": round(bench.copy / 1e9),
        "stacks": stacks,
        "best": [one.row() for one in best_of(found)],
        "all": [one.row() for one in found],
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
