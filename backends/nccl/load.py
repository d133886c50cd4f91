"""The nccl backend at run time: the collectives of GPUs, on the executor's stream."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch

from ingot.backends.collectives import along, take_part, vocab_embedding
from ingot.backends.nccl.communicator import NcclCommunicator
from ingot.ir.machine.load_context import LoadContext
from ingot.ir.ops.collectives import in_parts

Communicators = Mapping[str, NcclCommunicator]


def collectives(context: LoadContext) -> Mapping[str, Callable[..., Any]]:
    """Return the functions of the ops that ranks of a mesh axis compute together, by op name."""
    communicators = cast(Communicators, context.communicators)  # which this backend's `connect` has made
    return {
        f"ingot.{name}": partial(function, communicators)
        for name, function in (
            ("all_reduce", _all_reduce),
            ("all_gather", _all_gather),
            ("reduce_scatter", _reduce_scatter),
            ("take_part", take_part),
            ("vocab_embedding", vocab_embedding),
        )
    }


def _all_reduce(communicators: Communicators, x: torch.Tensor, *, axis: str) -> torch.Tensor:
    return along(communicators, axis).total(x)


def _all_gather(
    communicators: Communicators,
    x: torch.Tensor,
    like: torch.Tensor | None = None,
    *,
    axis: str,
    dim: int,
    parts: int,
) -> torch.Tensor:
    found = along(communicators, axis).gathered(x)
    joined = found.flatten(0, 1) if dim == 0 else torch.cat(found.unbind(), dim)
    return joined if like is None else joined[: like.shape[0]]


def _reduce_scatter(communicators: Communicators, x: torch.Tensor, *, axis: str, dim: int, parts: int) -> torch.Tensor:
    return along(communicators, axis).part_of_total(in_parts(x, parts, dim))
