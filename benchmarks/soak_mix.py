"""The requests of a soak over HTTP: what each client does, drawn by seed, and how its answer must end."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from ingot.bench.workload import sharegpt_lengths

# The kinds of clients, with the share of each in a thousand requests:
#   stream   reads the events to the end               whole  reads one answer
#   cancel   closes the connection between two events  drop   closes it before the answer, half of them mid-request
#   slow     reads a few bytes a second, then closes   bad    sends a body that the server must refuse
SHARES = {"stream": 700, "whole": 120, "cancel": 80, "drop": 40, "slow": 30, "bad": 30}
COMPLETE = ("stream", "whole")  # these must end with all their tokens
_PREFIXES, _PREFIX_TOKENS, _PREFIX_SHARE = 4, 64, 0.3  # common beginnings, and the share of prompts with one
_DRAWN = 4096  # lengths, which repeat after so many requests
_SLOW_TOKENS = 512  # at least, with log-probabilities: more bytes than the sockets buffer
_BAD = (
    b"{not json",
    b"[]",
    b'{"model": "%b"}',
    b'{"model": "no-such-model", "prompt": "a"}',
    b'{"model": "%b", "prompt": [1, 2], "max_tokens": -1}',
    b'{"model": "%b", "prompt": [1, "a"]}',
    b'{"model": "%b", "prompt": "a", "temperature": "hot"}',
    b'{"model": "%b", "prompt": [999999999]}',
)


@dataclass(frozen=True)
class Mixed:
    """A request of a soak: when it arrives, in seconds, what its client does, and what it sends.

    output   the tokens that the answer must have
    stop     for a cancel, the events after which the client closes; for slow and drop, the seconds until then
    reset    whether the client resets the connection instead of closing it
    """

    arrival: float
    kind: str
    body: bytes
    output: int = 0
    stop: float = 0.0
    reset: bool = False


def mixed_requests(
    rate: float, seconds: float, model: str, vocab: tuple[int, int], longest: int, seed: str
) -> Iterator[Mixed]:
    """Yield requests that arrive as a Poisson process of `rate` per second, for `seconds`, in order of arrival.

    Lengths are like ShareGPT's, with at most `longest` tokens together. Prompts have token ids from `vocab[0]` to below
    `vocab[1]`. Some have a common prefix, so that the prefix cache has hits.
    """
    rng = random.Random(seed)
    tokens = range(*vocab)
    prefixes = [random.Random(number).choices(tokens, k=_PREFIX_TOKENS) for number in range(_PREFIXES)]
    lengths = sharegpt_lengths(_DRAWN, rng.randrange(1 << 30), longest)
    arrival, index = 0.0, 0
    while (arrival := arrival + rng.expovariate(rate)) < seconds:
        one = lengths[index % _DRAWN]
        index += 1
        (kind,) = rng.choices(list(SHARES), weights=list(SHARES.values()))
        reset = rng.random() < 0.5
        if kind == "bad":
            body = rng.choice(_BAD).replace(b"%b", model.encode())
            yield Mixed(arrival, kind, body)
            continue
        prompt = rng.choices(tokens, k=one.prompt)
        if rng.random() < _PREFIX_SHARE:
            prompt = (rng.choice(prefixes) + prompt)[: one.prompt]
        output = one.output
        if kind == "slow":
            output = max(output, min(_SLOW_TOKENS, longest - one.prompt))
        stop = {"cancel": float(rng.randint(0, output)), "slow": rng.uniform(3, 12), "drop": rng.uniform(0, 0.05)}
        yield Mixed(arrival, kind, _body(kind, model, prompt, output, rng), output, stop.get(kind, 0.0), reset)


def _body(kind: str, model: str, prompt: list[int], output: int, rng: random.Random) -> bytes:
    fields = {"model": model, "prompt": prompt, "max_tokens": output, "ignore_eos": True}
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": rng.randrange(1 << 30)} if rng.random() < 0.3 else {}
    streamed = {} if kind == "whole" else {"stream": True, "stream_options": {"include_usage": True}}
    chosen = {"temperature": 0.0, **sampled, **streamed, **({"logprobs": 5} if kind == "slow" else {})}
    return json.dumps({**fields, **chosen}, separators=(",", ":")).encode()
