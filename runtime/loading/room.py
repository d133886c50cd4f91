"""The pages and slots that serving allocates: what fits on every rank of a mesh, or on the only device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ingot.ir.artifact.plan import Plans
from ingot.ir.cache.scratch_pages import Scratch, scratch_of
from ingot.ir.machine.target import Target
from ingot.runtime.cuda.graphs.choice import Capture
from ingot.runtime.cuda.memory import device_memory
from ingot.runtime.loading.limits import Limits
from ingot.runtime.loading.memory import Pages, ServingMemory, host_memory, kv_pages, shared_pages, state_slots


@dataclass(frozen=True)
class Room:
    """The pages and slots that every rank allocates. Ranks use equal numbers of pages and slots.

    pages     cache group -> its number of KV pages; a cache group is KV caches that share one page table
    scratch   cache group with sliding windows -> its scratch pages, or the reason why it has none
    slots     the number of slots for per-sequence states, such as Mamba's
    """

    pages: Pages
    scratch: Mapping[str, Scratch]
    slots: int


def find_room(
    each: Sequence[Plans],
    limits: Limits,
    memory: ServingMemory,
    requested: int | None,
    limit: int | None,
    *,
    keep_states: bool,
) -> Room:
    """Return the pages and slots for which every rank has memory.

    each          the plans of each rank
    limits        the limits that the artifact was compiled for
    memory        the memory of one rank
    requested     the number of pages per cache group that the user requests, or None
    limit         the bytes that one rank may use; None: what is usual
    keep_states   reserve slots in which the prefix cache keeps per-sequence states

    Raises OptionError if the plans do not fit.
    """
    rooms, slots = [], []
    scratch: dict[str, Scratch] = {}
    paged = [one for one in each if any(plan.memory.groups for plan in one.plans.values())]
    for one in each:
        pages = requested if one in paged or not paged else None  # a pipeline stage may have no cache
        rooms.append(kv_pages(one, limits, memory, pages, limit, keep_states=keep_states))
        slots.append(state_slots(one, memory, pages, limit, keep_states=keep_states))
        scratch |= scratch_of(one, on_device=memory.granularity is not None)
    return Room(shared_pages(rooms), scratch, min((count for count in slots if count), default=0))


def serving_memory(target: Target, plans: Plans, granularity: int | None, *, capture: Capture) -> ServingMemory:
    """Return the memory of this machine for serving `plans`. `granularity` is the unit in which caches can share memory
    (scratch pages); None: they do not."""
    granularity = granularity if scratch_of(plans) else None
    if target.device == "cpu":
        return host_memory(target.memory, granularity)
    device = torch.device(target.device)
    return device_memory(device, plans, graphs=capture != "none", granularity=granularity)
