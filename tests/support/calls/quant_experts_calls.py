"""Calls of `experts` with quantized weights, and their results by Triton kernels against the op's reference."""

from typing import Any

import torch
from experts_oracle import experts_difference
from triton_schedules import run_lowering

from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.experts.experts import lower_experts
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir import ops
from ingot.ir.formats import PARTS, find_format
from ingot.ir.formats.stacked import quantize_stack

CLASSES = ((1, 1), (2, 16), (17, 32), (33, 64), (65, 8192))


def call(
    formats: tuple[str, str],
    tokens: int,
    dtype: torch.dtype,
    *,
    experts: int = 5,
    top_k: int = 2,
    hidden: int = 256,
    ffn: int = 128,
    biases: bool = False,
    **options: Any,
) -> tuple[list[Any], dict[str, Any]]:
    g = torch.Generator().manual_seed(tokens + experts)
    chosen = torch.rand(tokens, experts, generator=g).argsort(-1)[:, :top_k].int().contiguous()
    args: list[Any] = [torch.randn(tokens, hidden, generator=g).to(dtype), torch.rand(tokens, top_k, generator=g)]
    weights, parts = [], []
    for name, shape in zip(formats, ((2 * ffn, hidden), (hidden, ffn)), strict=True):
        numbers = (torch.randn(experts, *shape, generator=g) * shape[1] ** -0.5).to(dtype)
        made = quantize_stack(numbers, find_format(name))
        weights.append(made["weight"])
        parts += [made.get(part) for part in PARTS[1:]]
    added = [torch.randn(experts, size, generator=g).to(dtype) if biases else None for size in (2 * ffn, hidden)]
    kwargs = {**options, "gate_up_format": formats[0], "down_format": formats[1]}
    return [*args, chosen, *weights, *added, *parts], kwargs


def check(
    args: list[Any],
    kwargs: dict[str, Any],
    *,
    invariant: bool = False,
    block: int | None = None,
    cores: int = 132,
) -> None:
    rows = args[0].shape[0]
    tokens = next(bounds for bounds in CLASSES if rows <= bounds[1])

    def lowering(one: Call, schedule: Schedule) -> tuple[Value, ...]:
        return lower_experts(one, schedule, block)

    options: dict[str, Any] = {"tokens": tokens, "dims": {"T": rows}, "cores": cores, "invariant": invariant}
    (found,) = run_lowering(ops.experts, lowering, args, kwargs, **options)
    assert (problem := experts_difference(args, kwargs, found.cpu())) is None, f"{kwargs}: {problem}"
