"""Record how many different experts a layer of a decode step chooses, in the engine that decode.py measures."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from decode_method import Lengths, draw_prompts
from engine import generate_with

from ingot import LLM
from ingot.ir.artifact.plan import Plan
from ingot.runtime.steps.bucket import Call
from ingot.runtime.steps.executor import Executor, SampledStep, StepLauncher
from ingot.runtime.steps.step import StepInputs

# The ops that choose experts. Their second result has the choices of each token, i32[T, top_k].
_ROUTERS = ("ingot.route", "ingot.sparse_mixer")
_EVERY = 8  # a recorded step runs call by call, so not all of them are


@dataclass(frozen=True)
class Chosen:
    """The different experts of recorded decode steps: one number for each layer with experts of each step."""

    steps: int
    different: tuple[int, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.different)


def has_routers(plan: Plan) -> bool:
    return any(instruction.target in _ROUTERS for bucket in plan.buckets for instruction in bucket.instructions)


def record_chosen(llm: LLM, batch: int, lengths: Lengths) -> Chosen:
    """Decode the prompts of decode_method.py once more, and record every eighth of the steps that it measures.

    These steps run without a CUDA graph, so that the host can read the routers' results.
    """
    executor, engine = llm.loaded.executor, llm.llm_engine
    recorder = _Recorder(executor, batch, lengths.short)
    engine.launch_through(recorder)
    try:
        generate_with(llm)(draw_prompts(llm.loaded.limits.vocab_size, batch), lengths.long)
    finally:
        engine.launch_through(executor)
    return recorder.chosen


@dataclass
class _Recorder(StepLauncher):
    """Launches steps by `executor`, and records decode steps of `batch` sequences, the first `skipped` left out."""

    executor: Executor
    batch: int
    skipped: int
    _seen: int = 0
    _steps: int = 0
    _different: list[int] = field(default_factory=list)

    def launch(self, inputs: StepInputs) -> SampledStep:
        if inputs["tokens"].shape[0] == inputs["q_lens"].shape[0] == self.batch:
            self._seen += 1
            if self._seen >= self.skipped and (self._seen - self.skipped) % _EVERY == 0:
                self._steps += 1
                return self.executor.launch(inputs, self._watch)
        return self.executor.launch(inputs)

    def _watch(self, call: Call) -> object:
        results: Sequence[torch.Tensor] = call()
        if call.instruction.target in _ROUTERS:
            self._different.append(_different(results[1][: self.batch].tolist()))  # further rows are padding
        return results

    @property
    def chosen(self) -> Chosen:
        return Chosen(self._steps, tuple(self._different))


def _different(rows: Iterable[Iterable[int]]) -> int:
    return len({expert for row in rows for expert in row})
