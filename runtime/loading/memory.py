"""The memory that serving may use, and the numbers of KV pages and state slots that fit into it."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.ir.artifact.plan import Plans
from ingot.ir.cache.groups import CacheGroup
from ingot.ir.cache.memory import MemoryNeed
from ingot.ir.cache.slot_limits import KEPT_PER_SEQUENCE, KEPT_SHARE
from ingot.ir.errors import OptionError
from ingot.runtime.loading.limits import Limits

# The default size of the KV pool on a CPU: 4 GiB, vLLM's default for its CPU backend, but at most half of the machine.
DEFAULT_KV_BYTES = 4 << 30


@dataclass(frozen=True)
class ServingMemory:
    """How much of a device's memory serving may use, in bytes.

    most          the upper limit of what a user can request
    usual         how much serving uses by default
    pool          the most that the KV cache gets by default; None: all memory that is left
    unplanned     memory that plans do not count; on a GPU: kernel code, CUDA graphs, libraries
    granularity   the smallest unit of memory that several address ranges can share; None: they cannot share memory
    """

    most: int
    usual: int
    pool: int | None = None
    unplanned: int = 0
    granularity: int | None = 1


def host_memory(memory: int, granularity: int | None = 1) -> ServingMemory:
    """Return how much memory serving may use on the CPU of a machine with `memory` bytes. By default the KV cache gets
    only a part of it, because the machine runs other programs too.

    granularity   the smallest unit of memory, in bytes, that several address ranges can share; None: they cannot share
                  memory
    """
    return ServingMemory(memory, memory, pool=min(DEFAULT_KV_BYTES, memory // 2), granularity=granularity)


# Number of pages by cache group name, including reserved pages.
Pages = Mapping[str, int]


def shared_pages(rooms: Sequence[Pages]) -> Pages:
    """Return how many KV pages every rank (device) allocates, by cache group. Ranks use equal page numbers, so the rank
    with fewest pages decides.

    `rooms` has one mapping for each rank: cache group -> number of pages that fit there. A cache group is KV caches
    that share one page table. A rank without caches of a group lacks it.
    """
    names = sorted({name for room in rooms for name in room})
    return {name: min(room[name] for room in rooms if name in room) for name in names}


def kv_pages(
    plans: Plans,
    limits: Limits,
    room: ServingMemory,
    requested: int | None,
    memory: int | None,
    *,
    keep_states: bool = True,
) -> Pages:
    """Return how many KV pages one rank (device) has memory for, by cache group. A cache group is KV caches that share
    one page table. The result is empty for a model without paged caches.

    There are enough pages for every sequence at full length, or as many as fit.

    plans         the plans of the artifact
    limits        the limits that the artifact was compiled for
    room          the device's memory for serving
    requested     the number of pages per group that the user requests, or None
    memory        the bytes that serving may use; None: `room.usual`
    keep_states   leave memory for slots in which the prefix cache keeps per-sequence states, such as Mamba's

    Raises OptionError if `requested` or `memory` is no positive integer, or if too few pages fit. The error says what
    would fit.
    """
    for name, value in (("KV pages", requested), ("bytes of memory", memory)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise OptionError(f"the {name} are {value!r:.80}", expected="a whole number above 0")
    need = MemoryNeed.of(plans, room.granularity)
    limit = min(memory or room.usual, room.most)
    left = limit - room.unplanned - need.fixed
    if not need.groups:
        if requested is not None:
            raise OptionError(
                f"{requested} KV pages for a model without a paged KV cache", hint="leave the number of pages out"
            )
        if left < 0:
            what, expected = "weights, activations and states", f"{need.fixed + room.unplanned} bytes"
            raise _no_room(need, room, limit, what, expected, "give more memory, or compile for smaller limits")
        return {}
    kept = _kept_slots(need, left, requested) * need.slot if keep_states else 0
    reserved = {name: CacheGroup.named(name).reserved for name in need.groups}
    if requested is not None:
        fitting = (left - sum(reserved[name] * group.page for name, group in need.groups.items())) // need.page
        if requested > fitting:
            what = f"{requested} KV pages of {_each(need)}"
            hint = "request fewer pages or give more memory, or compile for smaller limits"
            raise _no_room(need, room, limit, what, f"at most {max(0, fitting)} pages", hint)
        return {name: requested + reserved[name] for name in need.groups}
    if need.sequence > left:
        each = " and ".join(
            f"{need.least(name)} of {group.page} bytes{f' in {name}' if len(need.groups) > 1 else ''}"
            for name, group in need.groups.items()
        )
        what = f"the KV pages of one sequence, {need.sequence} bytes ({each}),"
        expected = f"{need.fixed + need.sequence + room.unplanned} bytes"
        raise _no_room(need, room, limit, what, expected, _what_fits(need, limits, limit - room.unplanned))
    # By default the pool takes at most its usual share, but at least enough for one sequence.
    if memory is None and room.pool is not None:
        left = min(left, max(need.sequence + kept, room.pool))
    left -= kept
    return _divided(need, limits, left)


def state_slots(
    plans: Plans, room: ServingMemory, requested: int | None, memory: int | None, *, keep_states: bool = True
) -> int:
    """Return how many slots to allocate for per-sequence states, such as Mamba's; 0 for a model without such states.
    Call `kv_pages` first, because it checks that the KV pages fit.

    plans         the plans of the artifact
    room          the device's memory for serving
    requested     the number of KV pages per cache group that the user requests, or None
    memory        the bytes that serving may use; None: `room.usual`
    keep_states   add slots in which the prefix cache keeps states. Without, there is one slot per running sequence
    """
    need = MemoryNeed.of(plans, room.granularity)
    if not need.slot:
        return 0
    left = min(memory or room.usual, room.most) - room.unplanned - need.fixed
    return need.sequences + (_kept_slots(need, left, requested) if keep_states else 0)


def _kept_slots(need: MemoryNeed, left: int, requested: int | None) -> int:
    """Return how many slots of per-sequence states, such as Mamba's, the prefix cache may keep. KV pages come first:
    those requested, or those of one sequence at full length.

    need        the bytes of a slot, of a KV page and so on
    left        the bytes that KV pages and these slots share
    requested   the number of KV pages per cache group that the user requests, or None
    """
    if not need.slot or not need.groups:
        return 0
    pages = need.sequence
    if requested is not None:
        pages = sum((requested + CacheGroup.named(name).reserved) * group.page for name, group in need.groups.items())
    share = min(left // KEPT_SHARE if requested is None else left, left - pages)
    return min(KEPT_PER_SEQUENCE * need.sequences, max(0, share) // need.slot)


def _divided(need: MemoryNeed, limits: Limits, memory: int) -> Pages:
    """Divide `memory` bytes among the cache groups, and return the number of pages of each. A cache group is KV caches
    that share one page table. The memory suffices for at least one sequence.

    Groups with sliding windows are served first, with pages for all sequences of the largest step. If there also is a
    group with full attention, they get at most about half of the memory.
    """
    most = {name: need.most(name, limits.max_batch) for name in need.groups}
    windows = [name for name in need.groups if CacheGroup.named(name).forgets]
    others = [name for name in need.groups if name not in windows]
    others_least = sum(need.least(name) * need.groups[name].page for name in others)
    share = min(memory - others_least, max(memory // 2, need.sequence - others_least)) if others else memory
    given = _in_proportion(need, most, windows, share)
    share = memory - sum(count * need.groups[name].page for name, count in given.items())
    return {**_in_proportion(need, most, others, share), **given}


def _in_proportion(need: MemoryNeed, most: Pages, names: Sequence[str], memory: int) -> dict[str, int]:
    """Divide `memory` bytes among some cache groups, and return the number of pages of each. A cache group is KV caches
    that share one page table.

    need     the bytes of a page, and the fewest pages of each group
    most     the most pages of each group; if these fit, each group gets them
    names    the names of the groups
    memory   the bytes to divide

    Otherwise each group gets its fewest pages, and a part of the pages between these and `most`. The part is the same
    fraction for all groups.
    """
    least = {name: need.least(name) for name in names}
    spare = memory - sum(count * need.groups[name].page for name, count in least.items())
    wanted = sum((most[name] - least[name]) * need.groups[name].page for name in names)
    if wanted <= spare:
        return {name: most[name] for name in names}
    return {name: least[name] + (most[name] - least[name]) * spare // wanted for name in names}


def _each(need: MemoryNeed) -> str:
    """Return a text for error messages: how many bytes a KV page has. With several cache groups, it says so for each
    group."""
    if len(need.groups) == 1:
        return f"{need.page} bytes"
    return f"{', '.join(f'{group.page} bytes ({name})' for name, group in need.groups.items())} each"


def _what_fits(need: MemoryNeed, limits: Limits, memory: int) -> str:
    """Return the hint for an error: which limits would fit into `memory` bytes. The error is that one sequence at full
    length does not fit."""

    def taken(pages: int) -> int:
        """Return the bytes of KV cache of a sequence with `pages` full pages, over all cache groups."""
        return sum(
            (one.pages_between_steps(pages * limits.page_size, limits.page_size) + one.reserved)
            * need.groups[name].page
            for name in need.groups
            for one in [CacheGroup.named(name)]
        )

    counts = range(1, -(-limits.max_seq_len // limits.page_size))
    if pages := bisect_right(counts, memory - need.fixed, key=taken):
        return f"give more memory, or compile with a max_seq_len of at most {pages * limits.page_size}"
    # Activations and other states grow about in proportion to a step's tokens and sequences.
    left = (memory - need.weights - need.page) / max(1, need.activations + need.states + need.sequences * need.slot)
    tokens, batch = (int(left * limit) for limit in (limits.max_tokens, limits.max_batch))
    if tokens < 1 or batch < 1:
        return "give more memory, or compile a smaller or quantized model: the weights leave no room"
    return f"give more memory, or compile with max_tokens below {tokens + 1} and max_batch below {batch + 1}"


def _no_room(need: MemoryNeed, room: ServingMemory, limit: int, what: str, expected: str, hint: str) -> OptionError:
    further = f", scratch pages {need.scratch_bytes}" if need.scratch_bytes else ""
    further += f", code and captured graphs {room.unplanned}" if room.unplanned else ""
    return OptionError(
        f"{what} do not fit into memory: of {limit} bytes the weights take {need.weights}, the activations"
        f" {need.activations}, other states {need.states + need.sequences * need.slot}{further}",
        where="plan.json, memory",
        expected=expected,
        hint=hint,
    )
