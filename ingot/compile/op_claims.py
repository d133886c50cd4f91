"""Find the backend that would compute each op on a target, and why other backends refuse it. For `ingot target`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ingot.ir import build
from ingot.ir.artifact.plan import BucketClass, owed_features
from ingot.ir.backend import Backend
from ingot.ir.machine.target import Target
from ingot.ir.ops import OPS
from ingot.ir.ops.registry import Op
from ingot.ir.plugins import load_user_ops
from ingot.ir.program import Program, Stage, StateSpec
from ingot.ir.types import TensorType
from ingot.passes.base import PassContext
from ingot.passes.choose_backends import claims_of

NONE = "none"
# A decode step of one sequence, and a chunk of a prompt, in tokens.
STEPS = (1, 512)


@dataclass(frozen=True)
class OpClaims:
    """The backends that would compute one op on a target.

    `backends` maps the number of tokens of a step to the backend with the lowest cost. `deterministic` is the backend
    in deterministic mode. `refusals` has the reasons of the backends that refuse. If all backends refuse, the backend
    is NONE, and a program with such a call does not compile.
    """

    op: str
    backends: Mapping[int, str]
    deterministic: str
    refusals: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "backends": {str(tokens): name for tokens, name in self.backends.items()},
            "deterministic": self.deterministic,
            "refusals": list(self.refusals),
        }


def op_claims(target: Target, backends: Sequence[Backend]) -> list[OpClaims]:
    """Return for each op which of `backends` would compute it on a target, and why others refuse.

    Nothing is timed. Each backend states a cost for one sample call of the op, in the dtype of models on the target.
    The lowest cost wins.
    """
    load_user_ops()
    _, nodes = one_call_of_each(OPS, torch.bfloat16 if "bf16" in target.features else torch.float32)
    steps = {tokens: _chosen(nodes, target, backends, tokens) for tokens in STEPS}
    deterministic, _ = _chosen(nodes, target, backends, max(STEPS), deterministic=True)
    return [
        OpClaims(
            op=name,
            backends={tokens: chosen[name] for tokens, (chosen, _) in steps.items()},
            deterministic=deterministic[name],
            refusals=tuple(_merged({tokens: refused[name] for tokens, (_, refused) in steps.items()})),
        )
        for name in nodes
    ]


def _chosen(
    nodes: Mapping[str, fx.Node],
    target: Target,
    backends: Sequence[Backend],
    tokens: int,
    *,
    deterministic: bool = False,
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return two dicts by op: the backend with the lowest cost, and the reasons why backends refuse.

    They are for steps of `tokens` tokens. `nodes` holds one call of each op.
    """
    context = PassContext(
        target=target,
        max_seq_len=max(STEPS),
        max_batch=max(STEPS),
        max_tokens=max(STEPS),
        backends=tuple(backends),
        deterministic=deterministic,
        bucket=BucketClass(
            name=f"T={tokens}", tokens=(tokens, tokens), features=owed_features(deterministic=deterministic)
        ),
    )
    claims = {name: claims_of(node, context) for name, node in nodes.items()}
    cheapest = {name: min(found, key=lambda one: found[one].cost, default=NONE) for name, (found, _) in claims.items()}
    return cheapest, {name: reasons for name, (_, reasons) in claims.items()}


def _merged(refusals: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """Yield the reasons why backends refuse an op, each once. `refusals` maps a step size in tokens to reasons.

    If a reason does not hold for all step sizes, its text ends in the sizes for which it holds, as in "… (T=1)".
    """
    for reason in dict.fromkeys(reason for reasons in refusals.values() for reason in reasons):
        where = [tokens for tokens, reasons in refusals.items() if reason in reasons]
        yield reason if len(where) == len(refusals) else f"{reason} (T={', '.join(map(str, where))})"


def one_call_of_each(ops: Mapping[str, Op], dtype: torch.dtype = torch.float32) -> tuple[Program, dict[str, fx.Node]]:
    """Return a program that calls every op once, and its calls by the op's name, such as "ingot.linear".

    A call has the arguments of the op's first sample (an example call for tests), in `dtype`. Its tensors become inputs
    or states of the program.
    """
    program = Program("ops", Stage.CACHED, {})
    nodes: dict[str, fx.Node] = {}
    for op in ops.values():
        sample = op.samples(torch.Generator().manual_seed(0), dtype)[0]

        def value(name: str, given: Any, op: Op = op) -> Any:
            if not isinstance(given, torch.Tensor):
                return given
            value_type, full = TensorType(given.dtype, tuple(given.shape)), f"{op.name}.{name}"
            if name in op.states:
                return program.add_state(full, StateSpec("sample", op.name, "sequence", value_type))
            return program.add_input(full, value_type)

        args = [value(name, given) for name, given in zip(op.parameters.names, sample.args, strict=False)]
        kwargs = {name: value(name, given) for name, given in sample.kwargs.items()}
        nodes[f"ingot.{op.name}"] = build.call(program, op.overload, args, kwargs)
    return program, nodes
