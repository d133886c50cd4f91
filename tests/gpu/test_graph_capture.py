"""Steps that feed prompts are replayed too; graphs come while the host idles; what has moved is noticed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_model import LIMITS, MODEL
from never_waiting import NeverWaiting

from ingot import LLM, SamplingParams, compile_model
from ingot.ir.errors import InternalError
from ingot.ir.numerics.harness import Schedule, scheduled
from ingot.runtime.cuda.graphs.sizes import graph_sizes
from ingot.runtime.cuda.graphs.step_graph import StepGraph
from ingot.runtime.loading.loader import Loaded, load_artifact

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False)
LONGEST, PAGES = 60, 64


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capture")
    compile_model(MODEL.write(folder / "checkpoint"), folder / "a.ingot", target="cuda", **LIMITS)
    return folder / "a.ingot"


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens and sequences of each step that a graph serves."""
    seen: list[tuple[int, int]] = []
    launch = StepGraph.launch

    def counted(self: StepGraph, inputs: Mapping[str, torch.Tensor], step: Any, *, returns_logprobs: bool) -> Any:
        seen.append((step.T, step.B))
        return launch(self, inputs, step, returns_logprobs=returns_logprobs)

    monkeypatch.setattr(StepGraph, "launch", counted)
    return seen


def test_a_step_is_launched_while_the_one_before_runs(made: Path) -> None:
    """Also where nothing is captured: prompts, prompts beside decoding, decoding."""
    llm = LLM(made, cuda_graphs="none", enable_prefix_caching=False)
    draw = random.Random(1)
    prompts = [{"prompt_token_ids": [draw.randrange(512) for _ in range(count)]} for count in (150, 3, 200, 120)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    executor = NeverWaiting(llm.loaded.executor)
    llm.llm_engine.launch_through(executor)
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == expected
    assert max(executor.tokens) > 64 and min(executor.tokens) <= 4


def _pieces(draw: random.Random) -> Schedule:
    """Single tokens beside pieces of prompts, 64 tokens at most."""
    left, schedule = [LONGEST] * 6, []
    while any(left):
        counts = [(index, min(left[index], draw.choice([0, 1, 1, 5, 9]))) for index in range(6)]
        if fed := [(index, count) for index, count in counts if count]:
            schedule.append(fed)
            for index, count in fed:
                left[index] -= count
    return schedule


def _steps(loaded: Loaded, schedule: Schedule) -> Iterator[Mapping[str, torch.Tensor]]:
    draw = random.Random(5)
    requests = [[draw.randrange(512) for _ in range(LONGEST)] for _ in range(6)]

    def run(inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {name: value.cpu() for name, value in loaded.executor.launch(inputs).outputs.items()}

    return scheduled(loaded.executor.inputs, run, requests, schedule, PAGES, loaded.limits.page_size, 3)


def test_pieces_of_prompts_are_replayed_bit_by_bit(made: Path, replays: list[tuple[int, int]]) -> None:
    schedule = _pieces(random.Random(7))
    plain, served = (load_artifact(made, num_pages=PAGES, capture=capture) for capture in ("none", "all"))
    expected = list(_steps(plain, schedule))
    assert not replays
    for number, (step, other) in enumerate(zip(_steps(served, schedule), expected, strict=True)):
        for name in ("logits", "tokens"):
            assert torch.equal(step[name], other[name]), f"step {number}, {name}"
    assert len(replays) == len(schedule) and any(tokens > rows for tokens, rows in replays)


def test_prompts_are_replayed(made: Path, replays: list[tuple[int, int]]) -> None:
    draw = random.Random(11)
    lengths = [*(draw.randint(65, 250) for _ in range(12)), *(draw.randint(1, 30) for _ in range(20))]
    prompts = [{"prompt_token_ids": [draw.randrange(512) for _ in range(length)]} for length in lengths]

    def tokens(llm: LLM) -> list[list[int]]:
        batches = [prompts[:1], prompts[1:2], prompts[2:4], prompts]
        return [list(out.outputs[0].token_ids) for batch in batches for out in llm.generate(batch, GREEDY)]

    expected = tokens(LLM(made, num_kv_pages=1000, cuda_graphs="none"))
    assert not replays
    assert tokens(LLM(made, num_kv_pages=1000, cuda_graphs="all")) == expected
    assert sum(tokens > 64 and tokens > rows for tokens, rows in replays) >= 5
    replays.clear()
    llm = LLM(made, num_kv_pages=1000)
    for _ in range(6):  # several steps of a size, and then its graph
        assert tokens(llm) == expected
    assert llm._loaded.executor.captured.prompts
    assert any(tokens > 64 and tokens > rows for tokens, rows in replays)


def test_graphs_are_captured_while_no_request_waits(made: Path) -> None:
    llm = LLM(made, num_kv_pages=1000)
    executor: Any = llm._loaded.executor
    assert set(executor.captured.decode) == {1}
    (expected,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY)
    pieces = 0
    while llm.idle():
        pieces += 1
        (found,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert sorted(executor.captured.decode) == graph_sizes(LIMITS["max_batch"])
    assert len(executor.captured.prompts) == 8, "of 96, 128, 192 and 256 tokens, of up to 64 and 96 sequences"
    assert pieces == len(executor.captured.decode) - 1 + len(executor.captured.prompts)
    for others in ("none", "need", "all"):
        assert LLM(made, num_kv_pages=1000, cuda_graphs=others).idle() is False


def test_long_steps_are_captured_last_while_no_request_waits(tmp_path: Path, replays: list[tuple[int, int]]) -> None:
    """Full ones are captured, for the GPU waits for the host in steps of a small model; others run once."""
    limits = {**LIMITS, "max_tokens": 1500, "max_batch": 8}
    compile_model(MODEL.write(tmp_path / "checkpoint"), tmp_path / "a.ingot", target="cuda", **limits)
    llm, plain = (LLM(tmp_path / "a.ingot", num_kv_pages=1000, cuda_graphs=when) for when in ("idle", "none"))
    executor: Any = llm._loaded.executor
    pieces = sum(1 for _ in iter(llm.idle, False))
    assert list(executor.captured.prompts)[-2:] == [(1024, 8), (1500, 8)]
    assert pieces == len(executor.captured.decode) - 1 + len(executor.captured.prompts) + 3, (
        "1152, 1280 and 1408 tokens"
    )
    draw = random.Random(17)
    for length, graph in ((150, False), (182, True)):
        prompts = [{"prompt_token_ids": [draw.randrange(512) for _ in range(length)]} for _ in range(8)]
        tokens = [[out.outputs[0].token_ids for out in one.generate(prompts, GREEDY)] for one in (llm, plain)]
        assert tokens[0] == tokens[1] and ((8 * length, 8) in replays) == graph


def test_steps_of_most_tokens_and_sequences_take_memory_once(tmp_path: Path) -> None:
    """Their logits need more than the allocator's segments of 20 MiB, so an allocation by a later step would show. On
    an H200, the first such steps after the warm-up allocated the size of one step's logits; the cause is not known."""
    checkpoint = MODEL.write(tmp_path / "checkpoint", vocab_size=1 << 17)
    compile_model(checkpoint, tmp_path / "a.ingot", target="cuda", **{**LIMITS, "jobs": 4})
    llm = LLM(tmp_path / "a.ingot", num_kv_pages=1000, cuda_graphs="none", enable_prefix_caching=False)
    short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    many = [{"prompt_token_ids": [number, 1]} for number in range(LIMITS["max_batch"])]
    reserved = [torch.cuda.memory_reserved()]
    for _ in range(3):
        llm.generate([*many, {"prompt_token_ids": list(range(64))}], short)
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] - reserved[0] <= 4 * LIMITS["max_batch"] * (1 << 17)
    assert len(set(reserved[1:])) == 1


def test_what_moves_is_named(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_DEBUG", "1")
    loaded = load_artifact(made, num_pages=PAGES)
    executor: Any = loaded.executor
    decoding = [[(index, 1) for index in range(6)]] * 3
    expected = [step["tokens"] for step in _steps(loaded, decoding)]
    assert len(expected) == 3
    held: list[torch.Tensor] = []
    launch = executor.launch

    def holding(inputs: Mapping[str, torch.Tensor]) -> Any:
        handle = launch(inputs)
        held.append(handle.outputs["logits"])
        return handle

    monkeypatch.setattr(executor, "launch", holding)
    with pytest.raises(InternalError, match="the output 'logits' of a step is held"):
        list(_steps(loaded, decoding))
    monkeypatch.undo()
    held.clear()
    name = next(iter(executor.params))
    executor.params[name] = executor.params[name].clone()
    with pytest.raises(InternalError, match=f"'{name}' has moved"):
        list(_steps(loaded, decoding))
