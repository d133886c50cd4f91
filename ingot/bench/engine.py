"""Adapt Ingot's engine to the benchmark driver, and list the token ids that prompts may contain."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.bench.drive import Progress
from ingot.bench.steps import WatchedExecutor
from ingot.bench.workload import BenchRequest
from ingot.ir.errors import OptionError
from ingot.runtime.engines.engine import Engine
from ingot.runtime.loading.limits import Limits
from ingot.runtime.loading.loader import Loaded
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.serve.llm import LLM


@dataclass(frozen=True)
class BenchEngine:
    """Ingot's engine with the interface that `drive` needs.

    It decodes greedily, ignores end tokens and does not detokenize. `executor` records the times of the steps. `tokens`
    are the token ids that prompts may contain. With `stream`, the engine reports a request after each new token.
    Without it, the engine reports a request when it ends.
    """

    engine: Engine
    executor: WatchedExecutor
    limits: Limits
    tokens: Sequence[int]
    stream: bool = True

    def add(self, index: int, request: BenchRequest) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(index), {"prompt_token_ids": list(request.prompt)}, params, stream=self.stream)

    def step(self) -> Iterable[Progress]:
        for output in self.engine.step():
            (sequence,) = output.outputs
            error = f"ended as an error: {sequence.stop_reason}" if sequence.finish_reason == "error" else ""
            yield Progress(int(output.request_id), len(sequence.token_ids), output.finished, error)

    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished()


def open_engine(artifact: str | Path, *, stream: bool = True) -> BenchEngine:
    """Load an artifact as `LLM` does, finish its idle work, and return its engine.

    Idle work, such as capturing CUDA graphs, is what a server does before requests arrive. With `stream`, the engine
    reports each new token. Without it, the engine reports only finished requests. Raises ArtifactError, TargetError or
    OptionError.
    """
    llm = LLM(artifact)
    engine = llm.llm_engine
    if not isinstance(engine, Engine):
        raise OptionError(
            "the model makes vectors, and benchmarks need tokens",
            where=str(artifact),
            expected="an artifact whose entry 'main' has an ending that samples",
        )
    while llm.idle():
        pass
    loaded = llm.loaded
    # On a mesh, the times of a step are those of all ranks.
    steps = loaded.executor if loaded.leader is None else loaded.round
    executor = WatchedExecutor(steps, loaded.context.stream)
    engine.launch_through(executor)
    return BenchEngine(engine, executor, loaded.limits, plain_tokens(loaded), stream)


def plain_tokens(loaded: Loaded) -> list[int]:
    """Return the token ids that prompts may contain: all but end tokens and other special tokens."""
    special = set(loaded.eos_token_ids)
    if loaded.tokenizer is not None:
        special |= loaded.tokenizer.special_ids
    return [token for token in range(loaded.limits.vocab_size) if token not in special]
