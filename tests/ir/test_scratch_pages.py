"""Which groups of caches have scratch pages, how many, and why the others have none."""

from dataclasses import replace
from typing import Any

import pytest

from ingot.ir.artifact.plan import (
    BucketClass,
    BucketMemory,
    BucketPlan,
    GroupMemory,
    Instruction,
    Plan,
    Plans,
    Ref,
    ResidentMemory,
    State,
    Value,
)
from ingot.ir.cache.memory import MemoryNeed
from ingot.ir.cache.scratch_pages import Scratch, scratch_of

GROUP = "window_1024"
TYPE = "bf16[pages, 2, 16, 4, 256]"
PAGE = 2 * 16 * 4 * 256 * 2
WINDOWS = [layer for layer in range(34) if layer % 6 != 5]  # Gemma 3 4B: 29 of 34 layers


def call(*names: str, updates: tuple[str, ...] = ()) -> Instruction:
    return Instruction(target="ingot.op", backend="", args=tuple(Ref(ref=name) for name in names), updates=updates)


def layer(name: str) -> list[Instruction]:
    return [call(name, updates=(name,)), call("q", name)]


def plan(instructions: list[Instruction] | None = None, entry: str = "main", **changes: Any) -> Plan:
    """A plan with the caches of Gemma 3 4B for sequences of 32768 tokens."""
    states = {
        f"kv.{number}": State(
            kind="paged_kv", group=GROUP if number in WINDOWS else "full", unit="token", type=changes.get("type", TYPE)
        )
        for number in range(34)
    }
    if instructions is None:
        instructions = [one for name in states for one in layer(name)]
    tokens = changes.get("tokens", 8192)
    groups = {
        "full": GroupMemory(page=5 * PAGE, pages_per_sequence=2048),
        GROUP: GroupMemory(page=29 * PAGE, pages_per_sequence=65, pages_per_step=-(-tokens // 16)),
    }
    bucket = BucketPlan(
        bucket=BucketClass(name="any", tokens=(1, tokens)),
        instructions=tuple(instructions),
        values={"view": Value(type=TYPE, buffer="view", of="kv.0")},
        memory=BucketMemory(sizes={"T": tokens}, activations=0, peak=0),
        ending=0,
    )
    return Plan(
        entry=entry,
        ending="sample",
        dims={"T": (1, tokens), "B": (1, 256), "P": (1, 2048)},
        inputs={},
        params={},
        outputs={},
        states=changes.get("states", states),
        executables={},
        buckets=(bucket,),
        memory=ResidentMemory(weights=0, states=0, groups=groups, inputs=0, outputs=0),
    )


def found(one: Plan) -> Scratch:
    return scratch_of(Plans(plans={"main": one}))[GROUP]


def test_a_long_sequence_peaks_at_a_fifth_of_whole_caches() -> None:
    """Gemma 3 4B at 32768 tokens, fed 8192 at a time."""
    plans = Plans(plans={"main": plan()})
    assert scratch_of(plans) == {GROUP: Scratch(pages=(8192 - 1024) // 16, page=PAGE, caches=29)}
    for granularity, most in ((1, 0.208), (2 << 20, 0.25), (None, 0.388)):
        need = MemoryNeed.of(plans, granularity)
        in_step = {name: group.pages_per_sequence + need.extra_in_step(name) for name, group in need.groups.items()}
        peak = sum(need.groups[name].page * pages for name, pages in in_step.items()) + need.scratch_bytes
        assert most - 0.035 < peak / (34 * PAGE * 2048) < most
        assert need.fixed == need.scratch_bytes and (need.scratch_bytes > 0) == (granularity is not None)
        assert need.most(GROUP, 3) == 3 * 65 + (2 * 65 if granularity else 512) + 1
        assert need.least(GROUP) == 66, "a sequence can be served in its window, in short pieces"


def test_a_step_that_is_no_longer_than_the_window_has_none() -> None:
    for tokens in (256, 1024, 1039):
        text = f"a step of {tokens} tokens fills no page that no later step reads"
        assert found(plan(tokens=tokens)) == Scratch(why_none=text)
    assert found(plan(tokens=1040)).pages == 1


def test_a_device_that_maps_no_memory_has_none() -> None:
    one = scratch_of(Plans(plans={"main": plan()}), on_device=False)[GROUP]
    assert one == Scratch(why_none="the device cannot map memory into several address ranges")


def test_caches_of_other_types_have_none() -> None:
    odd = plan()
    states = {**odd.states, "kv.0": odd.states["kv.0"].model_copy(update={"type": "bf16[pages, 2, 16, 2, 256]"})}
    for one in (plan(states=states), plan(type="bf16[2, pages, 16, 4, 256]"), plan(type="bf16[pages, 4]")):
        assert found(one).why_none == "its caches differ in type, or their first axis is not pages"


@pytest.mark.parametrize(
    "last",
    [[call("q", "kv.0")], [call("view")], [call(updates=("kv.0",))], [call("kv.0", "kv.1")]],
    ids=["read", "view", "written", "together"],
)
def test_a_cache_that_is_used_again_after_another_one(last: list[Instruction]) -> None:
    instructions = [*layer("kv.0"), call("view"), *layer("kv.5"), *layer("kv.1"), *last]
    assert found(plan(instructions)).why_none == "main goes back to the cache 'kv.0' after another one of the group"
    assert found(plan(instructions[:-1])).pages, "caches of other groups may lie between"


def test_entries_that_share_a_cache() -> None:
    both = Plans(plans={"main": plan(), "draft": plan(entry="draft")})
    assert scratch_of(both)[GROUP].why_none == "entries share its caches"


def test_caches_of_several_entries_have_scratch_pages_in_common() -> None:
    states = {f"draft.{name}": state for name, state in plan().states.items() if state.group == GROUP}
    draft = plan([one for name in states for one in layer(name)], entry="draft", states=states)
    assert scratch_of(Plans(plans={"main": plan(), "draft": draft})) == {GROUP: Scratch(448, PAGE, 58)}


def test_bytes_are_enough_wherever_pages_fall() -> None:
    for page in (3840, 4096, 65536, 100_000):
        one = Scratch(pages=7, page=page, caches=3)
        assert one.bytes(1) == 7 * page
        for granularity in (4096, 2 << 20):
            for pages in (1, 5, 600):
                own = -(-pages * page // granularity) * granularity
                tail = -(-((-(-own // page) + 7) * page - own) // granularity) * granularity
                assert 3 * (own - pages * page) + tail <= one.bytes(granularity)
    assert replace(one, pages=0).bytes(2 << 20) == 0
