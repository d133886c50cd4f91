"""Measure an engine's host time per step, with an executor that answers at once.

    python benchmarks/engine_host.py [--running 256] [--prompt 512] [--output 256] [--only NAME,…] [--json FILE]

All requests are added at once and run together, one token each per step, until all have ended. A step's time is that of
`Engine.step`: scheduling, launching, taking the tokens, outputs. It is the CPU time of the engine's thread, which other
work on the machine does not affect: the mean over the steps of one token each, the minimum of some tries. Each case has
its own sampling options, and reads the fields of the outputs that such a caller needs:
    alone      token ids at the end
    streamed   token ids, at every token
    sampled    token ids at the end, sampled with other options for each sequence: temperature, penalties, stops
    text       text at the end
    streamed_text, stops   text at every token; the latter with stop strings that do not occur
    logprobs   at every token its log-probability and those of the five most likely tokens
    served     text at every token, as the engine process of a server sends it: one frame of deltas a step
"""

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tokenizers
import torch
from results import Figure, add_json_option, report
from tokenizers import decoders, models, pre_tokenizers, trainers

from ingot.runtime.engines.engine import Engine, EngineRequest
from ingot.runtime.engines.logprobs import OutputLogprobs, StepLogprobs
from ingot.runtime.engines.outputs import RequestOutput
from ingot.runtime.engines.request_group import request_output
from ingot.runtime.pages.pool import PagePool
from ingot.runtime.pages.sequence_pages import one_pool
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig
from ingot.runtime.steps.step import StepInputs
from ingot.runtime.text.tokenizer import REPLACEMENT, Tokenizer
from ingot.serve.engine.deltas import DeltaReport
from ingot.serve.engine.messages import Stats, Step, frame

_PAGE = 16
_TRIES = 3
_LOGPROBS = 5
_WORDS = [
    "the",
    "a",
    "cat",
    "house",
    "runs",
    "over",
    "and",
    "but",
    "quick",
    "lazy",
    "brown",
    "été",
    "日本語",
    "—",
    "🙂",
]


@dataclass(frozen=True)
class Load:
    """The workload: how many sequences run together, and how many tokens each prompt and each output has."""

    running: int
    prompt: int
    output: int


@dataclass(frozen=True)
class Case:
    """One way in which callers use the engine.

    `params` takes the number of a sequence and returns its sampling options. `read` reads the fields of an output that
    such a caller needs. `stream` is True if the caller streams the output. `served`: the engine reports deltas, and a
    frame of them is made for each step; `read` is not called.
    """

    params: Callable[[int], Mapping[str, object]]
    read: Callable[[RequestOutput], object] = lambda output: None
    stream: bool = False
    served: bool = False


def _ids(output: RequestOutput) -> object:
    (sequence,) = output.outputs
    return len(sequence.token_ids), sequence.token_ids[-1]


def _text(output: RequestOutput) -> object:
    (sequence,) = output.outputs
    return len(sequence.text), output.finished


def _newest(output: RequestOutput) -> object:
    (sequence,) = output.outputs
    assert sequence.logprobs is not None
    return sequence.logprobs[-1]


def _drawn(number: int) -> Mapping[str, object]:
    kinds: Sequence[Mapping[str, object]] = (
        {"temperature": 0.7, "top_p": 0.9, "seed": number},
        {"top_k": 50, "repetition_penalty": 1.1, "presence_penalty": 0.5},
        {"min_p": 0.1, "min_tokens": 8, "stop_token_ids": [0]},
    )
    return {"detokenize": False, **kinds[number % len(kinds)]}


_GREEDY = {"temperature": 0.0, "detokenize": False}
CASES: Mapping[str, Case] = {
    "alone": Case(lambda number: _GREEDY, _ids),
    "streamed": Case(lambda number: _GREEDY, _ids, stream=True),
    "sampled": Case(_drawn, _ids),
    "text": Case(lambda number: {"temperature": 0.0}, _text),
    "streamed_text": Case(lambda number: {"temperature": 0.0}, _text, stream=True),
    "logprobs": Case(lambda number: {"temperature": 0.0, "logprobs": _LOGPROBS}, _newest, stream=True),
    "stops": Case(lambda number: {"temperature": 0.0, "stop": ["\n\nUser:", "</answer>"]}, _text, stream=True),
    "served": Case(lambda number: {"temperature": 0.0}, stream=True, served=True),
}


class FreeExecutor:
    """An executor that computes nothing. Its steps return prepared random tokens at once.

    So only the host's time is measured.
    """

    def __init__(self, tokens: Sequence[Sequence[int]]) -> None:
        self._tokens = tokens
        self.launches = 0
        self.decodes = False  # the last launched step has one token of each sequence

    def launch(self, inputs: StepInputs) -> "FreeHandle":
        self.launches += 1
        self.decodes = inputs.sizes.T == inputs.sizes.B
        return FreeHandle(list(self._tokens[self.launches % len(self._tokens)][: inputs.sizes.L]))


@dataclass(frozen=True)
class FreeHandle:
    given: list[int]

    def tokens(self) -> list[int]:
        return self.given

    def finish(self) -> None:
        pass

    def rejected(self) -> list[int]:
        return [0] * len(self.given)

    def logprobs(self) -> StepLogprobs:
        ids = torch.tensor(self.given)[:, None] + torch.arange(_LOGPROBS + 1)
        return OutputLogprobs(ids, -torch.ones(ids.shape), torch.ones(len(ids), dtype=torch.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("running", 256), ("prompt", 512), ("output", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    add_json_option(parser)
    options = parser.parse_args()
    load = Load(options.running, options.prompt, options.output)
    tokenizer = byte_level_tokenizer()
    figures: dict[str, Figure] = {}
    for name in options.only.split(","):
        figures |= case_figures(name, CASES[name], load, tokenizer)
    report(__file__, options.json, {"running": load.running, "prompt": load.prompt, "output": load.output}, figures)


def case_figures(name: str, case: Case, load: Load, tokenizer: Tokenizer) -> dict[str, Figure]:
    tries = [_served(case, load, tokenizer) for _ in range(_TRIES)]
    what = f"{load.running} sequences, {name}"
    return {
        f"{key}_{name}": Figure(value=min(values), unit="s", what=f"{words} {what}", values=values)
        for (key, words), values in zip(
            (("step", "a decode step of"), ("add", "adding a request, of"), ("admit", "a step that feeds prompts, of")),
            zip(*tries, strict=True),
            strict=True,
        )
    }


def _served(case: Case, load: Load, tokenizer: Tokenizer) -> tuple[float, float, float]:
    """Serve the workload once and return three host times in seconds.

    They are the times of a decode step, of adding a request, and of a prefill step.
    """
    draw = random.Random(0)
    vocab = tokenizer.vocab_size
    usual = [token for token in range(1, vocab) if REPLACEMENT not in tokenizer.decode([token], False)]
    executor = FreeExecutor([draw.choices(usual, k=load.running) for _ in range(61)])
    engine = _engine(executor, load, tokenizer)
    requests = [
        EngineRequest(
            str(number),
            {"prompt_token_ids": draw.choices(usual, k=load.prompt)},
            SamplingParams(max_tokens=load.output, ignore_eos=True, **case.params(number)),
            stream=case.stream,
            report=DeltaReport(number, 1) if case.served else request_output,
        )
        for number in range(load.running)
    ]
    begin = time.thread_time()
    engine.add_requests(requests)
    added = time.thread_time() - begin
    decodes: list[float] = []
    prompts: list[float] = []
    ended = 0
    while engine.has_unfinished():
        launches, decoded = executor.launches, executor.decodes
        begin = time.thread_time()
        outputs = engine.step()
        if case.served:
            frame(Step([delta for one in outputs for delta in one.deltas], Stats()))
        for output in outputs:
            case.read(output)
            ended += output.finished
        seconds = time.thread_time() - begin
        if executor.launches > launches and decoded == executor.decodes:  # skip steps at the change of kind
            (decodes if decoded else prompts).append(seconds)
    assert ended == load.running
    return sum(decodes) / len(decodes), added / load.running, sum(prompts) / max(1, len(prompts))


def _engine(executor: FreeExecutor, load: Load, tokenizer: Tokenizer) -> Engine:
    longest = load.prompt + load.output
    config = SchedulerConfig(
        max_batch=load.running, max_tokens=max(8192, load.running), max_seq_len=longest, page_size=_PAGE
    )
    pool = PagePool(load.running * -(-longest // _PAGE), _PAGE)
    return Engine(executor, Scheduler(config, one_pool(pool)), tokenizer, vocab_size=tokenizer.vocab_size)


def byte_level_tokenizer() -> Tokenizer:
    """Return a small byte-level BPE tokenizer, trained on random sequences of the words in _WORDS.

    Most models have tokenizers of this kind.
    """
    draw = random.Random(0)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(draw.choices(_WORDS, k=200)) for _ in range(50)], trainer)
    return Tokenizer(backend, eos_token_ids=[backend.token_to_id("<eos>")])


if __name__ == "__main__":
    main()
