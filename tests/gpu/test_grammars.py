"""Grammars on a GPU: endings that wait for masks, as graphs of their own and as single launches."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gpu_model import LIMITS, MODEL
from tokenizers import decoders, pre_tokenizers

from ingot import LLM, SamplingParams, compile_model

pytestmark = pytest.mark.gpu

PATTERN = "[a-f]{3}( [0-9]{1,3}){2,9}"
FREE = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS: list[Any] = [{"prompt_token_ids": [3 + place, 5, 7]} for place in range(9)]


def grammar(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=64, structured_outputs={"regex": PATTERN})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a token for each byte, and one that ends a text."""
    folder = tmp_path_factory.mktemp("grammars")
    checkpoint = MODEL.write(folder / "checkpoint")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 256}')
    compile_model(checkpoint, folder / "a.ingot", target="cuda", dtype="bfloat16", **LIMITS)
    return folder / "a.ingot"


@pytest.fixture(scope="module")
def deterministic(made: Path) -> Path:
    """The same model, compiled so that a row has the same bits in every step."""
    output = made.parent / "deterministic.ingot"
    compile_model(made.parent / "checkpoint", output, target="cuda", dtype="bfloat16", deterministic=True, **LIMITS)
    return output


def outputs(llm: LLM) -> list[tuple[int, ...]]:
    """The tokens of sequences with grammars, with others between them."""
    params = [grammar(place) if place % 3 else FREE for place in range(len(PROMPTS))]
    found = [one.outputs[0] for one in llm.generate(PROMPTS, params)]
    for place, one in enumerate(found):
        if place % 3:
            assert one.finish_reason == "stop" and re.fullmatch(PATTERN, one.text), one
    return [tuple(one.token_ids) for one in found]


@pytest.mark.parametrize("graphs", ["need", "idle", "all"])
def test_graphs_of_two_parts_are_single_launches(made: Path, graphs: Any) -> None:
    plain, captured = LLM(made, cuda_graphs="none"), LLM(made, cuda_graphs=graphs)
    executor: Any = captured.loaded.executor
    assert not executor._apart.decode.seconds
    for _ in range(3):
        assert outputs(captured) == outputs(plain)
    assert executor._apart.decode.seconds
    while captured.idle():
        pass
    assert outputs(captured) == outputs(plain)


def test_steps_without_grammars_are_as_before(made: Path) -> None:
    llm, other = LLM(made, cuda_graphs="need"), LLM(made, cuda_graphs="need")
    first = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, FREE)]
    executor: Any = llm.loaded.executor
    assert executor._whole.decode.seconds and not executor._apart.decode.seconds and not executor._masked
    outputs(llm)
    assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, FREE)] == first
    assert [one.outputs[0].token_ids for one in other.generate(PROMPTS, FREE)] == first


FORCED = {"regex": "a longer name: [0-9]{2}, and the other longer name: [a-f]{2}( and so on and on [0-9]){2}"}


@pytest.mark.parametrize("graphs", ["none", "need", "idle"])
def test_forced_tokens_change_no_output(deterministic: Path, graphs: Any) -> None:
    """Several in a step, or each in its own. In a deterministic artifact they have equal bits."""
    params = [
        SamplingParams(temperature=1.0, seed=place, max_tokens=120, structured_outputs=FORCED) if place % 3 else FREE
        for place in range(len(PROMPTS))
    ]
    steps: list[int] = []
    outputs: list[Any] = []
    for most in (32, 1):
        llm = LLM(deterministic, cuda_graphs=graphs)
        scheduler: Any = llm._engine._scheduler
        scheduler.config = replace(scheduler.config, max_forced=most)
        found = [[one.outputs[0] for one in llm.generate(PROMPTS, params)] for _ in range(3)]
        assert found[0] == found[1] == found[2]
        outputs.append(found[0])
        steps.append(llm._engine.steps_ended)
        assert bool(llm._engine.occupancy.forced_tokens) == (most > 1)
    assert outputs[0] == outputs[1] and steps[0] < steps[1]
    assert all(re.fullmatch(FORCED["regex"], one.text) for place, one in enumerate(outputs[0]) if place % 3)


def test_forced_tokens_follow_the_grammar(made: Path) -> None:
    """One sequence alone, with a graph for a step of several tokens after some steps without."""
    llm = LLM(made, cuda_graphs="need")
    for seed in range(40):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=120, structured_outputs=FORCED)
        (one,) = llm.generate([PROMPTS[seed % 9]], params)[0].outputs
        assert re.fullmatch(FORCED["regex"], one.text) and one.finish_reason == "stop"
    executor: Any = llm.loaded.executor
    assert llm._engine.occupancy.forced_tokens > 40 * 40 and len(executor._apart.decode.seconds) > 1


def test_requests_that_come_and_go(made: Path) -> None:
    """Prompts join sequences with grammars, so steps are mixed; the lengths of the outputs differ."""
    llm = LLM(made, cuda_graphs="idle")
    long: Any = [
        {"prompt_token_ids": [(7 * place + index) % 250 for index in range(20 + 20 * place)]} for place in range(8)
    ]
    params = [grammar(place) for place in range(8)]
    alone = [llm.generate([one], some)[0].outputs[0] for one, some in zip(long, params, strict=True)]
    assert all(re.fullmatch(PATTERN, one.text) and one.finish_reason == "stop" for one in alone)
    together = [one.outputs[0] for one in llm.generate(long * 4, params * 4)]
    assert all(re.fullmatch(PATTERN, one.text) and one.finish_reason == "stop" for one in together)
