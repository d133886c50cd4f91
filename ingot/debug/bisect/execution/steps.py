"""Make steps from sample requests, to compare an executor with the references: chunked prefill, decode, mixed batches,
and every sampling option."""

import math
from collections.abc import Mapping, Sequence

import torch

from ingot.ir.artifact.plan import Plan
from ingot.ir.features import find_input
from ingot.ir.features.penalties import PENALTIES
from ingot.ir.numerics.harness import scheduled
from ingot.ir.parse import parse_type

Inputs = Mapping[str, torch.Tensor]
# Requests served together: enough for batches that mix prefill and decode, few enough for fast steps.
_REQUESTS = 8
# The first numbers of tokens that a request gets in its steps, as (even request, odd request). Prompt chunks end inside
# pages. Then prefill runs next to decode, and decode alone. A longer chunk begins at an odd position, and decode
# follows. Then come long chunks. The last tokens of each request are decoded one by one. Each request has one more of
# these than the previous request, so that decode batches of every size occur.
_OPENING = ((19, 19), (1, 9), (1, 1), (1, 1), (31, 23), (1, 1))
_LONG = 64
# A request shorter than the opening and its last tokens is repeated to that length; a long one is truncated.
_LENGTH = sum(odd for _, odd in _OPENING)
_LONGEST = 512


def recorded_steps(
    plan: Plan, requests: Sequence[Sequence[int]], *, max_seq_len: int, page_size: int, pages: int, seed: int = 0
) -> list[Inputs]:
    """Build the inputs of steps that serve the `requests`, to check every kind of step: chunked prefill, decode, and
    both in one step.

    At most eight requests are served. Short requests are repeated until they need all kinds of steps. Steps stay within
    the plan's limits and `max_seq_len`. The cache pool has `pages` pages of `page_size` tokens.

    Every other step uses all sampling options: random sampling, penalties and log-probabilities. If the plan allows it,
    some decode steps read tokens and positions from the device instead of from inputs.
    """
    served = [request for request in requests if request][: min(_REQUESTS, plan.dims["B"][1], pages)]
    limit = min(max_seq_len, pages // max(1, len(served)) * page_size, _LONGEST)
    lengthened = [_repeated(request, limit, _LENGTH + 1 + at) for at, request in enumerate(served)]
    most = min(plan.dims["T"][1], plan.dims["L"][1]) // max(1, len(lengthened))
    counts = [_counts(len(request), index, max(1, most)) for index, request in enumerate(lengthened)]
    types = {name: parse_type(text) for name, text in plan.inputs.items()}
    steps: list[Inputs] = []

    def record(inputs: Inputs) -> Inputs:
        steps.append(inputs)
        return {}

    schedule = [
        [(request, every[number]) for request, every in enumerate(counts) if number < len(every)]
        for number in range(max(map(len, counts), default=0))
    ]
    list(scheduled(types, record, lengthened, schedule, pages, page_size, seed))
    ends = [len(request) // 2 for request in lengthened]
    generator = torch.Generator().manual_seed(seed)
    return [_with_options(step, ends, number % 2 == 1, generator) for number, step in enumerate(steps)]


def pages_needed(requests: Sequence[Sequence[int]], page_size: int) -> int:
    """Return the number of cache pages that `recorded_steps` needs for these requests, and one more.

    The pool is kept this small because all states are copied and compared. With a pool as large as in serving, that
    would take minutes.
    """
    served = [request for request in requests if request][:_REQUESTS]
    lengths = [len(_repeated(one, _LONGEST, _LENGTH + 1 + at)) for at, one in enumerate(served)]
    return len(lengths) * -(-max(lengths, default=0) // page_size) + 1


def _repeated(request: Sequence[int], most: int, least: int) -> list[int]:
    return (list(request) * math.ceil(least / len(request)))[: min(most, max(least, len(request)))]


def _counts(length: int, index: int, most: int) -> list[int]:
    """Split a request of `length` tokens into steps. Return the number of tokens in each step.

    No step has more than `most` tokens. `index` is the number of the request. Requests with odd and even numbers are
    split differently.
    """
    counts: list[int] = []
    left = length
    while left:
        opening = _OPENING[len(counts)][index % 2] if len(counts) < len(_OPENING) else 0
        wanted = opening or max(1, min(_LONG, left - 1 - index))
        counts.append(min(wanted, most, left))
        left -= counts[-1]
    return counts


def _with_options(step: Inputs, ends: Sequence[int], everything: bool, generator: torch.Generator) -> Inputs:
    """Return a copy of a step's inputs in which some sequences read their last token from the device.

    These are the decoding sequences on odd device rows. With `everything`, all sequences use every sampling option too.
    `ends` has, for each request, the number of tokens that count as its prompt.
    """
    changed = {name: tensor.clone() for name, tensor in step.items()}
    if "token_seqs" not in changed or "q_lens" not in changed:
        return changed
    decoding = (changed["q_lens"] == 1) & (changed["starts"] == -1) & (changed["rows"] % 2 == 1)
    changed["tokens"][changed["q_starts"][decoding].long()] = -1
    row_of = changed["rows"][changed["token_seqs"].long()]  # every token has a row of logits
    counted = row_of % 2 == 1
    if "prompt_ends" in changed:
        rows = changed["rows"]
        ends_of = torch.tensor(ends, dtype=torch.int32)[rows.long()]
        changed["prompt_ends"] = torch.where(rows % 2 == 1, ends_of, -1).int()
    if everything:
        drawn = {name: one for name in changed if (one := find_input(name)) is not None and one.draw is not None}
        for name, one in drawn.items():
            assert one.draw is not None
            changed[name] = one.draw(len(row_of), generator)
        for one in PENALTIES.inputs:
            if one.dim == "L" and one.name in changed:
                value = row_of if one.name == "count_rows" else changed[one.name]
                changed[one.name] = torch.where(counted, value, one.padding).to(one.type.dtype)
        if "banned" in changed:
            changed["banned"][::3, 0] = changed["tokens"][::3].clamp(min=0)
    return changed
