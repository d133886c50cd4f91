"""Make the requests of a soak test: many kinds, drawn by a seed; some are cancelled, and some must be refused."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.bench.workload import Lengths, arrival_times, sharegpt_lengths
from ingot.runtime.loading.limits import Limits
from ingot.runtime.params.sampling_params import SamplingParams

# Shares of the requests. The remaining lengths are like ShareGPT's; the other shares are drawn independently.
NEAR_LIMIT, VERY_SHORT, REFUSED = 0.05, 0.05, 0.01
CANCELLED, CANCELLED_EARLY, CANCELLED_TWICE = 0.10, 1 / 3, 1 / 3  # the last two are shares of the cancelled requests
SHARED, SALTED, STREAMED, SEEDED, STOPPED = 0.4, 0.1, 0.5, 0.5, 0.3  # SALTED is a share of those with a shared prefix
_TRUNKS = 8  # different shared prefixes
_EARLY_STEPS = 2  # while a request is queued or its long prompt is in prefill
_MOST_LEFT, _MOST_SHORT = 16, 3  # tokens left by a prompt near the limit, and tokens of a very short one
_MOST_PROBE = 64  # tokens of a probe's output
# Enough stop tokens to stop some requests of a model with random weights: a 64th of the vocabulary, within bounds.
_STOP_SHARE, _FEWEST_STOPS, _MOST_STOPS = 64, 4, 256

SAMPLING: Sequence[Mapping[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.3},
    {"temperature": 1.0, "n": 2},
    {"temperature": 1.0, "logprobs": 5},
    {"temperature": 0.0, "prompt_logprobs": 3},
)
PRIORITIES = (-1, 0, 0, 0, 1)


@dataclass(frozen=True)
class Cancel:
    """When to cancel a request: after `steps` steps from its arrival. With `twice`, it is cancelled again at once."""

    steps: int
    twice: bool


@dataclass(frozen=True)
class SoakRequest:
    """A request for `ingot.runtime.engines.engine.Engine` in a soak test, and what must happen to it.

    - `arrival`: seconds from the beginning of the test
    - `cancel`: when to cancel the request; None lets it run to its end
    - `refused`: True if the request can never be served, so the engine must refuse it
    - `probe`: number of a probe (a request that is also served alone, to compare the outputs), None for other requests
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    arrival: float = 0.0
    cache_salt: str | None = None
    stream: bool = True
    priority: int = 0
    cancel: Cancel | None = None
    refused: bool = False
    probe: int | None = None

    @property
    def prompt(self) -> dict[str, Any]:
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        return {"prompt_token_ids": list(self.tokens), **salt}


@dataclass(frozen=True)
class Vocabulary:
    """The token ids that prompts may contain. `text` returns the text of a token.

    `text` is None if the model has no tokenizer.
    """

    tokens: Sequence[int]
    text: Callable[[int], str] | None = None


def soak_requests(
    count: int, rate: float, limits: Limits, vocabulary: Vocabulary, seed: int | str
) -> list[SoakRequest]:
    """Return `count` random requests in order of arrival, within the engine's limits.

    They arrive as a Poisson process of `rate` requests per second. Calls with equal `seed` return equal requests.
    """
    rng = random.Random(f"{seed} requests")
    longest, tokens = limits.max_seq_len, vocabulary.tokens
    trunks = [tuple(rng.choices(tokens, k=longest // 2)) for _ in range(_TRUNKS)]
    lengths = sharegpt_lengths(count, rng.getrandbits(32), longest)
    times = arrival_times(count, rate, 1.0, rng.getrandbits(32))
    return [
        _request(rng, _lengths(rng, one, longest), time, limits, vocabulary, trunks)
        for one, time in zip(lengths, times, strict=True)
    ]


def probe_requests(count: int, limits: Limits, tokens: Sequence[int], seed: int | str) -> list[SoakRequest]:
    """Return `count` probes: greedy requests of mixed lengths, each with another prompt.

    A probe is served alone, and again among other requests, to compare the two outputs. `tokens` are the ids that
    prompts may contain.
    """
    rng = random.Random(f"{seed} probes")
    output = min(_MOST_PROBE, limits.max_seq_len // 4)
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    lengths = sharegpt_lengths(count, rng.getrandbits(32), limits.max_seq_len - output)
    return [
        SoakRequest(tuple(rng.choices(tokens, k=one.prompt)), params, stream=index % 2 == 0, probe=index)
        for index, one in enumerate(lengths)
    ]


def spread_in(requests: Sequence[SoakRequest], probes: Sequence[SoakRequest], seconds: float) -> list[SoakRequest]:
    """Return requests and probes together in order of arrival.

    The arrivals of the probes are set evenly over the first `seconds` of the test.
    """
    placed = [replace(one, arrival=(index + 0.5) * seconds / len(probes)) for index, one in enumerate(probes)]
    return sorted([*requests, *placed], key=lambda one: one.arrival)


def _request(
    rng: random.Random,
    lengths: Lengths,
    arrival: float,
    limits: Limits,
    vocabulary: Vocabulary,
    trunks: Sequence[tuple[int, ...]],
) -> SoakRequest:
    tokens = tuple(rng.choices(vocabulary.tokens, k=lengths.prompt))
    salt = None
    if rng.random() < SHARED:
        shared = rng.choice(trunks)[: lengths.prompt - 1]
        tokens = shared + tokens[len(shared) :]
        salt = rng.choice(("a", "b")) if rng.random() < SALTED else None
    if refused := rng.random() < REFUSED:
        tokens = (*tokens, *[tokens[0]] * limits.max_seq_len) if rng.random() < 0.5 else (*tokens, limits.vocab_size)
    return SoakRequest(
        tokens,
        _params(rng, lengths.output, vocabulary),
        arrival,
        cache_salt=salt,
        stream=rng.random() < STREAMED,
        priority=rng.choice(PRIORITIES),
        cancel=_cancel(rng, lengths.output) if rng.random() < CANCELLED else None,
        refused=refused,
    )


def _lengths(rng: random.Random, usual: Lengths, longest: int) -> Lengths:
    match rng.random():
        case drawn if drawn < NEAR_LIMIT:
            # It requests more tokens than there is room for, and ends at the limit.
            return Lengths(longest - rng.randint(1, _MOST_LEFT), 2 * _MOST_LEFT)
        case drawn if drawn < NEAR_LIMIT + VERY_SHORT:
            return Lengths(rng.randint(1, _MOST_SHORT), rng.randint(1, _MOST_SHORT))
    return usual


def _params(rng: random.Random, output: int, vocabulary: Vocabulary) -> SamplingParams:
    seed = rng.getrandbits(32) if rng.random() < SEEDED else None
    return SamplingParams(**rng.choice(SAMPLING), **_stops(rng, output, vocabulary), max_tokens=output, seed=seed)


def _stops(rng: random.Random, output: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return random stop options as arguments of SamplingParams.

    Most requests only ignore the end tokens. The rest have a stop string, many stop tokens, or a few stop tokens and a
    minimum length.
    """
    if rng.random() >= STOPPED:
        return {"ignore_eos": True}
    tokens = vocabulary.tokens
    many = min(max(_FEWEST_STOPS, len(tokens) // _STOP_SHARE), _MOST_STOPS)
    match rng.randrange(3):
        case 0 if vocabulary.text is not None and (text := vocabulary.text(rng.choice(tokens))):
            return {"stop": [text], "include_stop_str_in_output": rng.random() < 0.5}
        case 1:
            return {"stop_token_ids": rng.sample(tokens, _FEWEST_STOPS), "min_tokens": rng.randint(0, output)}
    return {"stop_token_ids": rng.sample(tokens, many), "ignore_eos": True}


def _cancel(rng: random.Random, output: int) -> Cancel:
    early = rng.random() < CANCELLED_EARLY
    steps = rng.randint(0, _EARLY_STEPS) if early else rng.randint(_EARLY_STEPS + 1, _EARLY_STEPS + 1 + output)
    return Cancel(steps, twice=rng.random() < CANCELLED_TWICE)
