"""What the small kernels of a step take on this GPU: its ends, sampling, penalties, log-probabilities, norms, gates.

    python benchmarks/kernels/step.py [--out step.json] [--only sample,feed]

A CUDA graph holds a row of equal calls, each of which may begin before the one in front has ended, as in a captured
step; the figure is the graph's least time over the number of calls. The model's shape is that of Llama-3.2-1B. After
that, the results of one more call are held against the op's reference: "wrong" tells what differs.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.backends.triton.launches import evaluate
from ingot.backends.triton.lower import elementwise, gate, logprobs, norm, penalties, sampling, step
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.ops import OPS
from ingot.ir.plan import BucketClass
from ingot.ir.tolerances import compare
from ingot.ir.types import DTYPES, TensorType

VOCAB, HIDDEN, FFN, HEADS, HEAD_DIM, SLOTS, PAGES = 128256, 2048, 8192, 32, 64, 64, 64  # Llama-3.2-1B, 1024 positions
CORES = 132
CALLS = 50  # in a graph: some hundred microseconds against some of its launch
REPLAYS = 30
LOWERINGS: Mapping[str, Lowering] = {
    name: lowering
    for module in (elementwise, gate, logprobs, norm, penalties, sampling, step)
    for name, lowering in module.LOWERINGS.items()
}


@dataclass(frozen=True)
class Case:
    """A call of an op, by tensors and attributes in the order of its parameters."""

    op: str
    what: str
    rows: int
    args: tuple[torch.Tensor, ...]
    kwargs: Mapping[str, Any]


def cases(rows: int) -> Iterator[Case]:
    g = torch.Generator(device="cuda").manual_seed(rows)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cuda").to(dtype)

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=g, device="cuda", dtype=torch.int32)

    def all_of(value: float, dtype: torch.dtype = torch.int32, *shape: int) -> torch.Tensor:
        return torch.full(shape or (rows,), value, dtype=dtype, device="cuda")

    order = torch.arange(rows, dtype=torch.int32, device="cuda")
    none, one = all_of(-1), all_of(1)
    f32 = torch.float32
    # Rounded to bfloat16, as a linear gives them. Of flat ones a thousand and more tokens hold most of the mass, of
    # peaked ones a dozen.
    logits = (randn(rows, VOCAB) * 2).to(f32)
    peaked = logits.clone()
    peaked[:, ::5003] += 12
    merged, heads = randn(rows, 2 * FFN), randn(rows, HEADS, HEAD_DIM)
    table, counts, state = randn(VOCAB, HIDDEN), whole(3, SLOTS, VOCAB) * 2, whole(512, SLOTS)

    def case(op: str, what: str, *args: torch.Tensor, **kwargs: Any) -> Case:
        return Case(op, what, rows, args, kwargs)

    pages = whole(1000, rows, PAGES)
    yield case("feed", "decode", none, order, order, one, order, none, pages, state, state, page_size=16)
    yield case("embedding", "", whole(VOCAB, rows), table)
    yield case("select_rows", "hidden", randn(rows, HIDDEN), order)
    yield case("select_rows", "positions", state[:rows].clone(), order)
    yield case("advance", "", state.clone(), state.clone(), order, whole(512, rows), whole(VOCAB, rows), order)
    yield case("rms_norm", "hidden", randn(rows, HIDDEN), randn(HIDDEN), eps=1e-5)
    yield case("rms_norm", "heads", heads, randn(HEAD_DIM), eps=1e-5)
    yield case("add_rms_norm", "", randn(rows, HIDDEN), randn(rows, HIDDEN), randn(HIDDEN), eps=1e-5)
    yield case("silu_mul", "", merged[:, :FFN], merged[:, FFN:])
    yield case("cast", "logits", logits.bfloat16(), dtype=f32)
    yield case("soft_cap", "logits", logits, cap=30.0)
    counted = (whole(VOCAB, rows), whole(512, rows) + 1, order, order)
    yield case("count_tokens", "nothing asked", counts.clone(), *counted, none)
    yield case("count_tokens", "all ask", counts.clone(), *counted, all_of(1))
    banned = all_of(-1, torch.int32, rows, 16)
    asked = (all_of(1.1, f32), all_of(0.1, f32), all_of(0.1, f32), banned)
    yield case("penalize", "nothing asked", logits, counts, none, *asked)
    yield case("penalize", "all ask", logits, counts, order, *asked)
    for what, given, temperature, top_k, top_p, min_p in (
        ("greedy", logits, 0.0, 0, 1.0, 0.0),
        ("no cut", logits, 1.0, 0, 1.0, 0.0),
        ("min-p", logits, 1.0, 0, 1.0, 0.05),
        ("top-k", logits, 1.0, 50, 1.0, 0.0),
        ("top-p, flat", logits, 1.0, 0, 0.9, 0.0),
        ("top-p, peaked", peaked, 1.0, 0, 0.9, 0.0),
        ("top-k, top-p, flat", logits, 0.7, 20, 0.8, 0.0),
        ("top-k, top-p, peaked", peaked, 0.7, 20, 0.8, 0.0),
    ):
        columns = (all_of(temperature, f32), all_of(top_k), all_of(top_p, f32), all_of(min_p, f32))
        yield case("sample", what, given, *columns, order.long(), order)
    sampled = whole(VOCAB, rows)
    for what, count in (("nothing asked", -1), ("chosen alone", 0), ("20 tokens", 20)):
        yield case("top_logprobs", what, logits, sampled, none, all_of(count))


def bucket(rows: int) -> BucketClass:
    tokens = next(tokens for tokens in ((1, 1), (2, 16), (17, 32), (33, 64)) if rows <= tokens[1])
    return BucketClass(name="bench", tokens=tokens)


def prepare(case: Case) -> tuple[Callable[[], None], list[torch.Tensor], Callable[[], object]]:
    """What launches a call, its results, and the reference's."""
    op = OPS[case.op]
    tensors = {
        name: value for name, value in op.bind(case.args, dict(case.kwargs)).items() if isinstance(value, torch.Tensor)
    }
    places = list(tensors)
    inputs = [tensors[name].clone() if name in op.states else tensors[name] for name in places]
    values: dict[str, Value | None] = {
        name: Value(type_of(tensor), input=place) for place, (name, tensor) in enumerate(tensors.items())
    }
    with torch.device("meta"):
        made = op.fake(*(value.to("meta") for value in case.args), **case.kwargs)
    results = [made] if isinstance(made, torch.Tensor) else list(made)
    results = results[: len(results) - len(op.states)]
    schedule = Schedule(90, CORES, bucket(case.rows), dependent=True)
    call = Call(op.name, values, case.kwargs, tuple(type_of(result) for result in results))
    outputs = LOWERINGS[case.op](call, schedule)
    buffers = {
        name: torch.zeros([evaluate(size, {}) for size in buffer.shape], dtype=DTYPES[buffer.dtype], device="cuda")
        for name, buffer in schedule.buffers.items()
    }

    def argument(value: object) -> object:
        if isinstance(value, Value):
            return inputs[value.input] if value.input is not None else buffers[str(value.buffer)]
        return None if value is None else evaluate(value, {})  # type: ignore[arg-type]

    def launch() -> None:
        for one in schedule.launches:
            arguments = {name: argument(value) for name, value in one.arguments.items()}
            options = {"num_warps": one.warps, "num_stages": one.stages, "launch_pdl": one.dependent}
            one.kernel[tuple(evaluate(size, {}) for size in one.grid)](**arguments, **one.constants, **options)

    found = [buffers[str(value.buffer)] for value in outputs]
    states = [inputs[places.index(name)] for name in op.states]
    return launch, [*found, *states], lambda: op.reference(*case.args, **case.kwargs)


def type_of(tensor: torch.Tensor) -> TensorType:
    return TensorType(tensor.dtype, tuple(tensor.shape), None if tensor.is_contiguous() else tuple(tensor.stride()))


def captured(launch: Callable[[], None], calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            launch()
    return graph


def measure(case: Case) -> dict[str, Any]:
    launch, found, reference = prepare(case)
    before = [one.clone() for one in found]
    launch()  # compiles
    graph, times = captured(launch, CALLS), []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    once = captured(launch, 1)
    for one, old in zip(found, before, strict=True):  # states as they were, and results as nobody computed them
        one.copy_(old)
    once.replay()
    expected = reference()
    wanted = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    wrong = [compare(one, other, other.dtype) for one, other in zip(found, wanted, strict=True)]
    return {
        "op": case.op,
        "what": case.what,
        "rows": case.rows,
        "microseconds": round(min(times), 2),
        "wrong": "; ".join(problem for problem in wrong if problem) or None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("step.json"))
    parser.add_argument("--only", default="", help="ops, separated by commas")
    options = parser.parse_args()
    only = set(filter(None, options.only.split(",")))
    found = []
    print(f"{'op':14s} {'what':22s} {'rows':>4s} {'us':>8s}")
    for rows in (1, 32):
        for case in cases(rows):
            if not only or case.op in only:
                found.append(measure(case))
                row = found[-1]
                note = f"   wrong: {row['wrong']}" if row["wrong"] else ""
                print(
                    f"{row['op']:14s} {row['what']:22s} {row['rows']:4d} {row['microseconds']:8.2f}{note}", flush=True
                )
                options.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "calls": found}, indent=1))


if __name__ == "__main__":
    main()
