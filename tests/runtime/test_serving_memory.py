"""Memory of the device that serves: what a GPU's KV pool gets, what is said when too little is left, and states."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch
from run_seed import again, run_seed

from ingot.ir.artifact.plan import (
    BucketClass,
    BucketMemory,
    BucketPlan,
    GroupMemory,
    Plan,
    Plans,
    ResidentMemory,
    State,
)
from ingot.ir.cache.memory import MemoryNeed
from ingot.ir.errors import InternalError, OptionError, TargetError
from ingot.ir.machine.gpus import TYPICAL
from ingot.runtime.cuda.context import start
from ingot.runtime.cuda.memory import USUAL_SHARE, graph_bytes, serving_memory
from ingot.runtime.loading.limits import Limits
from ingot.runtime.loading.load_context import on_one_device
from ingot.runtime.loading.memory import ServingMemory, host_memory, kv_pages, state_slots
from ingot.runtime.loading.phases import Phases, process_age
from ingot.runtime.loading.states import States

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GB = 10**9
GPU = TYPICAL["sm_90"]
LIMITS = Limits(vocab_size=1000, max_seq_len=1024, max_batch=32, max_tokens=2048, page_size=16)


def plans(weights: int = 16 * GB, activations: int = GB, states: int = 10**8, page: int = 10**6) -> Plans:
    """The plan of a model with the memory needs of one of eight billion params."""
    buckets = tuple(
        BucketPlan(
            bucket=BucketClass(name=name, tokens=tokens),
            instructions=(),
            values={},
            memory=BucketMemory(sizes={"T": tokens[1], "L": 288}, activations=share, peak=0),
            ending=0,
        )
        for name, tokens, share in (
            ("decode-1", (1, 1), 10**6),
            ("decode-32", (2, 32), 10**7),
            ("extend", (33, 2048), activations),
        )
    )
    memory = ResidentMemory(
        weights=weights,
        states=states,
        groups={"full": GroupMemory(page=page, pages_per_sequence=64)},
        inputs=288 * 10**3,
        outputs=288 * 10**4,
    )
    dims = {"T": (1, 2048), "B": (1, 32), "P": (1, 64)}
    empty: Mapping[str, str] = {}
    one = Plan(
        entry="main",
        ending="sample",
        dims=dims,
        inputs=dict(empty),
        params={},
        states={
            "kv": State(kind="paged_kv", group="full", unit="token", type=f"i8[pages, {page}]"),
            "last": State(kind="row", group="rows", unit="sequence", type=f"i8[{states}]"),
        },
        outputs={},
        executables={},
        memory=memory,
        buckets=buckets,
    )
    return Plans(plans={"main": one})


def test_two_entries_need_the_caches_and_outputs_of_both() -> None:
    (main,) = plans().plans.values()
    own = State(kind="paged_kv", group="full", unit="token", type="i8[pages, 5000]")
    memory = main.memory.model_copy(update={"outputs": 10**6})
    draft = main.model_copy(update={"entry": "draft", "states": {"kv.draft": own}, "memory": memory})
    alone, both = MemoryNeed.of(plans()), MemoryNeed.of(Plans(plans={"main": main, "draft": draft}))
    assert (both.weights, both.states) == (alone.weights, alone.states), "shared"
    assert both.page == alone.page + 5000 and both.sequence == 64 * both.page
    assert both.activations == alone.activations + 10**6, "one of them runs, while the outputs of both are held"


def full_pages(*args: object, **options: bool) -> int:
    """The pages of the only group of caches."""
    found = kv_pages(*args, **options)  # type: ignore[arg-type]
    assert found.keys() == {"full"}
    return found["full"]


def refusal(*args: object) -> str:
    with pytest.raises(OptionError) as caught:
        kv_pages(*args)  # type: ignore[arg-type]
    return str(caught.value)


def test_graphs_share_a_pool_and_have_their_inputs() -> None:
    (plan,) = plans().plans.values()
    decode, prompts = (1, 2, 4, 8, 16, 24, 32), (96, 128, 192, 256, 384, 512, 768, 1024)
    each = (8 << 20) * len(decode + prompts)
    inputs = 10**3 * sum(min(tokens, 288) for tokens in decode + prompts)
    assert graph_bytes(plan, GPU) == each + inputs + GB // 2, "a step of 1024 tokens is half of the largest"
    few = plan.model_copy(update={"buckets": plan.buckets[:2], "dims": {"T": (1, 32), "B": (1, 32)}})
    assert graph_bytes(few, GPU) == (8 << 20) * len(decode) + 10**3 * sum(decode) + 10**7
    one = plan.model_copy(update={"dims": {"T": (1, 32), "B": (1, 1)}})
    assert graph_bytes(one, GPU) == (8 << 20) + 10**3 + 10**6


def test_a_gpu_gives_its_pool_what_is_left() -> None:
    room = serving_memory(140 * GB, 144 * GB, plans(), GPU)
    assert room.usual == int(USUAL_SHARE * 144 * GB) and room.most == 140 * GB and room.pool is None
    fixed = 16 * GB + GB + 10**8 + 3168 * 10**3 + room.unplanned
    few, many = plans(), plans(page=60 * 10**6)
    assert full_pages(few, LIMITS, room, None, None) == 32 * 64, "all sequences at full length fit"
    assert full_pages(many, LIMITS, room, None, None) == (room.usual - fixed) // (60 * 10**6) < 32 * 64
    assert full_pages(many, LIMITS, room, None, 60 * GB) == (60 * GB - fixed) // (60 * 10**6)
    # Another process has taken most of the device: its share is not there to be given.
    less = ServingMemory(most=30 * GB, usual=room.usual, unplanned=room.unplanned)
    assert full_pages(many, LIMITS, less, None, 200 * GB) == (30 * GB - fixed) // (60 * 10**6)
    assert full_pages(many, LIMITS, room, 700, None) == 700


def test_a_processor_keeps_memory_for_others() -> None:
    many = plans(weights=GB)
    assert full_pages(many, LIMITS, host_memory(100 * GB), None, None) == 32 * 64
    wide = plans(weights=GB, page=10**7)
    assert full_pages(wide, LIMITS, host_memory(100 * GB), None, None) == (4 << 30) // 10**7
    assert full_pages(wide, LIMITS, host_memory(100 * GB), None, 50 * GB) == 32 * 64
    assert full_pages(wide, LIMITS, host_memory(6 * GB), None, None) == 3 * GB // 10**7, "half of the machine"


def with_slots(slot: int, **sizes: int) -> Plans:
    """The same with a state of so many bytes that stands once per sequence."""
    (one,) = plans(**sizes).plans.values()
    state = State(kind="conv", group="conv", unit="sequence", type=f"i8[S, {slot}]")
    memory = one.memory.model_copy(update={"slot": slot})
    return Plans(plans={"main": one.model_copy(update={"states": {**one.states, "conv": state}, "memory": memory})})


def test_slots_are_kept_beside_those_of_sequences_that_run() -> None:
    room = ServingMemory(most=140 * GB, usual=130 * GB)
    assert state_slots(plans(), room, None, None) == 0
    small = with_slots(10**6)
    assert MemoryNeed.of(small).fixed == MemoryNeed.of(plans()).fixed + 32 * 10**6
    assert state_slots(small, room, None, None) == 32 * 3, "two for each sequence"
    assert state_slots(small, room, None, None, keep_states=False) == 32
    # A quarter of what is left, and pages get the rest; but those that are asked for come first.
    large = with_slots(10**9, page=10**8)
    left = 130 * GB - MemoryNeed.of(large).fixed
    kept = left // 4 // 10**9
    assert 0 < kept < 64 and state_slots(large, room, None, None) == 32 + kept
    assert full_pages(large, LIMITS, room, None, None) == (left - kept * 10**9) // 10**8
    assert full_pages(large, LIMITS, room, None, None, keep_states=False) == left // 10**8
    asked = (left - 2 * 10**9) // 10**8
    assert full_pages(large, LIMITS, room, asked, None) == asked
    assert state_slots(large, room, asked, None) == 32 + 2
    # Of little memory a sequence at full length gets its pages before any slot is kept.
    least = MemoryNeed.of(large).fixed + MemoryNeed.of(large).sequence
    assert state_slots(large, room, None, least) == 32 and full_pages(large, LIMITS, room, None, least) == 64


def test_what_does_not_fit_is_said_with_what_would() -> None:
    room = ServingMemory(most=20 * GB, usual=18 * GB, unplanned=3 * 10**8)
    assert "code and captured graphs 300000000" in refusal(plans(page=10**7), LIMITS, room, 1000, None)
    long = refusal(plans(page=2 * 10**7), LIMITS, room, None, None)
    # 18 GB less 17.103168 GB and 0.3 GB leave 29 pages of 20 MB, of 16 tokens each.
    assert "of 18000000000 bytes the weights take 16000000000, the activations 1003168000" in long
    assert "a max_seq_len of at most 464" in long
    wide = refusal(plans(weights=17 * GB), LIMITS, room, None, None)
    # 0.7 GB less a page are 63.4 % of activations and states.
    assert "max_tokens below 1298" in wide and "max_batch below 21" in wide
    assert "the weights leave no room" in refusal(plans(weights=18 * GB), LIMITS, room, None, None)


KV = State(kind="paged_kv", group="full", unit="token", type="f32[pages, 2, 4, 3]")
ROW = State(kind="row", group="rows", unit="sequence", type="i32[R]")


def test_states_lie_on_the_device_and_move_there() -> None:
    specs = {"kv.0": KV, "kv.1": KV, "last": ROW}
    states = States(specs, {"pages": 9, "R": 5}, on_one_device(DEVICE.type).allocator)
    assert all(state.device.type == DEVICE.type and not state.any() for state in states.values())
    expected = {name: torch.randn(9, 2, 4, 3) for name in ("kv.0", "kv.1")}
    for name, value in expected.items():
        states[name].copy_(value)
    pick = random.Random(run_seed())
    for number in range(20):
        sources, targets = (pick.sample(range(9), 3) for _ in range(2))
        kind = pick.choice(("copy", "move", "zero"))
        for value in expected.values():
            held = [value[place].clone() for place in sources]
            if kind != "copy":
                value[sources if kind == "move" else targets] = 0
            if kind != "zero":
                for place, page in zip(targets, held, strict=True):
                    value[place] = page
        states.zero("full", targets) if kind == "zero" else getattr(states, kind)("full", sources, targets)
        for name, value in expected.items():
            assert torch.equal(states[name].cpu(), value), again((number, kind, sources, targets))
    assert not states["last"].any()
    with pytest.raises(InternalError, match="page or slot 9 is not in"):
        states.zero("full", [9])


@pytest.mark.gpu
def test_states_beyond_the_device_are_refused() -> None:
    with pytest.raises(OptionError, match=r"there is no memory for the state 'kv\.0': of .* bytes on the GPU"):
        States({"kv.0": KV}, {"pages": 10**10}, on_one_device(DEVICE.type).allocator)


def test_a_gpu_that_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore lines")

    monkeypatch.setattr(torch, "empty", busy)
    with pytest.raises(TargetError, match=r"cannot be used: .*busy or unavailable\n") as caught:
        start(torch.device("cuda"))
    assert "nvidia-smi" in str(caught.value) and "more lines" not in str(caught.value)


def test_phases_add_up_by_name_even_when_they_fail() -> None:
    phases = Phases()
    with phases.phase("a"):
        pass
    with pytest.raises(ValueError), phases.phase("b"):
        raise ValueError
    first = phases.seconds["a"]
    with phases.phase("a"):
        pass
    assert list(phases.seconds) == ["a", "b"] and phases.seconds["a"] > first
    age = process_age()
    assert age is not None and 0 < age < 86400
