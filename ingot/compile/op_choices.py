"""Explain which backend would compute each op in each bucket class, and why. For `ingot target --explain`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ingot.backends.table import find_entry
from ingot.compile.buckets import bucket_classes
from ingot.compile.op_claims import NONE, one_call_of_each
from ingot.compile.request import DEFAULT_MAX_BATCH, DEFAULT_MAX_TOKENS
from ingot.ir.artifact.backend_times import BackendTimes, Decision
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.backend import Backend, Yes
from ingot.ir.errors import OptionError
from ingot.ir.machine.target import Target
from ingot.ir.ops import OPS
from ingot.ir.plugins import load_user_ops
from ingot.ir.text import bucket_text
from ingot.passes.base import PassContext
from ingot.passes.choose_backends import choice_of, claims_of


@dataclass(frozen=True)
class OpAnswer:
    """The answer of a backend to one call of an op.

    - `cost`: the cost that it claims; None if it refuses
    - `reason`: why it has this cost, or why it refuses; "" if a package's backend states no reason for its cost
    - `times`: measured times of calls of the op, from a tuning log, such as "3.1 µs of 16 tokens"
    """

    backend: str
    cost: float | None
    reason: str
    times: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.cost is None:
            return f"no: {self.reason}"
        return f"yes, cost {self.cost:g}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class OpChoice:
    """The backend that would compute an op in steps of a bucket class (range of step sizes), and all answers.

    `backend` is NONE if all refuse. `why` says why it wins.
    """

    op: str
    bucket: str
    tokens: tuple[int, int]
    backend: str
    why: str
    answers: tuple[OpAnswer, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": list(self.tokens)}


def op_choices(
    target: Target,
    backends: Sequence[Backend],
    *,
    op: str = "",
    deterministic: bool = False,
    measured: Sequence[BackendTimes] = (),
) -> list[OpChoice]:
    """Return for each op and bucket class which of `backends` would compute it on a target, and why.

    The bucket classes are those of a compile with default limits. Each op is called with its first sample, in the dtype
    of models on the target. Nothing is timed; `measured` are times of calls from a tuning log. `op` selects one op, as
    "linear" or "ingot.linear". Raises OptionError if there is no such op.
    """
    load_user_ops()
    name = op.removeprefix("ingot.")
    if name and name not in OPS:
        raise OptionError(f"unknown op '{op:.80}'", where="--op", expected=", ".join(OPS))
    wanted = {name: OPS[name]} if name else OPS
    _, nodes = one_call_of_each(wanted, torch.bfloat16 if "bf16" in target.features else torch.float32)
    most, tokens = DEFAULT_MAX_BATCH[target.device], DEFAULT_MAX_TOKENS[target.device]
    found = []
    for bucket in bucket_classes(target, backends, tokens, most, deterministic=deterministic):
        context = PassContext(
            target=target,
            max_seq_len=tokens,
            max_batch=most,
            max_tokens=tokens,
            backends=tuple(backends),
            deterministic=deterministic,
            bucket=bucket,
        )
        for called, node in nodes.items():
            claims, reasons = claims_of(node, context)
            refused = dict(reason.split(": ", 1) for reason in reasons)
            found.append(_choice(called, bucket, backends, claims, refused, _timed(called, bucket, measured)))
    place = {called: number for number, called in enumerate(nodes)}
    return sorted(found, key=lambda one: place[one.op])


def _timed(op: str, bucket: BucketClass, measured: Sequence[BackendTimes]) -> list[BackendTimes]:
    """Return the measured calls of an op in a bucket class."""
    text = bucket_text(bucket)
    return [one for one in measured if one.bucket == text and any(f"= {op}(" in line for line in one.call)]


def _choice(
    op: str,
    bucket: BucketClass,
    backends: Sequence[Backend],
    claims: Mapping[str, Yes],
    refused: Mapping[str, str],
    measured: Sequence[BackendTimes],
) -> OpChoice:
    answers = []
    for backend in backends:
        times = tuple(filter(None, (Decision.of(one, one.backend).of_backend(backend.name) for one in measured)))
        if backend.name in claims:
            cost = claims[backend.name].cost
            answers.append(OpAnswer(backend.name, cost, _cost_reason(backend.name, cost), times))
        else:
            answers.append(OpAnswer(backend.name, None, refused.get(backend.name, ""), times))
    winner, why = _winner(claims, measured)
    return OpChoice(op, bucket.name, bucket.tokens, winner, why, tuple(answers))


def _winner(claims: Mapping[str, Yes], measured: Sequence[BackendTimes]) -> tuple[str, str]:
    """Return the backend that wins, and why. `measured` are calls of the op that a log has times of."""
    if not claims:
        return NONE, "no backend claims it, so a program with this call does not compile"
    cheapest = min(claims, key=lambda name: claims[name].cost)
    known = [one for one in measured if one.backend in claims]
    won = {choice_of(claims, one) for one in known}
    if len(won) == 1:
        (winner,) = won
        why = f"the fastest in {len(measured)} measured {'call' if len(measured) == 1 else 'calls'}"
        return winner, Decision.of(known[0], winner).reason or why
    if won:
        return cheapest, f"measured calls differ: {', '.join(sorted(won))}; the lowest cost decides for others"
    if len(claims) == 1:
        return cheapest, "no other backend claims it"
    equal = [name for name, claim in claims.items() if claim.cost == claims[cheapest].cost]
    why = f"the lowest of {len(claims)} costs" + (", and the first with this cost" if len(equal) > 1 else "")
    timed = [name for name, claim in claims.items() if claim.timed]
    if len(timed) > 1 and cheapest in timed:
        why += f"; a compile times {', '.join(timed)} for calls outside regions, and leaves out the slower"
    return cheapest, why


def _cost_reason(backend: str, cost: float) -> str:
    """Return the reason for a cost in the table of backends; "" for a cost that it does not have."""
    entry = find_entry(backend)
    return next((one.why for one in entry.costs.values() if one.cost == cost), "") if entry else ""
