"""Which long steps the GPU waits for the host in, for models of real sizes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

import pytest

from ingot.ir.artifact.plan import BucketClass, BucketMemory, BucketPlan, Instruction, Plan, Ref, ResidentMemory, Value
from ingot.ir.machine.gpus import TYPICAL, Gpu
from ingot.runtime.cuda.graphs.launch_bound import LaunchBound
from ingot.runtime.cuda.graphs.sizes import graph_arena, prompt_steps
from ingot.runtime.cuda.memory import graph_bytes
from ingot.runtime.steps.step import StepSizes

H200 = TYPICAL["sm_90"]


@dataclass(frozen=True)
class Shape:
    """Of a decoder: `attention` numbers of a token's queries, `kv` of its keys and values together."""

    layers: int
    hidden: int
    attention: int
    kv: int
    inner: int
    vocab: int
    activations: int = 964 * 10**6  # of 8192 tokens and 768 rows of logits

    def products(self) -> list[tuple[int, int]]:
        """Of a layer, rows and columns of weights."""
        return [
            (self.attention + self.kv, self.hidden),
            (self.hidden, self.attention),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        ]


QWEN3_0_6B = Shape(28, 1024, 2048, 2048, 3072, 151_936)
LLAMA_1B = Shape(16, 2048, 2048, 1024, 8192, 128_256)
LLAMA_8B = Shape(32, 4096, 4096, 2048, 14_336, 128_256)


def plan(shape: Shape, batch: int, dtype: str = "bf16") -> Plan:
    """The class of prompts as a compiled model has it: for each product of a layer another call and two views."""
    instructions = [call("ingot.embedding", "out", "embed")]
    values = {"out": Value(type=f"{dtype}[T, {shape.hidden}]", buffer="pool")}
    params = {"embed": f"{dtype}[{shape.vocab}, {shape.hidden}]", "table": "f32[4096, 128]"}
    for layer in range(shape.layers):
        for number, (rows, columns) in enumerate(shape.products()):
            name = f"{layer}.{number}"
            params[name] = f"{dtype}[{rows}, {columns}]"
            values[f"p{name}"] = Value(type=f"{dtype}[T, {rows}]", buffer="pool")
            values[f"v{name}"] = Value(type=f"{dtype}[T, {rows // 2}; {rows}, 1]", buffer="view", of=f"p{name}")
            view = Instruction(target="aten.slice.Tensor", backend="reference", args=(), results=(f"v{name}",))
            other = Instruction(target="ingot.rope", backend="triton", args=(Ref(ref="table"),), executable="e")
            instructions += [call("ingot.linear", f"p{name}", name), view, view, other]
        instructions.append(Instruction(target="ingot.paged_attention", backend="flashinfer", args=(), executable="e"))
    values["logits"] = Value(type=f"{dtype}[L, {shape.vocab}]", buffer="pool")
    instructions.append(call("ingot.linear", "logits", "embed"))
    memory = BucketMemory(sizes={"T": 8192, "L": batch + 256}, activations=shape.activations, peak=0)
    bucket = BucketPlan(
        bucket=BucketClass(name="extend", tokens=(65, 8192)),
        instructions=tuple(instructions),
        values=values,
        memory=memory,
        ending=len(instructions),
    )
    resident = ResidentMemory(weights=0, states=0, inputs=10**6, outputs=0)
    return Plan(
        entry="main",
        ending="sample",
        dims={"T": (1, 8192), "B": (1, batch)},
        inputs={},
        params=params,
        states={},
        outputs={},
        executables={},
        memory=resident,
        buckets=(bucket,),
    )


def call(target: str, result: str, weight: str) -> Instruction:
    return Instruction(target=target, backend="cublas", args=(Ref(ref="x"), Ref(ref=weight)), results=(result,))


def long_steps(plan: Plan) -> list[tuple[int, int]]:
    return [(size.T, size.B) for size in prompt_steps(plan, H200) if size.T > 1024]


def test_long_steps_are_captured_of_small_deep_models() -> None:
    """By what was measured: of 0.6B and 2304 tokens the host takes 10 ms and an H200 7.5, of 8192 15 and 13; of 1B the
    host is in front."""
    beside, whole = ([(tokens, rows) for rows in (64, 128, 256)] for tokens in (2304, 8192))
    assert long_steps(plan(QWEN3_0_6B, 256)) == [*beside, *whole]
    assert long_steps(plan(QWEN3_0_6B, 512)) == [*beside, (2304, 512), (2560, 512), *whole, (8192, 512)]
    for shape in (LLAMA_1B, LLAMA_8B):
        assert long_steps(plan(shape, 512)) == [] and len(prompt_steps(plan(shape, 512), H200)) == 26


def test_what_a_step_computes_is_counted() -> None:
    """A GPU of a third of the multiprocessors, and products beside tensor cores."""

    def most(some: Plan, gpu: Gpu = H200) -> int:
        """The most tokens of a step that the host is too slow for, to within 8."""
        bound = LaunchBound.of(some.buckets[0], some, gpu)
        return 8 * bisect_left(
            range(1, 4096), True, key=lambda tokens: not bound.holds(StepSizes(8 * tokens, 64, 64, 1))
        )

    shape = replace(QWEN3_0_6B, vocab=8)
    whole = most(plan(shape, 64))
    calls, weights = 28 * 9 + 2, 28 * sum(rows * columns for rows, columns in shape.products())
    assert whole == pytest.approx(55e-6 * calls * 0.56 * 989e12 / (2 * weights), abs=9)
    assert most(plan(shape, 64), replace(H200, cores=44)) == pytest.approx(whole / 3, abs=9)
    assert most(plan(shape, 64, "f32")) == pytest.approx(whole * 67 / 989, abs=9)
    # Rows of logits cost what their product does.
    assert most(plan(QWEN3_0_6B, 64)) == pytest.approx(whole - 64 * 151_936 * 1024 / weights, abs=9)


def test_long_steps_take_little_of_the_memory() -> None:
    """And what they take is set aside before pages are counted, each graph's own beside what all share."""

    def of(activations: int, batch: int) -> Plan:
        return plan(replace(QWEN3_0_6B, activations=activations), batch)

    assert [size.T for size in prompt_steps(of(7 * 10**9, 64), H200)][-1] == 2304, "9/32 of 7 GB are no 64th of 141"
    assert [size.T for size in prompt_steps(of(8 * 10**9, 64), H200)][-1] == 1024
    small = replace(H200, memory=10**9)
    assert [size.T for size in prompt_steps(of(7 * 10**9, 64), small)][-1] == 1024
    grown = graph_bytes(of(7 * 10**9, 64), H200) - graph_bytes(of(7 * 10**9, 64), small)
    assert grown == 7 * 10**9 * 9 // 32 - 7 * 10**9 // 5 + (8 << 20) + 10**6
    # Rows of logits make short steps as large: no more is taken.
    steps = prompt_steps(of(10**10, 256), small)
    assert [size.B for size in steps if size.T > 1024] == [64, 128, 256]
    short = {size: bucket for size, bucket in steps.items() if size.T <= 1024}
    assert graph_arena(steps) == graph_arena(short) == 5 * 10**9
