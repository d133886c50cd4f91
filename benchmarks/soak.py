"""Soak an engine: serve minutes of mixed requests, and check that none is lost and all resources are returned.

    python benchmarks/soak.py ARTIFACT [--minutes 10] [--rate R] [--json FILE]

Requests arrive as a Poisson process, R per second. The rate should be 0.8 of the rate at which waits begin to grow,
which serve.py shows for several rates; the default is 0.8 of the engine's requests per second when they are submitted
at once. Lengths are like ShareGPT's, one in twenty near the limit, one in twenty a few tokens. Sampling, stop
conditions, priorities, shared prefixes and streaming are mixed. One in ten is cancelled, before its first token or
later, and one in a hundred can never be served and must be refused. Probes are greedy requests among them that ran
alone before, so that their tokens can be compared. All is drawn by --seed (ingot/bench/soak_load.py).
The resources at the end are compared with those after a minute of the same load. The exit code is 1, with the reason,
if a request did not end as it must, or if something was not returned. For an artifact compiled with --deterministic it
is also 1 if a probe's tokens differ from those it got alone; for other artifacts the share that differs is reported.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from results import Figure, add_json_option, report

from ingot import LLM
from ingot.bench.engine import plain_tokens
from ingot.bench.holdings import Holdings, take_holdings
from ingot.bench.metrics import percentile
from ingot.bench.soak import Soak, run_soak
from ingot.bench.soak_load import SoakRequest, Vocabulary, probe_requests, soak_requests, spread_in
from ingot.runtime.loading.loader import Loaded

_OF_KNEE = 0.8
_BURST = 4  # requests per batch row to find the rate
# Limits of the growth between the two measurements.
# Heap that malloc cannot return because small objects are at its end: three minutes of a small model on a CPU left 0.2
# to 0.8 MB.
_ALLOWED_ANONYMOUS = 32 << 20
# One segment of torch's caching allocator (kLargeBuffer in c10/cuda/CUDACachingAllocator.cpp).
_ALLOWED_DEVICE = 20 << 20


@dataclass(frozen=True)
class Soaked:
    """The results of a soak test, a long run of mixed requests.

    soak            what ran, and how each request ended
    alone           the tokens of each probe when it runs alone; a probe runs alone first, and then under load
    before          the resources that the engine held before the load
    after           the resources that the engine held after the load
    kept            the number of pages that the prefix cache finds after it was emptied; it should be 0
    deterministic   True if the artifact was compiled with --deterministic
    """

    soak: Soak
    alone: Sequence[tuple[int, ...]]
    before: Holdings
    after: Holdings
    kept: int
    deterministic: bool

    @property
    def equal(self) -> int:
        """Return how many probes generated the same tokens under load as alone. A probe is a request that runs both
        ways."""
        pairs = zip(self.soak.requests, self.soak.outcomes, strict=True)
        return sum(one.token_ids == self.alone[asked.probe] for asked, one in pairs if asked.probe is not None)

    def ended(self, reason: str) -> int:
        return sum(one.ended == reason for one in self.soak.outcomes)

    @property
    def faults(self) -> list[str]:
        return [f"request {index} {one.fault}" for index, one in enumerate(self.soak.outcomes) if one.fault]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=1.0, help="minutes of the same load before the measurement")
    parser.add_argument("--rate", type=float, help="requests in a second")
    parser.add_argument("--probes", type=int, default=50)
    parser.add_argument("--pages", type=int, help="pages of the KV cache, instead of those that fit into memory")
    parser.add_argument("--seed", type=int, default=0)
    add_json_option(parser)
    options = parser.parse_args()
    if options.minutes <= 0:
        sys.exit(f"--minutes is {options.minutes:g}: expected a number above 0")
    # Capture all graphs first: a later capture would look like growth.
    llm = LLM(options.artifact, scheduling_policy="priority", num_kv_pages=options.pages, cuda_graphs="all")
    loaded = llm.loaded
    rate = options.rate or _OF_KNEE * answered(llm, options.seed)
    soaked = soak(llm, rate, options)
    settings = {
        "artifact": options.artifact.name,
        "deterministic": soaked.deterministic,
        "max_batch": loaded.limits.max_batch,
        "max_seq_len": loaded.limits.max_seq_len,
        "pages": loaded.num_pages,
        **{name: getattr(options, name) for name in ("minutes", "warm_up", "probes", "seed")},
        "rate": rate,
    }
    report(__file__, options.json, settings, figures(soaked))
    if found := list(failures(soaked)):
        sys.exit("\n".join(found))


def answered(llm: LLM, seed: int) -> float:
    """Return how many requests per second the engine completes while its batch is full."""
    count = _BURST * llm.loaded.limits.max_batch
    burst = _requests(llm.loaded, count, math.inf, f"{seed} burst")
    return count / _run(llm, burst).seconds


def soak(llm: LLM, rate: float, options: argparse.Namespace) -> Soaked:
    loaded, engine = llm.loaded, llm.llm_engine
    if loaded.context.device.type == "cpu":
        for state in loaded.executor.states.values():
            state.zero_()  # pages take memory on first write, and all will be written
    probes = probe_requests(options.probes, loaded.limits, plain_tokens(loaded), options.seed)
    alone = [_run(llm, [one]).outcomes[0].token_ids for one in probes]
    llm.reset_prefix_cache()
    seconds, warm_up = 60 * options.minutes, 60 * options.warm_up
    beside = max(0, round(rate * seconds) - len(probes))  # the probes are part of the load
    others = _requests(loaded, beside, beside / seconds, options.seed) if beside else []
    load = spread_in(others, probes, seconds)
    _run(llm, _requests(loaded, max(1, round(rate * warm_up)), rate, f"{options.seed} warm-up"))
    before = take_holdings(engine)
    done = _run(llm, load)
    after = take_holdings(engine)
    llm.reset_prefix_cache()
    deterministic = bool(loaded.artifact.manifest.model.get("deterministic"))
    return Soaked(done, alone, before, after, engine.occupancy.pages_kept, deterministic)


def _requests(loaded: Loaded, count: int, rate: float, seed: int | str) -> list[SoakRequest]:
    tokenizer = loaded.tokenizer
    text = None if tokenizer is None else lambda token: tokenizer.decode([token])
    return soak_requests(count, rate, loaded.limits, Vocabulary(plain_tokens(loaded), text), seed)


def _run(llm: LLM, requests: Sequence[SoakRequest]) -> Soak:
    return run_soak(llm.llm_engine, requests, longest=llm.loaded.limits.max_seq_len)


def figures(soaked: Soaked) -> dict[str, Figure]:
    done, before, after = soaked.soak, soaked.before, soaked.after
    asked = len(soaked.alone)
    device = {} if after.device is None or before.device is None else {"device": after.device - before.device}
    counts = {
        "requests": (len(done.requests), "requests that arrived"),
        "tokens": (sum(one.tokens for one in done.outcomes), "tokens made"),
        "errors": (len(soaked.faults), "requests that did not end as they had to"),
        "unended": (soaked.ended(""), "requests that never ended"),
        "cancelled": (soaked.ended("abort"), "requests cancelled before their end"),
        "refused": (soaked.ended("refused"), "requests that could never be served, and were refused"),
        "stopped": (soaked.ended("stop"), "requests that a stop condition ended"),
        "preemptions": (after.occupancy.preemptions - before.occupancy.preemptions, "sequences that lost their pages"),
        "running": (done.most_running, "sequences that ran at a time, the most"),
        "waiting": (done.most_waiting, "sequences that waited at a time, the most"),
        "pages": (after.occupancy.pages_held + after.occupancy.pages_releasing, "KV pages held at the end"),
        "pages_kept": (soaked.kept, "KV pages that the emptied prefix cache still finds"),
        "fds": (after.fds - before.fds, "more file descriptors open at the end"),
        "objects": (after.objects - before.objects, "more objects of the runtime at the end"),
        "probes": (asked, "greedy requests among them that were answered alone before"),
        "probes_equal": (soaked.equal, "of these, answered as before"),
    }
    memory = {"rss": after.anonymous - before.anonymous, **{f"{name}_memory": size for name, size in device.items()}}
    where = {"rss": "of the process that no file backs", "device_memory": "of the GPU"}
    return {
        **{name: Figure(value=value, unit="", what=what) for name, (value, what) in counts.items()},
        **{
            f"{name}_growth": Figure(value=size, unit="B", what=f"more memory {where[name]} at the end")
            for name, size in memory.items()
        },
        **{
            f"wait_p99_{name}": Figure(
                value=wait, unit="s", what=f"until the first token, the 99th percentile, {name} third"
            )
            for name, wait in waits(done).items()
        },
    }


def waits(done: Soak) -> dict[str, float]:
    """Return the 99th percentile of the time to first token in seconds, for two groups of requests.

    "first" are the requests that arrived in the first third of the time, "last" those of the last third.
    """
    pairs = zip(done.requests, done.outcomes, strict=True)
    found = [(asked.arrival, one.first - asked.arrival) for asked, one in pairs if not math.isnan(one.first)]
    third = max(one.arrival for one in done.requests) / 3
    first = [wait for arrival, wait in found if arrival <= third]
    last = [wait for arrival, wait in found if arrival > 2 * third]
    return {"first": percentile(first, 99), "last": percentile(last, 99)}


def failures(soaked: Soaked) -> Iterator[str]:
    """Yield a message for each failure of the soak test.

    Failures are lost requests, resources that were not freed, and wrong tokens of a deterministic artifact.
    """
    before, after = soaked.before, soaked.after
    yield from soaked.faults[:10]
    if lost := soaked.ended(""):
        yield f"{lost} requests never ended"
    left = after.occupancy
    if left.waiting or left.running or left.steps or left.pages_held or left.pages_releasing:
        yield f"at the end the engine still serves something: {left}"
    if left.free_rows != before.occupancy.free_rows:
        yield f"{left.free_rows} device rows are free at the end, {before.occupancy.free_rows} were before"
    if soaked.kept:
        yield f"the emptied prefix cache still finds {soaked.kept} pages"
    if after.fds != before.fds:
        yield f"{after.fds} file descriptors are open at the end, {before.fds} were before"
    if after.objects > before.objects:
        yield f"{after.objects - before.objects} objects of the runtime are left"
    if after.anonymous - before.anonymous > _ALLOWED_ANONYMOUS:
        yield f"memory grew by {after.anonymous - before.anonymous} bytes"
    if after.device is not None and before.device is not None and after.device - before.device > _ALLOWED_DEVICE:
        yield f"the GPU's memory grew by {after.device - before.device} bytes"
    if soaked.deterministic and soaked.equal < len(soaked.alone):
        yield f"{len(soaked.alone) - soaked.equal} of {len(soaked.alone)} probes got other tokens than alone"


if __name__ == "__main__":
    main()
