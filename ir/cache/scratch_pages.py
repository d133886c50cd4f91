"""Scratch pages: pages for the keys and values of a prompt chunk that no later step reads.

A cache group with a window keeps only what later tokens read. In a step with a long prompt chunk, each layer also
writes keys and values of tokens before the window at the chunk's end. That layer's attention reads them in the same
step, and nothing reads them later. Layers run one after the other, so all caches of a group can share the memory of
these pages: the pages after those of the pool are the same memory in every cache (`ingot.runtime.loading.states`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ingot.ir.artifact.plan import BucketPlan, Instruction, Plan, Plans, Ref, shape_text
from ingot.ir.cache.groups import CacheGroup


@dataclass(frozen=True)
class Scratch:
    """The scratch pages of a KV cache group. They hold keys and values that are used in one step only.

    pages     the number of scratch pages for the largest step; 0 if the group has none
    page      bytes of a page in one cache
    caches    the number of caches in the group; their scratch pages are the same memory
    why_none  why the group has no scratch pages; "" if it has some
    """

    pages: int = 0
    page: int = 0
    caches: int = 0
    why_none: str = ""

    def bytes(self, granularity: int) -> int:
        """Return the most bytes that the group's scratch pages take; 0 without scratch pages.

        Scratch pages are used in one step only. All caches of the group share them, so they count once. The device maps
        memory in multiples of `granularity` bytes. The loss by rounding up to these multiples counts too.
        """
        if not self.pages:
            return 0
        lost = (self.caches + 1) * (granularity - 1) + (self.page if granularity > 1 else 0)
        return self.pages * self.page + lost


def scratch_of(plans: Plans, *, on_device: bool = True) -> dict[str, Scratch]:
    """Return the scratch pages of each KV cache group with a window or chunks, by the name of the group.

    Scratch pages hold keys and values that are used in one step only. All caches of a group share their memory.
    `on_device` says whether the device can map one piece of memory into several caches. If not, each group has 0
    scratch pages.
    """
    found: dict[str, list[tuple[Plan, str, str]]] = {}
    for plan in plans.plans.values():
        for name, state in plan.states.items():
            group = CacheGroup.named(state.group)
            if group.forgets and "pages" in shape_text(state.type):
                found.setdefault(group.name, []).append((plan, name, state.type))
    if not on_device:
        none = Scratch(why_none="the device cannot map memory into several address ranges")
        return dict.fromkeys(found, none)
    return {name: _scratch(CacheGroup.named(name), caches, plans) for name, caches in found.items()}


def _scratch(group: CacheGroup, caches: list[tuple[Plan, str, str]], plans: Plans) -> Scratch:
    names, types = {name for _, name, _ in caches}, {text for _, _, text in caches}
    sizes = shape_text(min(types))
    if len(types) > 1 or sizes[0] != "pages" or len(sizes) < 3 or not sizes[2].isdecimal():
        return Scratch(why_none="its caches differ in type, or their first axis is not pages")
    if len(caches) > len(names):
        return Scratch(why_none="entries share its caches")
    page_size, tokens = int(sizes[2]), max(plan.dims.get("T", (1, 1))[1] for plan, _, _ in caches)
    if not (pages := group.pages_read_at_once(tokens, page_size)):
        return Scratch(why_none=f"a step of {tokens} tokens fills no page that no later step reads")
    for entry, plan in plans.plans.items():
        for bucket in plan.buckets:
            if name := _resumed(bucket, names & plan.states.keys()):
                return Scratch(why_none=f"{entry} goes back to the cache '{name}' after another one of the group")
    first = caches[0][0]
    in_first = sum(plan is first for plan, _, _ in caches)
    return Scratch(pages, first.memory.groups[group.name].page // in_first, len(caches))


def _resumed(bucket: BucketPlan, caches: set[str]) -> str | None:
    """Return the name of a cache that makes scratch pages impossible in a bucket class; None if none does.

    Caches can share scratch pages if the instructions finish with one of `caches` before they use the next one. A cache
    breaks this if it is used again after another one, or by one instruction together with another one. A bucket class
    is a range of step sizes.
    """
    at: str | None = None
    done: set[str] = set()
    for instruction in bucket.instructions:
        used = [name for name in dict.fromkeys(_storages(instruction, bucket)) if name in caches]
        if len(used) > 1:
            return used[0]
        if used and used[0] != at:
            if used[0] in done:
                return used[0]
            done |= {at} if at is not None else set()
            at = used[0]
    return None


def _storages(instruction: Instruction, bucket: BucketPlan) -> Iterator[str]:
    """Yield the names of the states and values whose memory an instruction uses.

    For a view, that is the viewed value.
    """
    for argument in (*instruction.args, *instruction.kwargs.values()):
        if isinstance(argument, Ref):
            value = bucket.values.get(argument.ref)
            yield argument.ref if value is None or value.of is None else value.of
    yield from instruction.updates
