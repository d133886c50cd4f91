"""What goes wrong on a GPU ends one request or is said: numbers that are not finite, memory that is short."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_model import LIMITS, MODEL
from safetensors.torch import load_file, save_file

from ingot import LLM, SamplingParams, compile_model
from ingot.backends.triton import load as triton
from ingot.ir.cache.memory import MemoryNeed
from ingot.ir.errors import OptionError
from ingot.runtime.cuda.graphs.sizes import graph_sizes
from ingot.runtime.cuda.memory import device_memory

pytestmark = pytest.mark.gpu
POISON = 13  # a token whose embedding is not finite


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    compile_model(MODEL.write(folder / "checkpoint"), folder / "a.ingot", target="cuda", **LIMITS)
    return folder / "a.ingot"


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], LLM]:
    made: dict[str, LLM] = {}

    def get(value: float) -> LLM:
        if str(value) not in made:
            folder = tmp_path_factory.mktemp("poisoned")
            # Untied, or every row of logits would hold the poisoned column.
            source = MODEL.write(folder / "checkpoint")
            config = json.loads((source / "config.json").read_text())
            (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
            tensors = load_file(source / "model.safetensors")
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors["model.embed_tokens.weight"][POISON] = value
            save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
            compile_model(source, folder / "a.ingot", target="cuda", **LIMITS)
            made[str(value)] = LLM(folder / "a.ingot", num_kv_pages=24)
        return made[str(value)]

    return get


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_is_not_finite_ends_and_the_others_go_on(
    poisoned: Callable[[float], LLM], value: float, temperature: float
) -> None:
    llm = poisoned(value)
    params = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True, seed=3)
    good = [[5, 6, 7], [9] * 20, [11]]
    expected = [output.outputs[0].token_ids for output in llm.generate(good, params)]
    assert all(len(ids) == 6 and POISON not in ids[:-1] for ids in expected)
    bad = [[POISON], [5, POISON, 7], [4] * 70 + [POISON]]
    for _ in range(4):  # the pages of the bad ones are used again by the good ones
        mixed = [prompt for pair in zip(bad, good, strict=True) for prompt in pair]
        outputs = llm.generate(mixed, params)
        assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"] * 3
        assert [output.outputs[0].token_ids for output in outputs[1::2]] == expected
    assert [output.outputs[0].token_ids for output in llm.generate(good, params)] == expected


@pytest.mark.parametrize("buffer", [1, 8, 20])
def test_a_step_without_memory_is_made_smaller(healthy: Path, buffer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ends in between, at one of the buffers that its kernels get."""
    llm = LLM(healthy, num_kv_pages=200, enable_prefix_caching=False)  # the prompts are fed twice
    plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    counted = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, repetition_penalty=1.3)
    prompts = [[5 + place] * (20 + place) for place in range(12)]
    params = [counted if place % 3 == 0 else plain for place in range(12)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    make, made = triton.new_tensor, 0

    def new(*args: Any) -> torch.Tensor:
        nonlocal made
        made += 1
        if made == buffer:
            raise torch.OutOfMemoryError("none left. For a test.")
        return make(*args)

    monkeypatch.setattr(triton, "new_tensor", new)
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    assert made > buffer and llm._engine._scheduler.num_preemptions == 1


def test_too_little_memory_is_said_before_loading(healthy: Path) -> None:
    with pytest.raises(OptionError, match="do not fit into memory: of 1000000 bytes the weights take"):
        LLM(healthy, memory=10**6)
    with pytest.raises(OptionError, match=r"KV pages of .* do not fit into memory"):
        LLM(healthy, num_kv_pages=10**9)


def test_serving_takes_what_was_set_aside(healthy: Path) -> None:
    """What torch holds for weights, states, the largest step and all graphs, against the sum that sizes the KV pool.

    Other processes may use the device meanwhile, so the code of kernels, which torch does not count, is left out.
    """
    device = torch.device("cuda")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    llm = LLM(healthy, num_kv_pages=2000)
    params = SamplingParams(temperature=0.8, max_tokens=3, ignore_eos=True, seed=1)
    llm.generate([[7] * 250] * 64, params)
    for rows in graph_sizes(LIMITS["max_batch"]):
        llm.generate([[7, 8]] * rows, params)
    while llm.idle():  # graphs of prompts too
        pass
    plans = llm._loaded.plans
    need = MemoryNeed.of(plans)
    taken = torch.cuda.memory_reserved(device) - before
    allowed = need.fixed + 2000 * need.page + device_memory(device, plans, graphs=True).unplanned
    print(f"torch holds {taken} bytes, {allowed} were set aside, {need}")
    assert 2000 * need.page < taken <= allowed
