"""Faults of backends: what loading gives for an op computes something else than it should."""

import contextlib
import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ingot.backends.cpu import load as cpu_load
from ingot.backends.reference import load as reference_load
from ingot.ir.ops import OPS
from ingot.ir.program import Program, target_name
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.weights import map_weights
from planted.changes import value_name
from planted.fault import Fault, NoFault, Setup, Truth, replaced

Kernel = Callable[..., Any]
# Given the kernel and its arguments by name, the wrong result.
Wrong = Callable[[Kernel, dict[str, Any]], Any]

_TABLES = ("dense_ops", "rope_ops", "attention_ops", "step_ops")  # where the cpu backend's ops come from


def _with(**changes: Callable[[Any], Any]) -> Wrong:
    """The right kernel, given another argument."""

    def run(kernel: Kernel, args: dict[str, Any]) -> Any:
        return kernel(**{**args, **{name: change(args[name]) for name, change in changes.items()}})

    return run


def _swapped(one: str, other: str) -> Wrong:
    return lambda kernel, args: kernel(**{**args, one: args[other], other: args[one]})


def _spoiled(change: Callable[[torch.Tensor], None]) -> Wrong:
    """A part of the first result overwritten."""

    def run(kernel: Kernel, args: dict[str, Any]) -> Any:
        result = kernel(**args)
        change(result[0] if isinstance(result, tuple | list) else result)
        return result

    return run


def _row(tensor: torch.Tensor) -> None:
    tensor[-1] *= 0.5


def _column(tensor: torch.Tensor) -> None:
    tensor[..., -1] = 0


def _head(tensor: torch.Tensor) -> None:
    tensor[:, -1] = tensor[:, 0]


def _in_place(name: str) -> Wrong:
    """The result is right, and is written over an argument too, which somebody reads later."""

    def run(kernel: Kernel, args: dict[str, Any]) -> Any:
        result = kernel(**args)
        first = result[0] if isinstance(result, tuple | list) else result
        args[name].copy_(first.reshape(args[name].shape))
        return result

    return run


def _rolled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(1, 0)


def _next_page(slots: torch.Tensor) -> torch.Tensor:
    return torch.where(slots >= 0, slots ^ 1, slots)


def _kv_swapped(kernel: Kernel, args: dict[str, Any]) -> Any:
    return kernel(**{**args, "k": args["v"], "v": args["k"]})


def _stale(kernel: Kernel, args: dict[str, Any]) -> Any:
    """The last token of the step is not written to the cache."""
    slots = args["slots"].clone()
    slots[-1] = -1
    return kernel(**{**args, "slots": slots})


def _stands_still(kernel: Kernel, args: dict[str, Any]) -> Any:
    """Rows keep the position that they had."""
    before = args["position"].clone()
    result = kernel(**args)
    if result is None:
        args["position"].copy_(before)
        return None
    return result[0], before


def _narrow(x: torch.Tensor) -> torch.Tensor:
    """What reading an operand through a type of half the bits leaves of it."""
    return x.to(torch.bfloat16).to(x.dtype) if x.dtype is torch.float32 else x.to(torch.float8_e4m3fn).to(x.dtype)


_EPS = {"wrong epsilon": _with(eps=lambda eps: eps * 4 + 1e-3)}
_GATE = {"swapped arguments": _swapped("gate", "up"), "one row wrong": _spoiled(_row)}
# By op: the class of the fault, and what the kernel does.
KERNELS: Mapping[str, Mapping[str, Wrong]] = {
    "linear": {
        "transposed weight": _with(weight=lambda w: w.t().contiguous() if w.shape[0] == w.shape[1] else w),
        "one row wrong": _spoiled(_row),
        "one column wrong": _spoiled(_column),
        "off by one": _with(weight=_rolled),
        "dropped cast": _with(x=_narrow),
    },
    "rms_norm": {**_EPS, "one row wrong": _spoiled(_row), "reused buffer": _in_place("x")},
    "layer_norm": {**_EPS, "one column wrong": _spoiled(_column)},
    "add_rms_norm": {
        **_EPS,
        "missing residual": lambda kernel, args: kernel(**{**args, "residual": torch.zeros_like(args["residual"])}),
        "wrong result index": lambda kernel, args: tuple(reversed(kernel(**args))),
        "one row wrong": _spoiled(_row),
    },
    "silu_mul": _GATE,
    "gelu_mul": _GATE,
    "activate": {"one row wrong": _spoiled(_row)},
    "soft_cap": {"wrong soft cap": _with(cap=lambda cap: cap * 1.25)},
    "rope": {
        "wrong rope section": _with(table=lambda table: table.roll(table.shape[1] // 2, 1)),
        "wrong index": _with(positions=lambda positions: (positions - 1).clamp(min=0)),
        "one head wrong": _spoiled(_head),
    },
    "qk_norm_rope_append": {
        **_EPS,
        "page off by one": _with(slots=_next_page),
        "wrong index": _with(positions=lambda positions: (positions - 1).clamp(min=0)),
    },
    "kv_append": {
        "page off by one": _with(slots=_next_page),
        "stale state": _stale,
        "swapped arguments": _kv_swapped,
    },
    "paged_attention": {
        "wrong scale": _with(scale=lambda scale: scale * 1.25),
        "wrong mask edge": _with(kv_lens=lambda lens: (lens - 1).clamp(min=1)),
        "one head wrong": _spoiled(_head),
        "page off by one": _with(page_table=lambda table: table.roll(1, 1)),
        "one row wrong": _spoiled(_row),
        "dropped cast": _with(q=_narrow),
    },
    "embedding": {
        "wrong index": _with(tokens=lambda tokens: (tokens - 1).clamp(min=0)),
        "one row wrong": _spoiled(_row),
    },
    "sample": {
        "wrong index": _with(logits=lambda logits: logits.roll(1, 1)),
        "swapped arguments": _swapped("top_p", "min_p"),
    },
    "advance": {"stale state": _stands_still},
    "count_tokens": {},
    "select_rows": {"wrong index": _with(rows=lambda rows: rows.flip(0))},
    "quant_linear": {
        "wrong scale": _with(scales=lambda scales: scales * 1.25),
        "one column wrong": _spoiled(_column),
    },
}
# What tells one call of an op from another on the run side: the weight that it reads.
_WEIGHTS = {
    "linear": "weight",
    "quant_linear": "weight",
    "rms_norm": "weight",
    "layer_norm": "weight",
    "add_rms_norm": "weight",
    "qk_norm_rope_append": "q_weight",
}


def draw(backend: str, setup: Setup, programs: list[Program], artifact: Path, draw: random.Random) -> Fault:
    """A fault of one op of a backend: at one node where it reads a weight of its own, or else at all of its calls."""
    program = draw.choice(programs)
    by_op: dict[str, list[fx.Node]] = {}
    for node in program.calls():
        name = target_name(node.target).removeprefix("ingot.")
        if node.meta.get("backend") == backend and KERNELS.get(name):
            by_op.setdefault(name, []).append(node)
    if not by_op:
        raise NoFault(f"{backend} computes nothing in {setup}")
    op = draw.choice(sorted(by_op))
    label = draw.choice(sorted(KERNELS[op]))
    nodes, weight = by_op[op], None
    if op in _WEIGHTS:
        node = draw.choice(nodes)
        reads = OPS[op].bind(node.args, node.kwargs)[_WEIGHTS[op]]
        if isinstance(reads, fx.Node) and reads.op == "placeholder":
            weight = map_weights(open_artifact(artifact))[str(reads.target)].clone()
            nodes = [one for one in nodes if reads in one.args]
    outputs = {node: name for name, node in program.output_nodes().items()}
    names = [
        name for node in nodes for name in (value_name(node), *(user.name for user in node.users), outputs.get(node))
    ]
    bound = _only_where(OPS[op].reference, KERNELS[op][label], _WEIGHTS.get(op), weight)
    where = f" at %{nodes[0].name}" if weight is not None else ""
    truth = Truth(
        "backend",
        backend,
        f"{op}{where}: {label}",
        tuple(dict.fromkeys(name for name in names if name)),
        bucket=program.bucket.name if program.bucket else None,
    )
    return Fault(label, setup, truth, lambda: _planted(backend, op, bound))


def _only_where(reference: Kernel, wrong: Wrong, name: str | None, weight: torch.Tensor | None) -> Callable[..., Any]:
    """`wrong` for the calls that read this weight, or for all."""
    signature = inspect.signature(reference)

    def wrap(kernel: Kernel) -> Kernel:
        def run(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if weight is not None:
                read = given[name]
                if read.shape != weight.shape or read.dtype != weight.dtype or not torch.equal(read, weight):
                    return kernel(*args, **kwargs)
            return wrong(_by_name(kernel, signature), dict(given))

        return run

    return wrap


def _by_name(kernel: Kernel, signature: inspect.Signature) -> Kernel:
    """Kernels take their tensors by place."""

    def call(**named: Any) -> Any:
        bound = signature.bind(**named)
        return kernel(*bound.args, **bound.kwargs)

    return call


@contextlib.contextmanager
def _planted(backend: str, op: str, wrap: Callable[[Kernel], Kernel]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if backend == "cpu":
            for table in _TABLES:
                stack.enter_context(replaced(cpu_load, table, _table_with(getattr(cpu_load, table), op, wrap)))
        else:
            before = OPS[op]
            after = dataclasses.replace(
                before,
                reference=wrap(before.reference),
                rowwise=wrap(before.rowwise),
                in_place=wrap(before.in_place) if before.in_place else None,
            )
            stack.enter_context(replaced(reference_load, "OPS", {**OPS, op: after}))
        yield


def _table_with(make: Callable[..., dict[str, Kernel]], op: str, wrap: Callable[[Kernel], Kernel]) -> Any:
    def made(kernels: Any) -> dict[str, Kernel]:
        found = make(kernels)
        name = f"ingot.{op}"
        return {**found, name: wrap(found[name])} if name in found else found

    return made
