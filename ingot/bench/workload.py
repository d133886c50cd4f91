"""What a benchmark asks of an engine: requests of token ids with output lengths and arrival times, drawn by seed."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

# The least tokens of a prompt and of an output, and the most of a prompt and of both together, that
# `vllm bench --dataset-name sharegpt` takes of a conversation.
_LEAST_TOKENS, _MOST_PROMPT, _MOST_TOTAL = 4, 1024, 2048


@dataclass(frozen=True)
class BenchRequest:
    """A prompt of token ids, how many tokens to make after it, and when it arrives, in seconds from the beginning."""

    prompt: tuple[int, ...]
    output_len: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt, and of what is made after it."""

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
# of these moments has the long tail that they tell of; a deviation of twice the mean leaves a normal one no place.
SHAREGPT_PROMPT = LogNormal(246, 547)
SHAREGPT_OUTPUT = LogNormal(322, 244)


def equal_lengths(count: int, prompt: int, output: int) -> list[Lengths]:
    return [Lengths(prompt, output)] * count


def sharegpt_lengths(count: int, seed: int, longest: int) -> list[Lengths]:
    """Lengths like those of ShareGPT's conversations, within the bounds that vLLM sets for them and `longest` in all.

    `longest` is at least 8: the least prompt and the least output.
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
    """When requests arrive, in seconds: `rate` a second, or all at once when it is infinite.

    As in `vllm bench serve`, the gaps follow a gamma distribution of the shape `burstiness`, which is a Poisson process
    at 1, more even above and in bursts below; and they are scaled so that the last request arrives at count / rate.
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
    """Requests of these lengths, prompts drawn from `tokens`, all at once or at `arrivals`.

    Workloads of one seed begin with the same tokens, which a cache of prefixes would find.
    The first `shared_prefix` tokens are the same in all prompts, of whose length they are part.
    """
    rng = random.Random(seed)
    prefix = tuple(rng.choices(tokens, k=shared_prefix))
    times = [0.0] * len(lengths) if arrivals is None else arrivals
    return [
        BenchRequest(prefix + tuple(rng.choices(tokens, k=one.prompt - shared_prefix)), one.output, arrival)
        for one, arrival in zip(lengths, times, strict=True)
    ]
