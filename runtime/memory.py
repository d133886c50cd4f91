"""How much memory serving may take, and how many KV pages and slots of state that leaves."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.ir.artifact.plan import Plans
from ingot.ir.cache.groups import CacheGroup
from ingot.ir.cache.memory import MemoryNeed
from ingot.ir.cache.slot_limits import KEPT_PER_SEQUENCE, KEPT_SHARE
from ingot.ir.errors import OptionError
from ingot.runtime.limits import Limits

# What a KV pool takes on a CPU when no bound is given: vLLM's default for its CPU backend, 4 GiB, and never more
# than half of the machine.
DEFAULT_KV_BYTES = 4 << 30


@dataclass(frozen=True)
class ServingMemory:
    """What a device has for serving, in bytes.

    most         what serving can take, whatever is asked for
    usual        what it takes when it is not bounded
    pool         what the KV pool takes of that at most when it is not bounded; None for all that is left
    beside       of either, what goes to what no plan counts: on a GPU the code of kernels, captured graphs, libraries
    granularity  bytes in multiples of which it maps memory into ranges of addresses; None where it does not
    """

    most: int
    usual: int
    pool: int | None = None
    beside: int = 0
    granularity: int | None = 1


def host_memory(memory: int, granularity: int | None = 1) -> ServingMemory:
    """A machine of `memory` bytes that serves on its CPU, beside other work."""
    return ServingMemory(memory, memory, pool=min(DEFAULT_KV_BYTES, memory // 2), granularity=granularity)


# The pages of each group of caches, by the name of the group; those that are never handed out count.
Pages = Mapping[str, int]


def shared_pages(rooms: Sequence[Pages]) -> Pages:
    """The pages of every rank, decided from what each rank has room for (`kv_pages`), in any order: the least. All
    ranks keep the same sequences in pages of the same names."""
    return {name: min(room[name] for room in rooms) for name in rooms[0]}


def kv_pages(
    plans: Plans,
    limits: Limits,
    room: ServingMemory,
    asked: int | None,
    memory: int | None,
    *,
    keep_states: bool = True,
) -> Pages:
    """What one rank has room for: pages for every sequence at full length, or as many as fit beside all else that its
    plans need.

    `asked` is how many of each group are asked for, and `memory` the bytes that serving may take. A model without
    such caches has no group. `keep_states`: the prefix cache gets slots beside them. Raises OptionError for what is no
    such number, and when too few pages fit, with what would.
    """
    for name, value in (("KV pages", asked), ("bytes of memory", memory)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise OptionError(f"the {name} are {value!r:.80}", expected="a whole number above 0")
    need = MemoryNeed.of(plans, room.granularity)
    limit = min(memory or room.usual, room.most)
    left = limit - room.beside - need.fixed
    if not need.groups:
        if asked is not None:
            raise OptionError(
                f"{asked} KV pages for a model without a paged KV cache", hint="leave the number of pages out"
            )
        if left < 0:
            what, expected = "weights, activations and states", f"{need.fixed + room.beside} bytes"
            raise _no_room(need, room, limit, what, expected, "give more memory, or compile for smaller limits")
        return {}
    kept = _kept_slots(need, left, asked) * need.slot if keep_states else 0
    reserved = {name: CacheGroup.named(name).reserved for name in need.groups}
    if asked is not None:
        fitting = (left - sum(reserved[name] * group.page for name, group in need.groups.items())) // need.page
        if asked > fitting:
            what = f"{asked} KV pages of {_each(need)}"
            hint = "ask for fewer pages or give more memory, or compile for smaller limits"
            raise _no_room(need, room, limit, what, f"at most {max(0, fitting)} pages", hint)
        return {name: asked + reserved[name] for name in need.groups}
    if need.sequence > left:
        each = " and ".join(
            f"{need.least(name)} of {group.page} bytes{f' in {name}' if len(need.groups) > 1 else ''}"
            for name, group in need.groups.items()
        )
        what = f"the KV pages of one sequence, {need.sequence} bytes ({each}),"
        expected = f"{need.fixed + need.sequence + room.beside} bytes"
        raise _no_room(need, room, limit, what, expected, _what_fits(need, limits, limit - room.beside))
    # Without a word about memory the pool takes its usual share, which holds one sequence at least.
    if memory is None and room.pool is not None:
        left = min(left, max(need.sequence + kept, room.pool))
    left -= kept
    return _divided(need, limits, left)


def state_slots(
    plans: Plans, room: ServingMemory, asked: int | None, memory: int | None, *, keep_states: bool = True
) -> int:
    """The slots of states that stand once per sequence, where `kv_pages` has found room for the pages: one of each
    sequence that runs, and with `keep_states` those that the prefix cache keeps; 0 without such states."""
    need = MemoryNeed.of(plans, room.granularity)
    if not need.slot:
        return 0
    left = min(memory or room.usual, room.most) - room.beside - need.fixed
    return need.sequences + (_kept_slots(need, left, asked) if keep_states else 0)


def _kept_slots(need: MemoryNeed, left: int, asked: int | None) -> int:
    """The slots that the prefix cache may keep, of `left` bytes for them and for pages. Pages that are asked for, and
    those of one sequence at full length, come first."""
    if not need.slot or not need.groups:
        return 0
    pages = need.sequence
    if asked is not None:
        pages = sum((asked + CacheGroup.named(name).reserved) * group.page for name, group in need.groups.items())
    share = min(left // KEPT_SHARE if asked is None else left, left - pages)
    return min(KEPT_PER_SEQUENCE * need.sequences, max(0, share) // need.slot)


def _divided(need: MemoryNeed, limits: Limits, memory: int) -> Pages:
    """The pages of each group in `memory` bytes, which hold one sequence. Groups with a window get what the sequences
    of the largest step need, and half of the memory at most where another group keeps every token."""
    most = {name: need.most(name, limits.max_batch) for name in need.groups}
    windows = [name for name in need.groups if CacheGroup.named(name).forgets]
    others = [name for name in need.groups if name not in windows]
    beside = sum(need.least(name) * need.groups[name].page for name in others)
    share = min(memory - beside, max(memory // 2, need.sequence - beside)) if others else memory
    given = _in_proportion(need, most, windows, share)
    share = memory - sum(count * need.groups[name].page for name, count in given.items())
    return {**_in_proportion(need, most, others, share), **given}


def _in_proportion(need: MemoryNeed, most: Pages, names: Sequence[str], memory: int) -> dict[str, int]:
    """As many pages of these groups as are of use, or as fit: each its least, and an equal part of what it wants."""
    least = {name: need.least(name) for name in names}
    spare = memory - sum(count * need.groups[name].page for name, count in least.items())
    wanted = sum((most[name] - least[name]) * need.groups[name].page for name in names)
    if wanted <= spare:
        return {name: most[name] for name in names}
    return {name: least[name] + (most[name] - least[name]) * spare // wanted for name in names}


def _each(need: MemoryNeed) -> str:
    """The bytes of a page, of each group where there are several."""
    if len(need.groups) == 1:
        return f"{need.page} bytes"
    return f"{', '.join(f'{group.page} bytes ({name})' for name, group in need.groups.items())} each"


def _what_fits(need: MemoryNeed, limits: Limits, memory: int) -> str:
    """What to do where not even one sequence at full length fits."""

    def taken(pages: int) -> int:
        """Bytes of the pages of a sequence of so many pages of tokens."""
        return sum(
            (one.pages_between_steps(pages * limits.page_size, limits.page_size) + one.reserved)
            * need.groups[name].page
            for name in need.groups
            for one in [CacheGroup.named(name)]
        )

    counts = range(1, -(-limits.max_seq_len // limits.page_size))
    if pages := bisect_right(counts, memory - need.fixed, key=taken):
        return f"give more memory, or compile with a max_seq_len of at most {pages * limits.page_size}"
    # Activations and the other states grow with the tokens and the sequences of a step, in about this proportion.
    left = (memory - need.weights - need.page) / max(1, need.activations + need.states + need.sequences * need.slot)
    tokens, batch = (int(left * limit) for limit in (limits.max_tokens, limits.max_batch))
    if tokens < 1 or batch < 1:
        return "give more memory, or compile a smaller or quantized model: the weights leave no room"
    return f"give more memory, or compile with max_tokens below {tokens + 1} and max_batch below {batch + 1}"


def _no_room(need: MemoryNeed, room: ServingMemory, limit: int, what: str, expected: str, hint: str) -> OptionError:
    beside = f", scratch pages {need.scratch_bytes}" if need.scratch_bytes else ""
    beside += f", code and captured graphs {room.beside}" if room.beside else ""
    return OptionError(
        f"{what} do not fit into memory: of {limit} bytes the weights take {need.weights}, the activations"
        f" {need.activations}, other states {need.states + need.sequences * need.slot}{beside}",
        where="plan.json, memory",
        expected=expected,
        hint=hint,
    )
