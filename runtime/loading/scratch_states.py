"""Allocation of KV caches that share the memory of their scratch pages (`ingot.ir.cache.scratch_pages`)."""

from collections.abc import Mapping

import torch

from ingot.ir.artifact.plan import State
from ingot.ir.cache.scratch_pages import Scratch
from ingot.ir.errors import InternalError, OptionError
from ingot.ir.machine.load_context import Allocator
from ingot.ir.parse import parse_type


def caches_with_scratch(
    specs: Mapping[str, State], pages: int, scratch: Scratch, allocator: Allocator
) -> tuple[dict[str, torch.Tensor], range]:
    """Allocate the KV caches of one cache group (caches that share one page table). Each cache has pages of its own,
    and scratch pages. The scratch pages are one memory that all caches share. They have keys and values that only one
    step of a long prefill reads.

    specs       name -> declaration of each cache
    pages       the number of a cache's own pages
    scratch     the number and size of the scratch pages
    allocator   allocates the memory

    Returns (name -> cache, page numbers of the scratch pages). These numbers may leave a gap after a cache's own pages,
    because shared memory is mapped in large units.
    """
    granularity = allocator.granularity
    if granularity is None:
        raise InternalError("scratch pages on a device that cannot map shared memory", where="caches_with_scratch")
    own = _rounded(pages * scratch.page, granularity)
    first = -(-own // scratch.page)
    count = first + scratch.pages
    tail = _rounded(count * scratch.page - own, granularity)
    try:
        memories = allocator.with_shared_tail(len(specs), own, tail)
    except MemoryError as error:
        raise OptionError(
            f"there is no memory for the {len(specs)} caches of '{next(iter(specs.values())).group}': {error}",
            expected=f"{len(specs) * own + tail} bytes, {tail} of which are scratch pages",
            hint="serve with fewer KV pages",
        ) from error
    made = {}
    for (name, spec), memory in zip(specs.items(), memories, strict=True):
        cache = parse_type(spec.type)
        view = memory[: count * scratch.page].view(cache.dtype)
        made[name] = view.view(cache.bind({"pages": count}))
    return made, range(first, count)


def _rounded(count: int, granularity: int) -> int:
    return -(-count // granularity) * granularity
