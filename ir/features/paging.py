"""The step inputs of the paged cache: page tables, slots and lengths."""

from functools import cache

import numpy as np
import torch

from ingot.ir.cache.groups import FULL, CacheGroup
from ingot.ir.features.feature import Feature
from ingot.ir.features.fed import Fed
from ingot.ir.features.request_view import Array
from ingot.ir.features.step_input import StepInput
from ingot.ir.types import TensorType


def _kv_lens(array: Array, fed: Fed) -> None:
    array[:] = fed.known_places + fed.lengths


def _inputs(group: CacheGroup) -> tuple[StepInput, ...]:
    """Return the step inputs of a KV cache group: its page table, and the cache slots of the step's tokens.

    A cache slot is the place of a token: page * page size + offset.
    """

    def page_table(array: Array, fed: Fed) -> None:
        fed.pages_of(group)[:, : array.shape[1]].take(fed.rows, axis=0, out=array, mode="clip")

    def slots(array: Array, fed: Fed) -> None:
        pages = fed.pages_of(group)[fed.rows[fed.seqs], fed.positions // fed.page_size].astype(np.int64)
        array[:] = pages * fed.page_size + fed.positions % fed.page_size

    return (
        # Varies, because a decoding sequence gets new pages. Unused entries are 0.
        StepInput(group.page_table, TensorType(torch.int32, ("B", "P")), 0, page_table, varies=True),
        StepInput(group.slots, TensorType(torch.int64, ("T",)), -1, slots, known=False),
    )


PAGING = Feature(
    "paging",
    inputs=(*_inputs(FULL), StepInput("kv_lens", TensorType(torch.int32, ("B",)), 0, _kv_lens, known=False)),
)


@cache
def paging_of(group: CacheGroup) -> Feature:
    """Return the feature that declares the step inputs of a KV cache group, such as "window_1024".

    They are its page table and its slots (the places of the step's tokens in the caches). For the group FULL, use the
    feature PAGING.
    """
    return Feature(f"paging_{group.name}", inputs=_inputs(group))
