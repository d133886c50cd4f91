"""Which graph serves a decode step, which is captured next, and what is noticed when something has moved."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

import pytest
import torch

from ingot.ir.artifact.plan import BucketClass, BucketMemory, BucketPlan, Executable, Instruction, Plan, ResidentMemory
from ingot.ir.errors import InternalError, OptionError
from ingot.ir.machine.gpus import TYPICAL
from ingot.runtime.cuda.graphs.addresses import Addresses
from ingot.runtime.cuda.graphs.choice import (
    _APART,
    _PATIENCE,
    _PROMPTS,
    CAPTURES,
    Capture,
    DecodeChoice,
    PromptChoice,
)
from ingot.runtime.cuda.graphs.sizes import (
    GRAPH_ROWS,
    decode_steps,
    filled_up,
    graph_arena,
    graph_sizes,
    mixed_tokens,
    prompt_steps,
)
from ingot.runtime.debug_switch import debugging
from ingot.runtime.steps.step import StepSizes

H200 = TYPICAL["sm_90"]


def test_the_largest_batch_fills_its_graph() -> None:
    assert graph_sizes(1) == [1] and graph_sizes(3) == [1, 2, 3] and graph_sizes(64) == list(GRAPH_ROWS[:11])
    assert graph_sizes(100) == [*GRAPH_ROWS[:13], 100] and graph_sizes(4096) == list(GRAPH_ROWS)
    # No more than half of a graph is padding, and of large ones a fifth.
    assert all(b <= 2 * a for a, b in itertools.pairwise(GRAPH_ROWS))
    assert all(b <= 1.25 * a for a, b in itertools.pairwise(GRAPH_ROWS) if a >= 64)


def plan() -> Plan:
    """One token is the reference's, up to 8 an executable's, more than 64 sequences cuBLAS's, the rest rowwise's."""
    code = Executable(id="e", backend="triton", inputs=(), outputs=(), files=("f",))
    rows = (
        ("one", (1, 1), None, "ingot.linear", "reference"),
        ("few", (2, 8), None, "exe.e", "triton"),
        ("many", (65, 512), 1, "ingot.linear", "cublas"),
        ("any", (9, 4096), None, "ingot.linear", "rowwise"),
    )
    view = Instruction(target="aten.view.default", backend="reference", args=())
    buckets = tuple(
        BucketPlan(
            bucket=BucketClass(name=name, tokens=tokens, q_max=q_max),
            instructions=(view, Instruction(target=target, backend=backend, args=())),
            values={},
            memory=BucketMemory(sizes={}, activations=0, peak=0),
            ending=0,
        )
        for name, tokens, q_max, target, backend in rows
    )
    return Plan(
        entry="main",
        ending="sample",
        dims={"B": (1, 300)},
        inputs={},
        params={},
        states={},
        outputs={},
        executables={"e": code},
        memory=ResidentMemory(weights=0, states=0, inputs=0, outputs=0),
        buckets=buckets,
    )


def test_what_a_graph_cannot_hold_has_none() -> None:
    served = {size.B: bucket.bucket.name for size, bucket in decode_steps(plan()).items()}
    many = {size: "many" for size in (*range(80, 257, 16), 288, 300)}
    assert served == {2: "few", 4: "few", 8: "few", **many}
    assert prompt_steps(plan(), H200) == {}  # the rows' backend computes them


def test_steps_that_share_prefixes_have_graphs_of_their_own() -> None:
    """Where a plan takes the table of shared prefixes; a step of one sequence shares none."""
    plain = plan()
    sharing = plain.model_copy(update={"dims": {**plain.dims, "G": (1, 300)}})
    assert [(size.B, size.shares) for size in decode_steps(sharing) if size.B <= 8] == [
        *((rows, False) for rows in (2, 4, 8)),
        *((rows, True) for rows in (2, 4, 8)),
    ]
    assert all((size.B if size.shares else 1) == size.G for size in decode_steps(sharing))


def test_the_table_of_a_step_decides_which_graph_serves_it() -> None:
    both = [replace(step(rows), G=table) for rows in (2, 4, 8) for table in (1, rows)]
    choice = DecodeChoice(dict.fromkeys(both, FEW), "idle")
    plain, shared = (replace(step(3), G=table) for table in (1, 3))
    captured: list[StepSizes] = []
    for _ in range(3):
        captured.append(choice.next(captured) or step(0))
    assert not any(size.shares for size in captured) and choice.next(captured) is None, "no step has shared any"
    assert choice.serving(plain, 1, captured) == replace(step(4), G=1)
    assert choice.serving(shared, 1, captured) == replace(step(4), G=4), "none of its kind is captured"
    assert choice.next(captured) == replace(step(4), G=4)
    captured.append(replace(step(8), G=8))
    assert choice.serving(shared, 1, captured) == replace(step(8), G=8), "a larger one of its kind, for a while"


def step(tokens: int, rows: int | None = None, logits: int | None = None) -> StepSizes:
    rows = tokens if rows is None else rows
    return StepSizes(tokens, rows, rows if logits is None else logits, 1)


FEW, MORE = BucketClass(name="few", tokens=(1, 16)), BucketClass(name="more", tokens=(17, 64))
MANY = BucketClass(name="many", tokens=(65, 512), q_max=1)


def decoding(when: Capture) -> DecodeChoice:
    return DecodeChoice({step(n): FEW if n <= 16 else MORE if n <= 64 else MANY for n in GRAPH_ROWS}, when)


def sized(*sizes: int) -> set[StepSizes]:
    return {step(size) for size in sizes}


def test_a_larger_graph_of_the_class_serves_for_a_while() -> None:
    choice = decoding("idle")
    assert choice.serving(step(5), 1, {}) == step(8), "nothing else is there"
    assert choice.serving(step(5), 1, sized(4, 8, 16)) == step(8)
    assert choice.serving(step(20), 1, sized(4, 40)) == step(40)
    assert choice.serving(step(20), 1, sized(4, 56)) == step(24), "more than half of it were padding"
    assert choice.serving(step(12), 1, sized(24)) == step(16), "of another class"
    choice = decoding("idle")
    served = [choice.serving(step(20), 1, sized(32)) for _ in range(_PATIENCE + 1)]
    assert served == [step(32)] * _PATIENCE + [step(24)]
    for when in CAPTURES[::2]:  # all and need
        assert decoding(when).serving(step(20), 1, sized(32)) == step(24)
    assert choice.serving(step(513), 1, sized(512)) is None
    assert DecodeChoice({}, "none").serving(step(1), 1, {}) is None


def test_a_step_of_many_sequences_is_launched_one_by_one_for_a_while() -> None:
    """In the size of its graph: libraries may round another one otherwise, so that no larger graph serves either."""
    choice = decoding("idle")
    served = [choice.serving(step(70), 1, sized(96)) for _ in range(_PATIENCE + 1)]
    assert served == [None] * _PATIENCE + [step(80)]
    assert choice.filled_up(replace(step(70), P=9)) == replace(step(80), P=9)
    assert choice.filled_up(step(513)) is None and DecodeChoice({}, "none").filled_up(step(70)) is None
    assert choice.serving(step(85), 1, sized(96)) == step(96), "it is there"
    assert decoding("need").serving(step(70), 1, {}) == step(80)


def test_pieces_of_prompts_take_what_is_there() -> None:
    choice = decoding("need")
    assert choice.serving(step(20, 5), 16, {}) is None, "no graph is made for them"
    assert choice.serving(step(20, 5), 16, sized(24, 32)) == step(24)
    assert choice.serving(step(20, 5), 16, sized(48)) == step(48)
    assert choice.serving(step(20, 5), 16, sized(56)) is None
    assert choice.serving(step(12, 5), 8, sized(24)) is None, "of another class"
    assert choice.serving(step(70, 65), 2, sized(80)) is None, "a class of one token of each sequence"
    assert choice.serving(step(5, 5, 3), 1, sized(8)) == step(8), "not all are sampled"


def extending(batch: int, tokens: int) -> Plan:
    """A plan whose steps of more than 8 tokens a graph can hold; there is nothing that they compute for long."""
    some = plan()
    extend = some.buckets[3].model_copy(update={"instructions": some.buckets[2].instructions})
    return some.model_copy(update={"buckets": (extend,), "dims": {"T": (1, tokens), "B": (1, batch)}})


def test_prompts_come_alone_or_beside_a_large_batch() -> None:
    def sizes(batch: int, tokens: int) -> list[tuple[int, int]]:
        found = prompt_steps(extending(batch, tokens), H200)
        assert all(size.B == size.L and bucket.bucket.name == "any" for size, bucket in found.items())
        return [(size.T, size.B) for size in found]

    assert sizes(16, 128) == [(96, 16), (128, 16)]
    assert sizes(100, 192) == [(96, 64), (96, 96), (128, 64), (128, 100), (192, 64), (192, 100)]
    assert sizes(200, 300)[-6:] == [(256, 64), (256, 128), (256, 200), (300, 64), (300, 128), (300, 200)]
    assert sizes(1024, 512)[-4:] == [(512, 64), (512, 128), (512, 256), (512, 512)]
    assert sizes(64, 4000)[-3:] == [(1024, 64), (2304, 64), (4000, 64)], "full steps, and beside sequences that decode"
    assert sizes(8, 2300)[-2:] == [(1024, 8), (2300, 8)] and sizes(8, 1500)[-1] == (1500, 8)
    full = [(4096, 64), (4096, 128), (4096, 256), (4096, 512)]
    beside = [(2304, 64), (2304, 128), (2304, 256), (2304, 512), (2560, 512)]
    assert sizes(512, 4096)[-9:] == beside + full and sizes(256, 4096)[-6:] == beside[:3] + full[:3]
    assert len(sizes(512, 4096)) == 26 + 9, "each takes some hundredths of a second, and 8 MiB"


def test_steps_with_prompts_are_filled_up_to_few_sizes() -> None:
    wide = extending(200, 8192)
    assert filled_up(step(65, 1), wide) == step(96, 64)
    assert filled_up(step(300, 64), wide) == step(384, 64)
    assert filled_up(step(300, 3, 65), wide) == step(384, 128)
    assert filled_up(step(192, 129), wide) == step(192), "there are no more rows than tokens"
    assert filled_up(step(3000, 2, 400), wide) == StepSizes(3072, 2, 400, 1), "prompts that are scored"
    assert filled_up(step(8192, 9), wide) == step(8192, 64)
    assert filled_up(step(999, 2), extending(2, 1000)) == step(1000, 2)
    found = {tokens: filled_up(step(tokens, 1), wide).T for tokens in range(65, 8193, 7)}
    assert all(tokens <= size <= max(96, (1.5 if tokens < 1024 else 1.125) * tokens) for tokens, size in found.items())
    assert len(set(found.values())) == 32
    unheld = [size for size in sorted(set(found.values())) if 1024 < size <= 2048 + 512]
    assert mixed_tokens(wide, ()) == unheld
    assert mixed_tokens(wide, {step(512, 64), step(2304, 200), step(8192, 64)}) == [n for n in unheld if n != 2304]
    assert mixed_tokens(extending(2, 1000), ()) == [] and mixed_tokens(extending(2, 1200), ()) == [1152, 1200]


@pytest.mark.parametrize("batch", [1, 64, 65, 100, 300, 512])
def test_every_step_up_to_1024_tokens_has_a_graph(batch: int) -> None:
    wide = extending(batch, 8192)
    graphs = prompt_steps(wide, H200)
    for tokens in {65, 1024, *range(96, 1025, 16), *range(97, 1025, 32)}:
        for rows in {1, 2, 64, 65, 128, 129, 256, 257, 511, 512, tokens} & {*range(1, min(batch, tokens) + 1)}:
            size = filled_up(step(tokens, rows), wide)
            assert size in graphs and tokens <= size.T and rows <= size.B
            assert max(64, 2 * rows) >= size.B, "no more than half of the rows are padding"


def serving(choice: PromptChoice, tokens: int, *rows: int, captured: Collection[StepSizes] = ()) -> StepSizes | None:
    return choice.serving(step(tokens, *rows), tokens - rows[0] + 1, captured)


def test_prompts_take_what_is_captured() -> None:
    wide = extending(200, 4096)
    sizes = prompt_steps(wide, H200)
    choice = PromptChoice(wide, sizes)
    assert serving(choice, 300, 1, captured={step(384, 64)}) == step(384, 64)
    assert serving(choice, 300, 1, captured={step(384, 200), step(512, 64)}) is None, "it would round otherwise"
    assert serving(choice, 300, 65, captured=sizes) == step(384, 128)
    assert serving(choice, 300, 129, captured=sizes) == step(384, 200)
    assert serving(choice, 192, 129, captured=sizes) == step(192)
    assert serving(choice, 300, 2, 201, captured=sizes) is None and serving(choice, 1025, 1, captured=sizes) is None


def test_many_that_decode_take_no_graph_of_prompts() -> None:
    """Kernels of their class round otherwise, and what was captured by then would show."""
    both = extending(512, 4096)
    both = both.model_copy(update={"buckets": (plan().buckets[2], *both.buckets)})
    sizes = prompt_steps(both, H200)
    choice = PromptChoice(both, sizes)
    assert choice.serving(step(128), 1, sizes) is None and choice.serving(step(513), 1, sizes) is None
    assert choice.serving(step(128, 127), 2, sizes) == step(128)
    assert choice.serving(step(5000, 1), 5000, sizes) is None, "of no class"


def test_under_load_a_graph_comes_once_as_much_was_lost_as_it_takes() -> None:
    wide = extending(200, 4096)
    choice = PromptChoice(wide, prompt_steps(wide, H200))
    captured: set[StepSizes] = set()
    lost = [0]
    for number in range(6 * _APART):
        size = serving(choice, (200, 100, 300)[number % 3], 2, captured=captured)
        if size is None:
            lost[-1] += 1
        elif size not in captured:
            captured.add(size)
            lost.append(0)
    assert captured == {step(256, 64), step(128, 64), step(384, 64)} and lost == [_APART] * 3 + [0]


def test_a_size_that_came_seldom_is_not_captured_under_load() -> None:
    wide = extending(200, 4096)
    choice = PromptChoice(wide, prompt_steps(wide, H200))
    seldom = [serving(choice, tokens, rows) for tokens in (100, 200, 300, 400, 600) for rows in (2, 65, 90)]
    assert len(seldom) > _APART and not any(seldom)
    served = [serving(choice, 1000, 2) for _ in range(_PROMPTS + 1)]
    assert served == [None] * _PROMPTS + [step(1024, 64)]


def test_sizes_that_prompts_wanted_are_captured_first_while_the_host_waits() -> None:
    wide = extending(200, 4096)
    sizes = prompt_steps(wide, H200)
    choice = PromptChoice(wide, sizes)
    assert choice.next({}) == step(96, 64) and choice.next({step(96, 64)}) == step(128, 64), "no step wanted a size yet"
    for tokens in (256, 201, 190):
        assert serving(choice, tokens, 2) is None
    captured: dict[StepSizes, None] = {}
    while (size := choice.next(captured)) is not None:
        captured[size] = None
    assert list(captured)[:4] == [step(256, 64), step(192, 64), step(96, 64), step(128, 64)]
    assert list(captured)[-2:] == [step(2304, 200), step(4096, 200)], "long steps come last"
    assert {size.T for size in [*captured][:-6]} == {size.T for size in sizes if size.T <= 1024}
    assert captured.keys() == sizes.keys()
    choice = PromptChoice(wide, sizes)
    assert serving(choice, 2300, 150) is None and choice.next({}) == step(2304, 200), "unless somebody wants them"


def test_the_size_nearest_to_the_last_batch_comes_next() -> None:
    choice = DecodeChoice({step(n): FEW for n in (1, 2, 4, 8, 16, 24)}, "idle")
    assert choice.next(sized(1)) == step(2)
    choice.serving(step(12), 1, sized(16))
    choice.serving(step(3, 2), 2, sized(16))  # no decode step
    found = sized(1)
    order = []
    while (size := choice.next(found)) is not None:
        found.add(size)
        order.append(size.B)
    assert order == [16, 8, 4, 2, 24]


def test_memory_of_the_largest_step() -> None:
    def bucket(activations: int, **sizes: int) -> BucketPlan:
        memory = BucketMemory(sizes=sizes, activations=activations, peak=0)
        return BucketPlan(bucket=MANY, instructions=(), values={}, memory=memory, ending=0)

    whole, part = bucket(700, T=8, L=8), bucket(8000, T=4096, L=320)
    assert graph_arena({}) == 0 and graph_arena({step(8): whole, step(4): whole}) == 700
    assert graph_arena({step(8): whole, step(1024, 64): part}) == 2000
    assert graph_arena({step(1024, 160): part}) == 4000  # half of the rows of logits


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(4, 6), "kv.0": torch.zeros(3, 2)}


def test_what_has_moved_is_named() -> None:
    found = tensors()
    places = Addresses.of(found, "the graph of 8 sequences")
    places.check(found)
    found["w"].fill_(3)  # contents may change
    places.check(found)
    for change, said in (
        ({"kv.0": found["kv.0"].clone()}, "'kv.0' has moved: it is at 0x"),
        ({"w": found["w"].t()}, r"'w' has moved: it is at .* shape \[6, 4\], strides \[1, 6\]"),
        ({"w": found["w"].view(6, 4)}, r"shape \[6, 4\], strides \[4, 1\]"),
    ):
        with pytest.raises(InternalError, match=said) as caught:
            places.check({**found, **change})
        assert "the graph of 8 sequences" in str(caught.value)
    with pytest.raises(InternalError, match=r"'kv\.0' is gone"):
        places.check({"w": found["w"]})
    found["w"].set_(torch.zeros(4, 6))  # in place, and yet elsewhere
    with pytest.raises(InternalError, match="'w' has moved"):
        places.check(found)


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("INGOT_DEBUG", value)
        assert debugging() is expected
    monkeypatch.delenv("INGOT_DEBUG")
    assert debugging() is False
    monkeypatch.setenv("INGOT_DEBUG", "yes")
    with pytest.raises(OptionError, match="INGOT_DEBUG is 'yes'"):
        debugging()
