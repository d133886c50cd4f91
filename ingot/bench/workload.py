"""Make the workload of a benchmark: prompts of random tokens, output lengths and arrival times, drawn by a seed."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

# Limits of `vllm bench --dataset-name sharegpt`: minimum tokens of a prompt and of an output, maximum of a prompt, and
# maximum of both together.
_LEAST_TOKENS, _MOST_PROMPT, _MOST_TOTAL = 4, 1024, 2048


@dataclass(frozen=True)
class BenchRequest:
    """A request of a benchmark: token ids of the prompt, number of tokens to generate, and arrival.

    `arrival` is in seconds from the beginning of the benchmark.
    """

    prompt: tuple[int, ...]
    output_len: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Lengths:
    """The numbers of tokens of one request's prompt and output."""

    prompt: int
    output: int


@dataclass(frozen=True)
class LogNormal:
    """A log-normal distribution, defined by its mean and standard deviation."""

    mean: float
    deviation: float

    def draw(self, rng: random.Random) -> float:
        variance = math.log1p((self.deviation / self.mean) ** 2)
        return rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))


# Mean and standard deviation of ShareGPT's conversations in tokens: NanoFlow (arXiv 2408.12757), table 4. A log-normal
# with these moments has their long tail; with a deviation of twice the mean, a normal distribution does not fit.
SHAREGPT_PROMPT = LogNormal(246, 547)
SHAREGPT_OUTPUT = LogNormal(322, 244)


def equal_lengths(count: int, prompt: int, output: int) -> list[Lengths]:
    return [Lengths(prompt, output)] * count


def sharegpt_lengths(count: int, seed: int, longest: int) -> list[Lengths]:
    """Return `count` random lengths with the distribution of ShareGPT's conversations.

    They are within the bounds of vLLM's benchmark. `longest` is the maximum number of tokens of prompt and output
    together. It must be at least 8, because each has at least 4.
    """
    rng = random.Random(seed)
    total = min(_MOST_TOTAL, longest)
    most = min(_MOST_PROMPT, total - _LEAST_TOKENS)
    found = []
    for _ in range(count):
        prompt = _clipped(SHAREGPT_PROMPT.draw(rng), most)
        found.append(Lengths(prompt, _clipped(SHAREGPT_OUTPUT.draw(rng), total - prompt)))
    return found


def _clipped(drawn: float, most: int) -> int:
    return min(max(round(drawn), _LEAST_TOKENS), most)


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the arrival of each of `count` requests, in seconds from the beginning.

    `rate` is the mean number of arrivals per second. If it is infinite, all arrive at 0. The gaps follow a gamma
    distribution of shape `burstiness`, as in `vllm bench serve`: 1 is a Poisson process, larger is more even, smaller
    has bursts. The gaps are scaled so that the last request arrives at count / rate.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    gaps = [rng.gammavariate(burstiness, 1.0) for _ in range(count)]
    scale = count / rate / math.fsum(gaps)
    times, now = [], 0.0
    for gap in gaps:
        now += gap * scale
        times.append(now)
    return times


def make_workload(
    lengths: Sequence[Lengths],
    tokens: Sequence[int],
    seed: int | str,
    *,
    arrivals: Sequence[float] | None = None,
    shared_prefix: int = 0,
) -> list[BenchRequest]:
    """Return one request for each of `lengths`, with a prompt of random ids from `tokens`.

    `arrivals` has a time for each request, in seconds. None means that all arrive at 0. The first `shared_prefix`
    tokens are equal in all prompts, and count towards their lengths. Two workloads with one `seed` have equal first
    tokens. A prefix cache that has served the first workload would find them in the second.
    """
    rng = random.Random(seed)
    prefix = tuple(rng.choices(tokens, k=shared_prefix))
    times = [0.0] * len(lengths) if arrivals is None else arrivals
    return [
        BenchRequest(prefix + tuple(rng.choices(tokens, k=one.prompt - shared_prefix)), one.output, arrival)
        for one, arrival in zip(lengths, times, strict=True)
    ]
