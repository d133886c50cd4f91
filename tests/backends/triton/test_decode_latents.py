"""Decode attention over latents by the kernel for Hopper, and the records of splits that it reads."""

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import in_one_of
from paged_steps import Heads, PagedStep, paged_step
from sm_90 import run_without_interpreter
from triton_attention import agree
from triton_schedules import DEVICE, new_schedule, run_schedule, some

from ingot.backends.triton.kernels.attention.find_splits import (
    END,
    FIRST,
    HEAD,
    SEQUENCE,
    SPLIT,
    SPLITS_OF,
    TOKEN,
)  # fmt: skip
from ingot.backends.triton.lower.attention.decode_latents import takes_latents
from ingot.backends.triton.lower.attention.paged import LOWERINGS
from ingot.backends.triton.lower.attention.shapes import attention_of
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.schedule import Value
from ingot.ir.ops import OPS
from ingot.ir.types import TensorType

Mix = list[tuple[int, int]]
DEEPSEEK = Heads(128, 1, 576, 512, shared=True)
# (tokens fed, positions cached before) of each sequence, and the most tokens of a step.
STEPS: list[tuple[Mix, int]] = [
    ([(1, 0)], 1),
    ([(1, 700)], 1),
    ([(1, 127), (1, 128), (0, 40), (1, 62), (1, 63)], 16),
    ([(1, 3000), *[(1, 20)] * 14], 16),
    ([(3, 250), (1, 5), (2, 1000)], 16),  # several tokens of a sequence: drafts
    ([(1, 300 + 37 * nth) for nth in range(31)], 32),
    ([(1, 500), (90, 40), (1, 77), (1, 2000)], 2048),  # beside a prompt
]
MASKS = ("causal", "window_300", "window_30", "chunked_200", "bidirectional", "block_causal_8")


def a_step(mix: Mix, heads: Heads, dtype: torch.dtype = torch.float32) -> PagedStep:
    """With a token and a sequence of padding after the others."""
    return paged_step(torch.Generator().manual_seed(len(mix)), dtype, heads, mix, gap=1, behind=1)


def cache_of(step: PagedStep) -> torch.Tensor:
    """The cache with what the step feeds."""
    return OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [8, 40, 64, 128])
@pytest.mark.parametrize(("mix", "most"), STEPS)
def test_attention(mix: Mix, most: int, heads: int, dtype: torch.dtype) -> None:
    """Of one split and of many, of one tile and of several, within a page and over its end."""
    step = a_step(mix, replace(DEEPSEEK, q=heads), dtype)
    agree("paged_attention", step, (step.q, cache_of(step), *step.lens), DEEPSEEK.options, most)
    agree("partial_attention", step, (step.q, cache_of(step), *step.lens), DEEPSEEK.options, most)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str) -> None:
    for mix, most in STEPS[3:5]:
        step = a_step(mix, DEEPSEEK, torch.bfloat16)
        options = {**DEEPSEEK.options, "mask": mask}
        agree("paged_attention", step, (step.q, cache_of(step), *step.lens), options, most)


@pytest.mark.gpu
def test_large_scores() -> None:
    """The largest score is in the first or second tile of the first pair, or of the second one."""
    for place in (3, 70, 140, 200):
        step = a_step([(1, 700), (1, 300)], DEEPSEEK, torch.bfloat16)
        kv = cache_of(step)
        for b in range(2):
            page = int(step.page_table[b, place // 16])
            kv[page, 0, place % 16, 0] = 30 * step.q[int(step.q_starts[b]), 5]
        agree("paged_attention", step, (step.q, kv, *step.lens), {**DEEPSEEK.options, "scale": 0.5}, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("most", [16, 2048])
def test_tokens_that_see_no_key(most: int) -> None:
    """Before a sequence's own tokens, its cache is empty: zeros, and a log-sum-exp of -inf."""
    step = a_step([(1, 0), (1, 300), (3, 0), (2, 40)], DEEPSEEK, torch.bfloat16)
    options = {**DEEPSEEK.options, "cached": True, "mask": "bidirectional"}
    agree("partial_attention", step, (step.q, step.kv, *step.lens), options, most)


def latent_call(
    heads: int, dtype: torch.dtype, *, op: str = "paged_attention", kv_heads: int = 1, **attributes: Any
) -> Call:
    """A call over a latent cache, with the step's numbers as inputs."""
    kv = ("pages", *DEEPSEEK.form.shape(16, kv_heads)[1:])
    types = {"q": TensorType(dtype, ("T", heads, 576)), "kv": TensorType(dtype, kv)}
    types["page_table"] = TensorType(torch.int32, ("B", "P"))
    types |= {name: TensorType(torch.int32, ("B",)) for name in ("q_starts", "q_lens", "kv_lens")}
    values: dict[str, Value | None] = {name: Value(one, input=place) for place, (name, one) in enumerate(types.items())}
    options = {**DEEPSEEK.options, **attributes}
    results = [TensorType(dtype, ("T", heads, 512))]
    if op == "partial_attention":
        results.append(TensorType(torch.float32, ("T", heads)))
    return Call(op, values, options, tuple(results))


@pytest.mark.parametrize("mask", some(2, MASKS))
@pytest.mark.parametrize(("mix", "most"), some(3, STEPS))
def test_records_hold_every_position_once(mix: Mix, most: int, mask: str) -> None:
    """The splits of a (token, head) together read what the token's mask lets it see."""
    step = a_step(mix, replace(DEEPSEEK, q=1))
    schedule = new_schedule((1, most), cores=12, sequences=len(step.q_starts))
    LOWERINGS["paged_attention"](latent_call(128, torch.bfloat16, mask=mask), schedule)
    place = next(n for n, one in enumerate(schedule.launches) if one.kernel.__name__ == "find_splits")
    launch = schedule.launches[place]
    assert schedule.launches[place + 1].kernel.fn.__name__ == "decode_latents"
    schedule.launches[:] = [launch]
    inputs = [step.q, step.kv, *step.lens]
    outputs = [launch.arguments[name] for name in ("records", "used", "out")]
    sizes = {**step.dims, "P": step.page_table.shape[1]}
    records, used, out = run_schedule(
        schedule, outputs, [one.to(DEVICE) for one in inputs], sizes
    )  # fmt: skip
    splits = launch.constants["SPLITS"]
    read, counted = defaultdict(list), {}
    for record in records.tolist():
        if record[TOKEN.value] < 0:
            continue
        token, b, head, split, count, first, end = (
            record[one.value] for one in (TOKEN, SEQUENCE, HEAD, SPLIT, SPLITS_OF, FIRST, END)
        )
        assert 0 <= split < count <= splits.most
        step_size = count * splits.chunk
        assert first < end, "a split without positions"
        for chunk in range(first, end, step_size):
            read[b, token, head] += range(chunk, min(chunk + splits.chunk, end))
        row = b if splits.single else token
        assert used[row, head] == count
        counted[row, head] = count
    expected = {}
    for b, (fed, before) in enumerate(mix):
        for nth in range(fed) if not splits.single or fed == 1 else ():
            own = before + nth
            seen = [place for place in range(before + fed) if sees(mask, own, place)]
            for head in range(2):
                expected[b, int(step.q_starts[b]) + nth, head] = seen
    assert {key: sorted(places) for key, places in read.items()} == expected
    idle = [row for row in range(len(used)) if (row, 0) not in counted]
    assert not bool(used[idle].any())
    if not splits.single:
        assert not bool(out[idle].any()), "rows of padding are zeros"


@pytest.mark.parametrize("most", [16, 2048])
def test_tokens_without_keys_have_no_split(most: int) -> None:
    """A sequence of one token whose context is empty, beside one of 40 positions: `find_splits` writes its rows."""
    step = paged_step(torch.Generator().manual_seed(1), torch.float32, replace(DEEPSEEK, q=1), [(1, 0), (1, 39)])
    step.kv_lens[0] = 0
    schedule = new_schedule((1, most), cores=12, sequences=2)
    LOWERINGS["partial_attention"](latent_call(128, torch.bfloat16, op="partial_attention"), schedule)
    (launch,) = (one for one in schedule.launches if one.kernel.__name__ == "find_splits")
    schedule.launches[:] = [launch]
    outputs = [launch.arguments[name] for name in ("records", "used", "out", "lse")]
    inputs = [one.to(DEVICE) for one in (step.q, step.kv, *step.lens)]
    records, used, out, lse = run_schedule(schedule, outputs, inputs, {**step.dims, "P": step.page_table.shape[1]})
    assert {record[TOKEN.value] for record in records.tolist()} == {-1, 1}
    assert used.tolist() == [[0, 0], [1, 1]]
    assert not bool(out[0].any()) and bool((lse[0] == float("-inf")).all())
    assert bool(out[1].isnan().all()), "rows with keys are written by the other kernel"


def sees(mask: str, query: int, key: int) -> bool:
    kind, _, size = mask.rpartition("_")
    if kind == "window":
        return query - int(size) < key <= query
    if kind == "chunked":
        return key <= query and key // int(size) == query // int(size)
    if kind == "block_causal":
        return key // int(size) <= query // int(size)
    return mask == "bidirectional" or key <= query


def test_other_calls_have_other_kernels() -> None:
    """wgmma is an instruction of Hopper, of 64 rows of 16-bit numbers, which a group of heads should fill."""

    def taken(call: Call, sm: int = 90, cache_dtype: str = "bf16") -> bool:
        dtype = {torch.bfloat16: "bf16", torch.float32: "f32"}[call.results[0].dtype]
        return takes_latents(attention_of(call, sm), dtype, cache_dtype, sm)

    call = latent_call(128, torch.bfloat16)
    assert taken(call) and taken(latent_call(64, torch.bfloat16))
    assert not taken(call, 100) and not taken(call, 80)
    assert not taken(call, cache_dtype="f8e4m3")
    assert not taken(latent_call(128, torch.float32), cache_dtype="f32")
    assert taken(latent_call(6, torch.bfloat16)) and taken(latent_call(96, torch.bfloat16))
    assert not taken(latent_call(71, torch.bfloat16)), "71 tiles of one row"
    assert not taken(latent_call(128, torch.bfloat16, kv_heads=2)), "a cache of two heads"
    assert not taken(latent_call(128, torch.bfloat16, soft_cap=30.0))
    assert not taken(latent_call(128, torch.bfloat16, scale=-0.1))
    assert not taken(latent_call(128, torch.bfloat16, value_width=448))
    sinks = Value(TensorType(torch.bfloat16, (128,)), input=6)
    assert not taken(replace(call, values={**call.values, "sinks": sinks}))


@pytest.mark.parametrize(("most", "sequences"), [(16, 16), (64, 64), (512, 512), (2048, 64), (2048, 65), (2048, 256)])
def test_sequences_are_counted_by_powers_of_two(most: int, sequences: int) -> None:
    """Triton's ranges have such sizes."""
    schedule = new_schedule((65 if most > 64 else 1, most), sequences=sequences)
    LOWERINGS["paged_attention"](latent_call(128, torch.bfloat16), schedule)
    (launch,) = (one for one in schedule.launches if one.kernel.__name__ == "find_splits")
    scan = launch.constants["SPLITS"].scan
    assert scan == 1 << scan.bit_length() - 1


def test_there_are_no_tile_sizes_to_choose() -> None:
    schedule = new_schedule((1, 32))
    LOWERINGS["paged_attention"](latent_call(128, torch.bfloat16), schedule)
    assert not schedule.choices


SCRIPT = """
import json


from ingot.backends.triton.lower.attention.problem import DecodeProblem
from ingot.backends.triton.lower.attention.tiles import DecodeTiles
from ingot.backends.triton.tune import attention, device
from ingot.backends.triton.tune.device import Machine, compile_launches

device.DEVICE = "cpu"
problem = DecodeProblem(2, 64, 576, 16, "bf16", 32, False, form="latent_512", sharing=2)
schedule, _ = attention.make_schedule(Machine(90, 132), problem, DecodeTiles(64, 2, 1, 8, early=0))
compiled = compile_launches(schedule, {"T": 32, "B": 32, "P": 1})
place = [launch.kernel.__name__ for launch in schedule.launches].index("decode_latents")
made = compiled[place]
print(json.dumps([made.asm["ptx"], made.metadata.num_warps, made.metadata.shared, schedule.launches[place].warps]))
"""


@in_one_of(2)
def test_it_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    """Three warpgroups in a multiprocessor's shared memory. What one warpgroup tells another is written before."""
    (tmp_path / "compiled.py").write_text(SCRIPT)
    ptx, warps, shared, given = run_without_interpreter(tmp_path / "compiled.py")
    assert (warps, given) == (12, 4)
    assert 216 << 10 < shared <= 227 << 10
    assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global")
    wanted = (
        r"bar\.sync|st\.shared|stmatrix|fence\.proxy\.async|mbarrier\.arrive\.shared|wgmma\.(?:wait_group|mma_async)"
    )
    events = re.findall(wanted, ptx)
    last = 0
    for place, event in enumerate(events):
        if event == "mbarrier.arrive.shared":
            assert events[place - 1] == "bar.sync", "a warp arrives before the others have written or read"
            since = [one for one in events[last:place] if one in ("st.shared", "stmatrix", "fence.proxy.async")]
            assert not since or since[-1] == "fence.proxy.async", "matmuls may not see what was stored"
            last = place
    for store in re.finditer("stmatrix", ptx):
        block = ptx[: store.start()].rpartition("\n$L__")[2].rpartition("wgmma")[2]
        assert "bar.sync" in block, "weights replace keys that another warp may still read"
    assert events.count("mbarrier.arrive.shared") == 2 * 5
    assert events.count("stmatrix") == 2 * 4
