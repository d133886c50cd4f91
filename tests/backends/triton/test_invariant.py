"""Batch-invariant lowerings: a row's bits are those that it gets alone, in bucket classes of all sizes.

On a GPU this compares what tensor cores add up. The interpreter is given products that are chains as theirs are: so
what is compared there is the order of blocks and splits.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from call_cases import OF_ONE_DTYPE, cases
from call_oracle import rounded_worse
from chained_products import chain_products
from one_call import TARGET
from paged_steps import Heads, paged_step
from triton_schedules import DEVICE, TESTED, new_schedule, run_lowering, run_schedule, some

from ingot.backends.triton.compile import launch_key
from ingot.backends.triton.emit import Triton
from ingot.backends.triton.lower.attention import invariant as attention_invariant
from ingot.backends.triton.lower.call import Refused
from ingot.backends.triton.lower.linear.call import Gate, Linear, Norm
from ingot.backends.triton.lower.linear.invariant import sums_of
from ingot.backends.triton.lower.linear.matmul import schedule_linear
from ingot.backends.triton.lower.linear.tiles import Product
from ingot.backends.triton.lower.linear.weight import plain_weight, stored_weight
from ingot.backends.triton.lower.table import LOWERINGS
from ingot.backends.triton.schedule import Value
from ingot.ir.backend import No, Yes
from ingot.ir.formats import find_format, named, quantize
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS
from ingot.ir.types import TensorType

pytestmark = pytest.mark.one_in_file(3)

CLASSES = ((1, 16), (17, 32), (33, 64), (65, 256))
dtypes = pytest.mark.parametrize("dtype", TESTED, ids=str)


@pytest.fixture(autouse=True)
def chains(monkeypatch: pytest.MonkeyPatch) -> None:
    chain_products(monkeypatch)


def class_of(rows: int) -> tuple[int, int]:
    return next(tokens for tokens in CLASSES if rows <= tokens[1])


def drawn(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


# On a GPU all rows are looked at; the interpreter takes a second for each dozen blocks.
MOST, PARTS = (
    (200, [*((row, row + 1) for row in range(200)), (70, 73), (100, 120), (60, 124)])
    if DEVICE == "cuda"
    else (70, [(0, 1), (64, 67), (30, 50), (2, 66)])
)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias and residual": {"bias": True, "residual": True},
    "norm and gate": {"norm": True, "gate": Gate("silu", 0, 40)},
    "activation": {"bias": True, "activation": "relu_squared"},
}
if DEVICE == "cuda":  # of which a compiler might fuse products and sums in one kernel and not in another
    FORMS["gate by tanh"] = {"bias": True, "gate": Gate("gelu_tanh", 40, 0)}


@dtypes
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_products(form: str, dtype: torch.dtype) -> None:
    columns, depth, asked = 40, 600, FORMS[form]
    rows = columns * (2 if "gate" in asked else 1)
    x, weight = drawn((MOST, depth), dtype, 1), drawn((rows, depth), dtype, 2)
    gain, bias = 1 + drawn((1, depth), dtype, 3)[0], drawn((1, rows), dtype, 4)[0]
    residual = drawn((MOST, columns), dtype, 5)

    def product(begin: int, end: int) -> torch.Tensor:
        inputs = [x[begin:end], weight, gain, bias, residual[begin:end]]
        shapes: list[tuple[int | str, ...]] = [("T", depth), (rows, depth), (depth,), (rows,), ("T", columns)]
        values = [Value(TensorType(dtype, shape), input=place) for place, shape in enumerate(shapes)]
        linear = Linear(
            values[0],
            plain_weight(values[1]),
            values[3] if "bias" in asked else None,
            TensorType(dtype, ("T", columns)),
            Norm(values[2], 1e-5) if "norm" in asked else None,
            asked.get("gate"),
            values[4] if "residual" in asked else None,
            asked.get("activation"),
        )
        schedule = new_schedule(class_of(end - begin), invariant=True)
        return run_schedule(schedule, [schedule_linear(linear, schedule)], inputs, {"T": end - begin})[0]

    assert sums_of(Product(columns, depth, "gate" in asked, dtype), 90).splits > 1
    whole = product(0, MOST)
    for begin, end in PARTS:
        assert torch.equal(product(begin, end), whole[begin:end]), f"rows {begin} to {end}"
    if form == "plain":
        assert (problem := compare(whole, x.double() @ weight.double().T, dtype)) is None, problem


@pytest.mark.one_in(2)
@dtypes
@pytest.mark.parametrize("weigh_input", [False, True])
def test_rows_of_experts(weigh_input: bool, dtype: torch.dtype) -> None:
    """Whatever other rows the experts of a row compute, and wherever it lies among them."""
    experts, top_k, hidden, ffn = 5, 2, 200, 72
    x, merged = drawn((MOST, hidden), dtype, 1), drawn((experts, (3 * ffn + 2) * hidden + 2 * ffn), dtype, 2) / 8
    sizes = (2 * ffn * hidden, hidden * ffn, 2 * ffn, hidden)
    gate_up, down, *biases = (part.contiguous() for part in merged[:, : sum(sizes)].split(sizes, 1))
    weights = [gate_up.view(experts, 2 * ffn, hidden), down.view(experts, hidden, ffn), *biases]
    ranks = torch.rand(MOST, experts, generator=torch.Generator().manual_seed(3)).argsort(-1).int()
    chosen, shares = ranks[:, :top_k].contiguous(), drawn((MOST, top_k), torch.float32, 4)

    def mixture(begin: int, end: int) -> torch.Tensor:
        rows = [one[begin:end].clone(memory_format=torch.contiguous_format) for one in (x, shares, chosen.to(DEVICE))]
        options = {"activation": "clamped", "limit": 0.5, "weigh_input": weigh_input}
        op, tokens, dims = OPS["experts"], class_of(end - begin), {"T": end - begin}
        found = run_lowering(
            op, LOWERINGS[op.name], [*rows, *weights], options, tokens=tokens, dims=dims, invariant=True
        )
        return found[0]

    whole = mixture(0, MOST)
    for begin, end in PARTS:
        assert torch.equal(mixture(begin, end), whole[begin:end]), f"rows {begin} to {end}"


@pytest.mark.one_in(2)
@dtypes
@pytest.mark.parametrize(
    ("name", "gated"),
    some(
        2,
        [
            *(("int8", True), ("int8_g64", False), ("int4_g128_asym", False), ("fp8_per_channel_per_token", False)),
            *(("int8_w8a8", True), ("mxfp4", True), ("u4/1x32:f16:zeros/low_first/ordered", False)),
        ],
    ),
)
def test_rows_of_products_with_quantized_weights(name: str, gated: bool, dtype: torch.dtype) -> None:
    columns, depth, format = 40, 768, find_format(name)
    rows = columns * (2 if gated else 1)
    x, gain = drawn((MOST, depth), dtype, 1), 1 + drawn((1, depth), dtype, 3)[0]
    bare = named(replace(format, ordered=False))
    parts = quantize(drawn((rows, depth), torch.float32, 2).cpu() * depth**-0.5, bare)
    if format.ordered:
        parts["order"] = torch.randperm(depth, generator=torch.Generator().manual_seed(1)).to(torch.int32)

    def product(begin: int, end: int) -> torch.Tensor:
        inputs = [x[begin:end], gain, *(parts[part].to(DEVICE) for part in format.parts)]
        types = [TensorType(dtype, ("T", depth)), TensorType(dtype, (depth,))]
        types += [TensorType(parts[part].dtype, tuple(parts[part].shape)) for part in format.parts]
        values = [Value(one, input=place) for place, one in enumerate(types)]
        linear = Linear(
            values[0],
            stored_weight(format, dict(zip(format.parts, values[2:], strict=True))),
            None,
            TensorType(dtype, ("T", columns)),
            Norm(values[1], 1e-5),
            Gate("silu", 0, columns) if gated else None,
        )
        schedule = new_schedule(class_of(end - begin), invariant=True)
        result = schedule_linear(linear, schedule)
        assert all(launch.constants.get("SPLITS", 2) > 1 for launch in schedule.launches)
        return run_schedule(schedule, [result], inputs, {"T": end - begin})[0]

    whole = product(0, MOST)
    assert bool(whole.isfinite().all())
    for begin, end in PARTS:
        assert torch.equal(product(begin, end), whole[begin:end]), f"rows {begin} to {end}"


# What the rows of one step see: the place of the first, and how many there are.
LENGTH = 100
CUTS = [(99, 1), (0, 100), (40, 40), (97, 3), (31, 2)]


@dtypes
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        *some(
            2,
            [
                (Heads(3, 1, 16), {"soft_cap": 1.5}),
                (Heads(2, 1, 16), {"mask": "window_50", "sinks": True}),
                (Heads(2, 1, 16), {"mask": "chunked_40"}),
                (Heads(3, 1, 40, 32, shared=True), {"mask": "window_50"}),
                (Heads(3, 1, 16), {"slopes": True}),
            ],
        ),
        # More heads than a tile has rows: parts of them, and a prime number.
        pytest.param(Heads(66, 1, 16), {"slopes": True, "sinks": True}, marks=pytest.mark.slow),
        pytest.param(Heads(67, 1, 16), {}, marks=pytest.mark.slow),
        pytest.param(Heads(4, 2, 48, 20), {"soft_cap": 1.5}, marks=pytest.mark.slow),
        pytest.param(Heads(36, 1, 24, 12, shared=True), {}, marks=pytest.mark.slow),
        pytest.param(Heads(4, 2, 32), {}, marks=pytest.mark.slow),
        pytest.param(Heads(2, 2, 80), {"mask": "window_50", "soft_cap": 1.5}, marks=pytest.mark.slow),
        pytest.param(Heads(1, 1, 256), {"sinks": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_of_attention(
    heads: Heads, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt at once, its last tokens alone, and pieces of it beside other sequences; in steps whose programs share
    a context, and in those whose programs go through all of it."""
    monkeypatch.setattr(attention_invariant, "SPLIT", 32 if DEVICE == "cpu" else 64)
    g = torch.Generator().manual_seed(8)
    step = paged_step(g, dtype, heads, [(LENGTH, 0)])
    kv = OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots)
    options = {**heads.options, **options}
    sinks = torch.randn(heads.q, generator=g).to(dtype) if options.pop("sinks", False) else None
    slopes = torch.linspace(0.3, 0.01, heads.q) if options.pop("slopes", False) else None

    def attention(cuts: list[tuple[int, int]], tokens: tuple[int, int]) -> list[torch.Tensor]:
        """Of each cut as a sequence of its own, with one token of padding behind it."""
        rows, starts = [], []
        for first, count in cuts:
            starts.append(len(rows))
            rows += [*range(first, first + count), 0]
        counts = [count for _, count in cuts]
        ints = [starts, counts, [first + count for first, count in cuts]]
        lens = [torch.tensor(one, dtype=torch.int32) for one in ints]
        args = (step.q[rows], kv, step.page_table.expand(len(cuts), -1).contiguous(), *lens, sinks, None, None, slopes)
        dims = {"T": len(rows), "B": len(cuts)}
        op, lowering = OPS["paged_attention"], LOWERINGS["paged_attention"]
        found = run_lowering(op, lowering, args, options, tokens=tokens, dims=dims, invariant=True)[0]
        return [found[start : start + count] for start, count in zip(starts, counts, strict=True)]

    (whole,) = attention([(0, LENGTH)], (65, 256))
    args = (step.q, kv, *step.lens, sinks, None, None, slopes)
    wide = [arg.double() if arg is not None and arg.is_floating_point() else arg for arg in args]
    # Weights of a softmax are rounded once more, as in test_attention.py.
    references = (OPS["paged_attention"].reference(*given, **options) for given in (args, wide))
    problem = rounded_worse(whole.cpu(), *references, 1.0 if dtype is torch.float32 else 4.0)
    assert problem is None, problem
    for cuts, tokens in ((CUTS[:1], (1, 16)), (CUTS[3:], (1, 16)), (CUTS[2:], (65, 256))):
        for (first, count), found in zip(cuts, attention(cuts, tokens), strict=True):
            assert torch.equal(found, whole[first : first + count]), f"{count} rows at {first}, of {cuts} in {tokens}"


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "op", sorted(LOWERINGS.keys() - {"linear", "quant_linear", "head_linear", "append_attention", "count_tokens"})
)
def test_steps_of_all_sizes_run_one_machine_code(op: str) -> None:
    """But for products, whose chains are the same in tiles of all sizes, and for a count, which rounds nothing."""
    for call in cases(op, torch.float32 if op in OF_ONE_DTYPE else torch.bfloat16):
        body, keys = call.body(), set()
        for tokens in CLASSES:
            body.bucket = new_schedule(tokens, invariant=True).bucket
            claim = Triton().claim([call.call_of(body)], TARGET, body.bucket)
            if isinstance(claim, Yes):
                assert claim.batch_invariant
                keys.add(tuple(launch_key(launch) for launch in Triton()._lowered(body, TARGET)[0].launches))
        assert len(keys) <= 1, f"{op} of {[tuple(tensor.shape) for tensor in call.tensors]}"


def test_refusals() -> None:
    (call, *_) = cases("append_attention", torch.bfloat16)
    body = call.body()
    claim = Triton().claim([call.call_of(body)], TARGET, new_schedule(invariant=True).bucket)
    assert isinstance(claim, No) and "its bits depend on the step" in claim.reason
    x, weight = (TensorType(torch.bfloat16, shape) for shape in (("T", 64), (32, 64)))
    stored = plain_weight(Value(weight, input=1))
    linear = Linear(Value(x, input=0), stored, None, TensorType(torch.bfloat16, ("T", 32)))
    with pytest.raises(Refused, match=r"on compute capability 10\.0, matmuls with other tile sizes are not known"):
        schedule_linear(linear, new_schedule(sm=100, invariant=True))


@dtypes
@pytest.mark.parametrize("most", some(1, [16, 128]))
def test_parts_of_attention(most: int, dtype: torch.dtype) -> None:
    """Of steps whose programs share a context, and of others; some tokens see nothing."""
    op = OPS["partial_attention"]
    for sample in op.samples(torch.Generator().manual_seed(9), dtype):
        found = run_lowering(
            op, LOWERINGS["partial_attention"], sample.args, sample.kwargs, tokens=(1, most), cores=4, invariant=True
        )
        expected = op.reference(*sample.args, **sample.kwargs)
        for one, other, tolerance in zip(found, expected, (dtype, torch.float32), strict=True):
            assert compare(one.cpu(), other, tolerance, factor=4) is None
