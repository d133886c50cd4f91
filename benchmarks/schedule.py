"""Measure the host time of the scheduler alone for a step, with an executor that answers at once.

    python benchmarks/schedule.py [--running 256] [--waiting 512] [--prompt 512] [--json FILE]

The running sequences decode, and the others wait for a device row. `schedule` makes the next step, before its launch;
`retire` takes a step's tokens, after the launch of the next one. Both are means over steps in which the sequences fill
equally many pages; the minimum of some tries counts. Times are CPU times: a scheduler waits for nothing, and other work
on the machine does not affect them. Also measured are adding a request, with the hashes of its prompt, and admitting
one with a prompt that is in the prefix cache.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from results import Figure, add_json_option, report

from ingot.runtime.pages.pool import PagePool
from ingot.runtime.pages.sequence_pages import one_pool
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.batch import StepBatch
from ingot.runtime.scheduling.request import Given, Request
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig

_PAGE = 16
_STEPS = 4 * _PAGE
_TRIES = 5
_VOCAB = 128_000


@dataclass(frozen=True)
class Load:
    """The workload: how many sequences run, how many requests wait, and how many tokens each prompt has."""

    running: int
    waiting: int
    prompt: int

    @property
    def longest(self) -> int:
        """Return the max_seq_len to set. It is enough to decode in all measured steps, and some more."""
        return self.prompt + (_TRIES + 2) * _STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("running", 256), ("waiting", 512), ("prompt", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    add_json_option(parser)
    options = parser.parse_args()
    load = Load(options.running, options.waiting, options.prompt)
    alone = Load(options.running, 0, options.prompt)
    figures = {
        **step_figures("", load, prefix_caching=True),
        **step_figures("_uncached", load, prefix_caching=False),
        **step_figures("_none_waiting", alone, prefix_caching=True),
        **request_figures(load),
    }
    report(__file__, options.json, {"running": load.running, "waiting": load.waiting, "prompt": load.prompt}, figures)


def step_figures(suffix: str, load: Load, *, prefix_caching: bool) -> dict[str, Figure]:
    """Measure the scheduler's `schedule` and `retire` in decode steps. Return the seconds of each as figures by name.

    The names end in `suffix`.
    """
    scheduler = _filled(load, prefix_caching=prefix_caching)
    steps = _steps(scheduler)
    tries: list[tuple[float, float]] = []
    for _ in range(_TRIES):
        parts = [next(steps) for _ in range(_STEPS)]
        tries.append((sum(one[0] for one in parts) / _STEPS, sum(one[1] for one in parts) / _STEPS))
    assert len(scheduler.running) == load.running and len(scheduler.waiting) == load.waiting
    cache = "with" if prefix_caching else "without"
    what = f"a step of {load.running} that decode, {load.waiting} waiting, {cache} the prefix cache"
    return {
        f"{name}{suffix}": Figure(value=min(values), unit="s", what=f"{verb} {what}", values=values)
        for name, verb, values in zip(
            ("schedule", "retire"), ("making", "retiring"), zip(*tries, strict=True), strict=True
        )
    }


def request_figures(load: Load) -> dict[str, Figure]:
    """Measure the scheduler's work for a new request. Return the seconds as two figures by name.

    "add" is the time to add a request. "admit" is the time to schedule its first step, with its prompt in the prefix
    cache.
    """
    draw = random.Random(0)
    trunk = _prompt(draw, load.prompt)
    scheduler = _scheduler(load, prefix_caching=True)
    _serve(scheduler, Request(Given("first", [*trunk, 1], SamplingParams(max_tokens=1))))
    add, admit = [], []
    for number in range(_TRIES * 8):
        request = Request(Given(str(number), [*trunk, 2], SamplingParams(max_tokens=1)))
        begin = time.thread_time()
        scheduler.add(request)
        added = time.thread_time()
        batch = scheduler.schedule()
        admit.append(time.thread_time() - added)
        add.append(added - begin)
        assert request.cached.num_found == load.prompt // _PAGE * _PAGE
        _retire(scheduler, batch)
    prompt = f"a prompt of {load.prompt + 1} tokens"
    return {
        "add": Figure(value=min(add), unit="s", what=f"adding {prompt}, with its hashes"),
        "admit": Figure(
            value=min(admit), unit="s", what=f"making a step of {prompt}, all but the end found in the cache"
        ),
    }


def _scheduler(load: Load, *, prefix_caching: bool) -> Scheduler:
    pages = (load.running + 1) * -(-load.longest // _PAGE)
    config = SchedulerConfig(
        max_batch=load.running,
        max_tokens=max(8192, load.running),
        max_seq_len=load.longest,
        page_size=_PAGE,
        prefix_caching=prefix_caching,
    )
    return Scheduler(config, one_pool(PagePool(pages, _PAGE)))


def _filled(load: Load, *, prefix_caching: bool) -> Scheduler:
    """Return a scheduler in which `load.running` sequences decode and `load.waiting` requests wait."""
    draw, scheduler = random.Random(0), _scheduler(load, prefix_caching=prefix_caching)
    for number in range(load.running + load.waiting):
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        scheduler.add(Request(Given(str(number), _prompt(draw, load.prompt), params)))
    while any(not request.output_ids for request in scheduler.running) or len(scheduler.running) < load.running:
        _retire(scheduler, scheduler.schedule())
    return scheduler


def _steps(scheduler: Scheduler) -> Iterator[tuple[float, float]]:
    """Run steps of the scheduler. Yield two times for each step, in seconds.

    The first is the time to schedule this step. The second is the time to retire the step before it: the scheduler
    takes the step's tokens. One step is always in flight.
    """
    before = scheduler.schedule()
    while True:
        begin = time.thread_time()
        batch = scheduler.schedule()
        made = time.thread_time()
        _retire(scheduler, before)
        yield made - begin, time.thread_time() - made
        before = batch


def _serve(scheduler: Scheduler, request: Request) -> None:
    scheduler.add(request)
    while scheduler.has_unfinished:
        _retire(scheduler, scheduler.schedule())


def _retire(scheduler: Scheduler, batch: StepBatch | None) -> None:
    assert batch is not None
    scheduler.retire(batch, [7] * batch.inputs.sizes.L)


def _prompt(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(_VOCAB) for _ in range(tokens)]


if __name__ == "__main__":
    main()
