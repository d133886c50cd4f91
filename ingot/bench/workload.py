"""The workload of a benchmark: requests of token ids with output lengths and arrival times, drawn by seed."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

# Limits of `vllm bench --dataset-name sharegpt`: minimum tokens of a prompt and of an output, maximum of a prompt, and
# maximum of both together.
_LEAST_TOKENS, _MOST_PROMPT, _MOST_TOTAL = 4, 1024, 2048


@dataclass(frozen=True)
class BenchRequest:
    """A prompt of token ids, the number of tokens to generate, and its arrival in seconds from the beginning."""

    prompt: tuple[int, ...]
    output_len: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt, and of its output."""

    prompt: int
    output: int


@dataclass(frozen=True)
class LogNormal:
    """A log-normal distribution by its mean and standard deviation."""

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
    """Return lengths like those of ShareGPT's conversations, within vLLM's bounds and `longest` in total.

    `longest` is at least 8: the minimum prompt and the minimum output.
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
    """Return the arrivals of requests in seconds: `rate` per second, or all at once if it is infinite.

    As in `vllm bench serve`, the gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, larger
    is more even, smaller has bursts. They are scaled so that the last request arrives at count / rate.
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
    """Return requests of these lengths, with prompts drawn from `tokens`, all at once or at `arrivals`.

    Workloads of the same seed begin with the same tokens, which a prefix cache would hit. The first `shared_prefix`
    tokens are the same in all prompts and count towards their lengths.
    """
    rng = random.Random(seed)
    prefix = tuple(rng.choices(tokens, k=shared_prefix))
    times = [0.0] * len(lengths) if arrivals is None else arrivals
    return [
        BenchRequest(prefix + tuple(rng.choices(tokens, k=one.prompt - shared_prefix)), one.output, arrival)
        for one, arrival in zip(lengths, times, strict=True)
    ]
