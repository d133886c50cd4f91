"""A summary of an artifact's KV caches for display: their groups, the tokens that each keeps, and its pages.

Reads only plans, without a program or torch.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ingot.ir.artifact.plan import BucketPlan, Instruction, Plans, Ref, shape_text
from ingot.ir.cache.form import CacheForm
from ingot.ir.cache.groups import CacheGroup, ordered
from ingot.ir.cache.memory import MemoryNeed
from ingot.ir.cache.scratch_pages import Scratch
from ingot.ir.errors import VerifyError
from ingot.ir.masks import Mask

_LAYER = re.compile(r"(?:kv|index)\.(\d+)")
# The ops that read a cache, and the places of q and of the cache among their arguments.
_READERS = {
    "ingot.paged_attention": (0, 1),
    "ingot.partial_attention": (0, 1),
    "ingot.append_attention": (1, 0),
    "ingot.paged_choose_positions": (0, 1),
    "ingot.sparse_attention": (0, 1),
}
_AXES = 5  # pages, parts, tokens of a page, heads, row: ingot.ir.cache.form


@dataclass(frozen=True)
class GroupSummary:
    """A KV cache group, for display: KV caches that keep the same tokens and use the same page numbers.

    keeps          the tokens of a sequence that it keeps, in words such as "the last 1024 tokens"
    page_bytes     bytes of a page in all caches of the group
    page_tokens    tokens of a page; 0 if unknown
    between_steps  the most pages that a sequence of full length holds between steps
    in_step        the most pages that it holds during a step, if all tokens of the step belong to it
    scratch_pages  further pages of such a step, for keys and values that are used in this step only
    scratch_bytes  bytes of the scratch pages, which all caches of the group share
    why_none       why a group that frees pages has no scratch pages
    reserved       pages of the pool that no sequence holds
    layers         the layers with these caches, such as "0, 2–5"
    forms          what the caches store per token, in words
    """

    name: str
    keeps: str
    page_bytes: int
    page_tokens: int
    between_steps: int
    in_step: int
    scratch_pages: int
    scratch_bytes: int
    why_none: str
    reserved: int
    layers: str
    forms: tuple[str, ...]


@dataclass(frozen=True)
class CacheSummary:
    """The KV caches of an artifact, for display.

    groups       the KV cache groups: caches that keep the same tokens and use the same page numbers
    step_tokens  the most tokens of a step
    together     by entry (program of the model), a sentence on how many tokens of a sequence see each other; without
                 entries that have causal masks
    """

    groups: tuple[GroupSummary, ...]
    step_tokens: int
    together: dict[str, str]

    @staticmethod
    def of(plans: Plans) -> "CacheSummary":
        need = MemoryNeed.of(plans)
        held: dict[str, dict[str, str]] = {}  # by group, the type of each cache
        for plan in plans.plans.values():
            for name, state in plan.states.items():
                group = CacheGroup.named(state.group).name
                if group in need.groups and "pages" in shape_text(state.type):
                    held.setdefault(group, {})[name] = state.type
        groups = ordered(map(CacheGroup.named, need.groups))
        together = {entry: _together(plan.granule) for entry, plan in plans.plans.items() if plan.granule > 1}
        return CacheSummary(
            tuple(_group(one, need, held.get(one.name, {}), plans) for one in groups),
            max(plan.dims["T"][1] for plan in plans.plans.values() if "T" in plan.dims),
            together,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _group(group: CacheGroup, need: MemoryNeed, caches: dict[str, str], plans: Plans) -> GroupSummary:
    memory, shapes = need.groups[group.name], [shape_text(one) for one in caches.values()]
    tokens = {shape[2] for shape in shapes if len(shape) == _AXES}
    scratch = need.scratch.get(group.name, Scratch())
    return GroupSummary(
        name=group.name,
        keeps=_keeps(group.lifetime),
        page_bytes=memory.page,
        page_tokens=int(tokens.pop()) if len(tokens) == 1 else 0,
        between_steps=memory.pages_per_sequence,
        in_step=memory.pages_per_sequence + need.extra_in_step(group.name),
        scratch_pages=scratch.pages,
        scratch_bytes=scratch.bytes(need.granularity),
        why_none=scratch.why_none,
        reserved=group.reserved,
        layers=_layers(list(caches)),
        forms=tuple(dict.fromkeys(_form(name, one, plans) for name, one in caches.items())),
    )


def _keeps(lifetime: Mask) -> str:
    if lifetime.kind == "window":
        return f"the last {lifetime.size} tokens"
    if lifetime.kind == "chunked":
        return f"the current chunk of {lifetime.size} tokens"
    return "every token"


def _together(granule: int) -> str:
    if granule == Mask("bidirectional").granule:
        return "all tokens of a sequence see each other: a step holds whole sequences"
    return f"{granule} tokens of a block see each other: a step holds whole blocks, or up to the end of the sequence"


def _layers(names: list[str]) -> str:
    """Return the layers of the caches `names` as text like "0, 2–5".

    Names of caches without a layer number are appended.
    """
    found = [(name, _LAYER.fullmatch(name)) for name in names]
    runs: list[list[int]] = []
    for layer in sorted({int(match[1]) for _, match in found if match}):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    texts = [str(first) if first == last else f"{first}–{last}" for first, last in runs]
    return ", ".join([*texts, *(name for name, match in found if not match)])


def _form(name: str, type_text: str, plans: Plans) -> str:
    """Return in words what the cache `name` stores per token: heads, widths and dtype.

    If the plans do not show the widths of keys and values, it returns `type_text`, the cache's type.
    """
    shape = shape_text(type_text)
    if len(shape) != _AXES or not all(size.isdecimal() for size in shape[1:]):
        return type_text
    sizes = [0, *map(int, shape[1:])]
    found = _widths(name, plans)
    if found is None and sizes[1] == 2:
        found = sizes[4], None, False  # keys and values are apart, and of equal width
    if found is None:
        return type_text
    key_width, value_width, per_token = found
    try:
        form = CacheForm.of_cache(sizes, key_width, value_width, per_token=per_token)
    except VerifyError:
        return type_text
    heads = f"{sizes[3]} head{'s' if sizes[3] > 1 else ''}"
    return f"{heads}, {form}, {type_text.partition('[')[0]}"


def _widths(name: str, plans: Plans) -> tuple[int, int | None, bool] | None:
    """Return (width of a key, `value_width`, `per_token`) of an attention call that reads the cache `name`.

    The last two are arguments of the call. The width of a key is the width of q. None if no call shows it.
    """
    for bucket, instruction in _readers(name, plans):
        q = instruction.args[_READERS[instruction.target][0]]
        value = bucket.values.get(q.ref) if isinstance(q, Ref) else None
        if value is not None and (size := shape_text(value.type)[-1]).isdecimal():
            given = instruction.kwargs.get("value_width")
            if instruction.target == "ingot.paged_choose_positions":
                given = int(size)  # a cache of keys alone
            per_token = instruction.kwargs.get("per_token") is True
            return int(size), given if isinstance(given, int) else None, per_token
    return None


def _readers(name: str, plans: Plans) -> Iterator[tuple[BucketPlan, Instruction]]:
    """Yield each attention call that reads the cache `name`, as (plan, call). The plan holds the call."""
    for plan in plans.plans.values():
        for bucket in plan.buckets:
            for one in bucket.instructions:
                place = _READERS.get(one.target, (0, 0))[1]
                if one.target in _READERS and one.args[place : place + 1] == (Ref(ref=name),):
                    yield bucket, one
