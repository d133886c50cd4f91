"""Shared by the backends of collectives: how ranks are found, how values are added, and what needs no connection."""

from collections.abc import Mapping
from typing import TypeVar

import torch

from ingot.ir.errors import InternalError
from ingot.ir.machine.load_context import Communicator
from ingot.ir.ops.collectives import own_part
from ingot.ir.ops.registry import wide

Connection = TypeVar("Connection", bound=Communicator)


def along(communicators: Mapping[str, Connection], axis: str) -> Connection:
    """Return the connection of the ranks of a mesh axis. Raises InternalError if there is none."""
    found = communicators.get(axis)
    if found is None:
        raise InternalError(f"no ranks are connected along the axis '{axis}'", expected=", ".join(communicators))
    return found


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Add up tensors in order, in float32 or wider, and round the sum only. All ranks then have the same bits."""
    total = wide(parts[0])
    for part in parts[1:]:
        total = total + wide(part)
    return total.to(parts[0].dtype)


def take_part(
    communicators: Mapping[str, Communicator], x: torch.Tensor, *, axis: str, dim: int, parts: int
) -> torch.Tensor:
    return own_part(x, along(communicators, axis).place, parts, dim)


def vocab_embedding(
    communicators: Mapping[str, Communicator], tokens: torch.Tensor, weight: torch.Tensor, *, axis: str, parts: int
) -> torch.Tensor:
    local = tokens.long() - along(communicators, axis).place * weight.shape[0]
    mine = (local >= 0) & (local < weight.shape[0])
    rows = weight.index_select(0, torch.where(mine, local, 0))
    return rows.masked_fill_(~mine[:, None], 0)
