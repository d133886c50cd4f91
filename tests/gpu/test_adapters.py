"""LoRA adapters on a GPU: the tokens of merged weights, in one batch, by graphs, and while an adapter is loaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from gpu_model import LIMITS, MODEL
from lora_folder import adapter_for, merged_by_hand

from ingot import LLM, LoRARequest, SamplingParams, compile_model
from ingot.runtime.engines.engine import EngineRequest

pytestmark = pytest.mark.gpu
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0, ignore_eos=True)
TOLERANCE = 2e-3  # of a log-probability in float32, over sums of another order


def _prompts(count: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(512) for _ in range(draw.randint(1, 90))] for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, four adapters, the checkpoint with each of them merged, and artifacts of all."""
    folder = tmp_path_factory.mktemp("adapters")
    base = MODEL.write(folder / "base")
    options = {"target": "cuda", "trace": "none", **LIMITS}
    compile_model(base, folder / "a.ingot", max_loras=3, max_lora_rank=16, **options)
    for number, rank in enumerate((16, 5, 8, 1)):
        adapter = adapter_for(base, folder / f"adapter-{number}", rank=rank, seed=number, size=0.5)
        if number < 2:
            merged = merged_by_hand(base, adapter, folder / f"merged-{number}")
            compile_model(merged, folder / f"merged-{number}.ingot", **options)
    return folder


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(folder / "a.ingot", memory=2 << 30)


def _adapter(folder: Path, number: int) -> LoRARequest:
    return LoRARequest(f"adapter-{number}", number + 1, str(folder / f"adapter-{number}"))


def _answers(llm: LLM, prompts: list[list[int]], **options: Any) -> list[tuple[list[int], list[float]]]:
    found = []
    for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], PARAMS, **options):
        (one,) = output.outputs
        assert one.logprobs is not None
        pairs = zip(one.logprobs, one.token_ids, strict=True)
        found.append((list(one.token_ids), [entry[token].logprob for entry, token in pairs]))
    return found


def _check(found: Any, wanted: Any) -> None:
    """Equal log-probabilities up to the first close call, after which the tokens may differ."""
    compared = 0
    for (ours, values), (theirs, expected) in zip(found, wanted, strict=True):
        same = next(
            (place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours)
        )
        assert values[:same] == pytest.approx(expected[:same], abs=TOLERANCE)
        compared += same
    assert compared >= 0.8 * sum(len(tokens) for tokens, _ in wanted)


@pytest.mark.parametrize("count", [1, 5, 32, 80])
def test_adapters_equal_merged_weights(count: int, folder: Path, llm: LLM) -> None:
    prompts = _prompts(count)
    for number in range(2):
        merged = LLM(folder / f"merged-{number}.ingot", memory=1 << 30)
        wanted = _answers(merged, prompts)
        for _ in range(2):  # the second time by graphs and from the prefix cache
            _check(_answers(llm, prompts, lora_request=_adapter(folder, number)), wanted)


def test_many_adapters_in_one_batch_equal_each_alone(folder: Path, llm: LLM) -> None:
    prompts = _prompts(40)
    asked = [None if place % 5 == 4 else _adapter(folder, place % 5) for place in range(len(prompts))]
    found = _answers(llm, prompts, lora_request=asked)
    for number in range(5):
        one = None if number == 4 else _adapter(folder, number)
        _check(found[number::5], _answers(llm, prompts[number::5], lora_request=one))


def test_an_adapter_is_loaded_while_others_run(folder: Path, llm: LLM) -> None:
    engine: Any = llm.llm_engine
    prompts = _prompts(8)
    wanted = _answers(llm, prompts)
    llm.reset_prefix_cache()
    engine.add_requests([EngineRequest(f"{i}", {"prompt_token_ids": ids}, PARAMS) for i, ids in enumerate(prompts)])
    engine.adapters.begin("late", folder / "adapter-0", lambda: None)
    outputs: dict[str, Any] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        for name, error in engine.adapters.finished():
            assert error is None
            engine.add_requests([EngineRequest("x", {"prompt_token_ids": prompts[0]}, PARAMS, adapter=name)])
    found = [list(outputs[f"{i}"].outputs[0].token_ids) for i in range(len(prompts))]
    assert sum(ours == theirs for ours, (theirs, _) in zip(found, wanted, strict=True)) >= 7
    if "x" in outputs:
        assert list(outputs["x"].outputs[0].token_ids) != wanted[0][0]


def test_steps_without_adapters_run_the_entry_main(folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    for name, executor in llm.loaded.executors.items():
        launch = executor.launch

        def counted(*args: Any, _launch: Any = launch, _name: str = name, **kwargs: Any) -> Any:
            launched.append(_name)
            return _launch(*args, **kwargs)

        monkeypatch.setattr(executor, "launch", counted)
    _answers(llm, _prompts(5))
    assert set(launched) == {"main"}
    launched.clear()
    _answers(llm, _prompts(5), lora_request=_adapter(folder, 2))
    assert "adapted" in launched
