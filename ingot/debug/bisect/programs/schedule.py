"""Steps that show faults: prompts in chunks, prefill beside decoding, samplers of every kind, pages and rows out of
order."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ingot.ir.errors import ArtifactError
from ingot.ir.ops.penalties import MAX_BANNED
from ingot.ir.program import Program
from ingot.ir.types import TensorType

# Tokens of a sequence in a step: cuts pages of any power of two, and prompts, at odd places.
CHUNK = 11
PAGE_SIZE = 16


@dataclass(frozen=True)
class Asked:
    """What a request asks of its sampler; in the words of `ingot.runtime.batch.NOTHING_ASKED`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seeds: int = 0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    banned: tuple[int, ...] = ()
    targets: int = -1
    num_logprobs: int = -1

    @property
    def counts(self) -> bool:
        """Whether its tokens are counted, for penalties."""
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)


GREEDY = Asked()
# Requests take these by turns: each sampler input is there, no two of a row are alike, and a greedy row is among them.
SAMPLERS = (
    Asked(num_logprobs=4),
    Asked(0.8, 9, 0.95, 0.02, 12345, 1.7, 0.4, 0.9, num_logprobs=2, targets=7),
    Asked(1.3, 0, 0.7, 0.0, 2**40 + 1, banned=(3, 5, 8)),
    Asked(0.6, 5, 1.0, 0.1, 99, 0.8, -0.3, 0.2, num_logprobs=0),
)


@dataclass(frozen=True)
class Request:
    """A sequence to be served: of its `tokens` the first `prompt` are its prompt. Page numbers in the order of use."""

    tokens: tuple[int, ...]
    prompt: int
    asked: Asked = GREEDY
    row: int = 0
    pages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """One step: every input that a program may have, by name, and `places`: where each of its tokens stands when all
    tokens of all requests are laid end to end."""

    inputs: Mapping[str, torch.Tensor]
    places: torch.Tensor

    def of(self, inputs: Mapping[str, TensorType]) -> dict[str, torch.Tensor]:
        """The values of these inputs. Raises ArtifactError for one that nobody here has a value for."""
        if unknown := inputs.keys() - self.inputs.keys():
            raise ArtifactError(
                f"nothing is known of the input '{sorted(unknown)[0]}'", expected=", ".join(sorted(self.inputs))
            )
        return {name: self.inputs[name] for name in inputs}


def is_cached(program: Program) -> bool:
    """Whether a program keeps what it has seen, so that a sequence may be fed in pieces."""
    return any(True for _ in program.placeholders("state"))


def with_pages(requests: Sequence[Request], page_size: int, seed: int = 0) -> tuple[list[Request], int]:
    """The requests with pages of their own, in an order drawn by `seed`; and how many pages there are."""
    widths = [-(-len(request.tokens) // page_size) for request in requests]
    order = list(range(sum(widths) + 3))  # a few that nobody uses
    random.Random(seed).shuffle(order)
    given = []
    for request, width in zip(requests, widths, strict=True):
        taken, order = tuple(order[:width]), order[width:]
        given.append(Request(request.tokens, request.prompt, request.asked, request.row, taken))
    return given, sum(widths) + 3


def whole(requests: Sequence[Request], page_size: int) -> list[Step]:
    """All tokens of all requests in one step."""
    return [_step(requests, [len(request.tokens) for request in requests], [0] * len(requests), page_size, False)]


def in_chunks(requests: Sequence[Request], page_size: int, *, by_device: bool, chunk: int = CHUNK) -> list[Step]:
    """Prompts in chunks, then token by token, every request at its own pace.

    `by_device`: a generated token is taken from its row on the device, in place of being given.
    """
    steps, done = [], [0] * len(requests)
    while any(place < len(request.tokens) for place, request in zip(done, requests, strict=True)):
        counts = [
            min(chunk, request.prompt - place) if place < request.prompt else min(1, len(request.tokens) - place)
            for place, request in zip(done, requests, strict=True)
        ]
        steps.append(_step(requests, counts, done, page_size, by_device))
        done = [place + count for place, count in zip(done, counts, strict=True)]
    return steps


def _ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def _step(
    requests: Sequence[Request], counts: Sequence[int], done: Sequence[int], page_size: int, by_device: bool
) -> Step:
    """Feed `counts[i]` tokens of request i, which has been fed `done[i]`; every token gets a row of logits."""
    batch = [index for index, count in enumerate(counts) if count]
    fed = [requests[index] for index in batch]
    begins = [sum(len(request.tokens) for request in requests[:index]) for index in range(len(requests))]
    places = [(index, done[index] + i) for index in batch for i in range(counts[index])]
    ends = [sum(counts[index] for index in batch[: place + 1]) for place in range(len(batch))]
    table = torch.zeros(len(batch), max(len(request.pages) for request in fed) or 1, dtype=torch.int32)
    for line, request in enumerate(fed):
        table[line, : len(request.pages)] = _ints(request.pages)

    def token(index: int, place: int) -> int:
        return -1 if by_device and place >= requests[index].prompt else requests[index].tokens[place]

    def slot(index: int, place: int) -> int:
        pages = requests[index].pages
        return pages[place // page_size] * page_size + place % page_size if pages else -1

    def per_token(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(requests[index].asked, name) for index, _ in places], dtype=dtype)

    banned = torch.full((len(places), MAX_BANNED), -1, dtype=torch.int32)
    for line, (index, _) in enumerate(places):
        banned[line, : len(requests[index].asked.banned)] = _ints(requests[index].asked.banned)
    last = [done[index] + counts[index] for index in batch]
    inputs = {
        "tokens": _ints([token(index, place) for index, place in places]),
        "positions": _ints([place for _, place in places]),
        "slots": torch.tensor([slot(index, place) for index, place in places]),
        "token_seqs": _ints([batch.index(index) for index, _ in places]),
        "page_table": table,
        "q_starts": _ints([end - counts[index] for end, index in zip(ends, batch, strict=True)]),
        "q_lens": _ints([counts[index] for index in batch]),
        "kv_lens": _ints(last),
        "rows": _ints([request.row for request in fed]),
        # The first step says where a sequence begins; later ones rely on the device's own position.
        "starts": _ints([0 if done[index] == 0 else -1 for index in batch]),
        "state_read": _ints([-1 if done[index] == 0 else requests[index].row for index in batch]),
        "state_write": _ints([request.row for request in fed]),
        "logit_rows": _ints(range(len(places))),
        # In the middle of a prompt nothing is sampled.
        "sample_index": _ints(
            [end - 1 if at >= request.prompt else -1 for end, at, request in zip(ends, last, fed, strict=True)]
        ),
        "prompt_ends": _ints([request.prompt if request.asked.counts else -1 for request in fed]),
        "count_rows": _ints([requests[i].row if requests[i].asked.counts else -1 for i, _ in places]),
        "banned": banned,
        **{
            name: per_token(name, torch.float32)
            for name in ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")
        },
        **{name: per_token(name, torch.int32) for name in ("top_k", "targets", "num_logprobs")},
        "seeds": per_token("seeds", torch.int64),
    }
    return Step(inputs, torch.tensor([begins[index] + place for index, place in places]))
