"""Bad requests, and models whose numbers break: the others go on, and everything that was held comes back."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import drawn
from safetensors.torch import load_file, save_file
from tiny import TINY
from tiny_checkpoint import MAX_SEQ_LEN

from ingot import LLM, BeamSearchParams, RequestOutput, SamplingParams, compile_model
from ingot.ir.errors import ArtifactError, BackendError, GenerationError, InternalError, RequestError
from ingot.runtime.scheduling.request import NOT_FINITE

pytestmark = [pytest.mark.xdist_group("parity-llama-plain"), pytest.mark.one_in_file(3)]

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS: list[Any] = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [9] * 20, [11])]
VOCAB = TINY["llama-plain"].config["vocab_size"]


@pytest.fixture(scope="module")
def llm(artifact: Callable[..., Path]) -> LLM:
    return LLM(artifact("llama-plain", backend="reference"))


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """What the good prompts give by themselves."""
    return tokens(llm.generate(PROMPTS, GREEDY))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_idle(llm: LLM) -> None:
    """Nothing is queued or held: every page and row is free."""
    engine = llm._engine
    scheduler = engine._scheduler
    while engine.has_unfinished():  # a last step may be in flight, without live requests
        assert engine.step() == []
    assert not scheduler.requests and not scheduler.running and not scheduler.waiting
    (pool,) = scheduler.pages.pools
    assert pool.num_free == pool.num_pages and pool.num_held == 0
    assert scheduler.rows.num_free == scheduler.config.max_batch
    assert not llm._waiting and not engine._groups and not engine._by_request


BAD_PROMPTS: dict[str, Any] = {
    "empty": [],
    "empty ids": {"prompt_token_ids": []},
    "too long": {"prompt_token_ids": [1] * MAX_SEQ_LEN},
    "far too long": {"prompt_token_ids": [1] * 100_000},
    "past the vocabulary": {"prompt_token_ids": [1, VOCAB]},
    "far past it": {"prompt_token_ids": [1 << 40]},
    "beyond 64 bits": {"prompt_token_ids": [1 << 100]},
    "negative": {"prompt_token_ids": [-1]},
    "a truth value": {"prompt_token_ids": [True]},
    "a float": {"prompt_token_ids": [1.0]},
    "nan": {"prompt_token_ids": [math.nan]},
    "strings": {"prompt_token_ids": ["1"]},
    "none inside": {"prompt_token_ids": [None]},
    "nested": {"prompt_token_ids": [[1, 2]]},
    "ids as text": {"prompt_token_ids": "12"},
    "ids as a number": {"prompt_token_ids": 5},
    "ids missing": {"prompt_token_ids": None},
    "a tensor": {"prompt_token_ids": torch.tensor([1, 2])},
    "an unknown key": {"prompt_tokens": [1]},
    "two keys": {"prompt": "a", "prompt_token_ids": [1]},
    "no key": {},
    "text without a tokenizer": "hello",
    "text by its key": {"prompt": "hello"},
    "bytes": b"hello",
    "a number": 5,
    "nothing": None,
    "a set": {1, 2},
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_in_a_batch_is_refused_before_anything_is_queued(
    llm: LLM, alone: list[list[int]], case: str
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([PROMPTS[0], BAD_PROMPTS[case], PROMPTS[1]], GREEDY)
    assert caught.value.exit_code == 2 and len(str(caught.value)) < 2000
    assert not llm._engine.has_unfinished()
    with pytest.raises(RequestError):
        llm.stream([PROMPTS[0], BAD_PROMPTS[case]], GREEDY)
    assert_idle(llm)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == alone
    assert_idle(llm)


@pytest.mark.parametrize("prompts", [None, 5, b"text", {}, [None], [[]], 1.5], ids=repr)
def test_what_is_no_list_of_prompts(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompts, GREEDY)
    assert_idle(llm)


@pytest.mark.parametrize("params", [5, "greedy", {}, {"temperature": 0}, [GREEDY], [GREEDY, None, GREEDY], [1, 2, 3]])
def test_what_are_no_sampling_params(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(PROMPTS, params)
    assert_idle(llm)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "1"},
        {"temperature": None},
        {"temperature": True},
        {"temperature": 10**400},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
        {"top_k": -2},
        {"top_k": 1.5},
        {"top_k": 1 << 40},
        {"min_p": -0.5},
        {"min_p": 2},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": "16"},
        {"max_tokens": 1.0},
        {"n": 0},
        {"n": 1 << 40},
        {"n": True},
        {"seed": -2},
        {"seed": 1 << 63},
        {"seed": 0.5},
        {"stop": [""]},
        {"stop": [5]},
        {"stop": {"a"}},
        {"stop_token_ids": 5},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["a"]},
        {"ignore_eos": 1},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"repetition_penalty": 0},
        {"frequency_penalty": 2.5},
        {"presence_penalty": math.nan},
        {"min_tokens": 17},
        {"logit_bias": {5: math.nan}},
        {"allowed_token_ids": []},
        {"bad_words": [""]},
        {"best_of": 2},
        {"temprature": 1.0},
    ],
    ids=str,
)
def test_sampling_parameters_out_of_range(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**fields)
    assert len(str(caught.value)) < 1000


def test_parameters_that_only_the_model_can_refuse(llm: LLM, alone: list[list[int]]) -> None:
    for fields in ({"stop_token_ids": [VOCAB]}, {"stop": ["a"]}, {"stop_token_ids": [*range(3, 19)], "min_tokens": 1}):
        with pytest.raises(RequestError):
            llm.generate(PROMPTS, [GREEDY, SamplingParams(**fields), GREEDY])
        assert_idle(llm)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == alone


def test_what_is_unusual_and_right(llm: LLM, alone: list[list[int]]) -> None:
    assert llm.generate([], GREEDY) == []
    assert tokens(llm.generate(tuple(PROMPTS), [GREEDY] * 3)) == alone
    assert tokens(llm.generate(iter(PROMPTS), GREEDY)) == alone  # type: ignore[arg-type]
    assert tokens(llm.generate([[5, 6, 7], (9,) * 20, [np.int64(11)]], GREEDY)) == alone
    (longest,) = llm.generate([[1] * (MAX_SEQ_LEN - 1)], GREEDY)
    assert len(longest.outputs[0].token_ids) == 1 and longest.outputs[0].finish_reason == "length"
    extreme = SamplingParams(temperature=3.4e38, top_p=5e-324, top_k=2**31 - 1, min_p=1.0, max_tokens=10**30, seed=0)
    (output,) = llm.generate([[1] * 150], extreme)
    assert len(output.outputs[0].token_ids) <= 10
    endless = SamplingParams(min_tokens=10**30, max_tokens=None, repetition_penalty=1e30, presence_penalty=-2, seed=0)
    (output,) = llm.generate([[1] * 150], endless)
    assert len(output.outputs[0].token_ids) == MAX_SEQ_LEN - 150 and output.outputs[0].finish_reason == "length"
    assert_idle(llm)


# --- several at once ------------------------------------------------------------------------------------------------


def test_a_stream_that_is_left_or_never_read_gives_everything_back(llm: LLM, alone: list[list[int]]) -> None:
    for _ in range(3):
        for output in llm.stream(PROMPTS, GREEDY):
            assert not output.finished
            break
        llm.stream(PROMPTS, GREEDY)
        assert tokens(llm.generate(PROMPTS, GREEDY)) == alone
        assert_idle(llm)


def test_streams_and_generate_side_by_side_keep_to_their_own(llm: LLM, alone: list[list[int]]) -> None:
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    next(first)
    assert tokens(llm.generate(PROMPTS[2], GREEDY)) == alone[2:]
    next(second)
    assert [output.request_id for output in llm.generate(PROMPTS, GREEDY)]
    assert [list(stream)[-1].outputs[0].token_ids for stream in (second, first)] == [alone[1], alone[0]]
    assert_idle(llm)


def test_a_step_that_fails_ends_all_requests_and_the_next_ones_run(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **options: object) -> Any:
        raise RuntimeError("out of luck")

    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        bucket = llm._loaded.executor._lanes[0][0]
        patch.setattr(bucket, "_steps", [type(bucket._steps[0])(**{**vars(bucket._steps[0]), "run": fails})])
        with pytest.raises(BackendError, match=r"ingot\.feed failed: RuntimeError: out of luck"):
            llm.generate(PROMPTS, GREEDY)
    with pytest.raises(InternalError, match="were dropped"):
        list(stream)
    assert_idle(llm)
    assert all(bucket._table[index] is None for index in bucket._types)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == alone


@pytest.mark.parametrize("where", ["launch", "tokens"])
def test_an_interrupt_ends_what_runs_and_the_next_ones_run(
    llm: LLM, alone: list[list[int]], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step is launched, and where the host waits for one while the next is in flight."""
    executor, steps = llm.loaded.executor, 0
    launch = executor.launch

    class Interrupted:
        def tokens(self) -> list[int]:
            raise KeyboardInterrupt

    def third(inputs: Any, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if where == "launch" and steps == 3:
            raise KeyboardInterrupt
        handle = launch(inputs, *arguments)
        if steps == 3:
            return Interrupted()
        return handle

    with monkeypatch.context() as patch:
        patch.setattr(executor, "launch", third)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert steps == (3 if where == "launch" else 4)
    assert_idle(llm)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == alone
    assert_idle(llm)


# --- numbers that break ---------------------------------------------------------------------------------------------

POISON = 13  # a token whose embedding is not finite


@pytest.fixture(scope="module")
def poisoned(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], LLM]:
    """A model of which one row of embeddings holds a value that is not finite."""
    made: dict[str, LLM] = {}

    def get(value: float) -> LLM:
        if str(value) not in made:
            folder = tmp_path_factory.mktemp("poisoned")
            source = checkpoint("llama-plain")
            tensors = load_file(source / "model.safetensors")
            config = json.loads((source / "config.json").read_text())
            # Untied, or every row of logits would hold the poisoned column.
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors["model.embed_tokens.weight"][POISON] = value
            (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            compile_model(folder, folder / "a.ingot", backend="reference", max_batch=8, max_tokens=64)
            made[str(value)] = LLM(folder / "a.ingot", num_kv_pages=24)
        return made[str(value)]

    return get


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_end_as_errors_and_the_others_go_on(
    poisoned: Callable[[float], LLM], value: float, temperature: float
) -> None:
    llm = poisoned(value)
    params = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True, seed=3)
    # No good request meets the poisoned token by itself, as far as these six tokens go.
    good = [[5, 6, 7], [9] * 20, [11]]
    expected = tokens(llm.generate(good, params))
    assert all(len(ids) == 6 and POISON not in ids[:-1] for ids in expected)
    bad = [[POISON], [5, POISON, 7], [4] * 40 + [POISON]]
    for _ in range(4):  # the pages of the bad ones are used again by the good ones
        mixed = [prompt for pair in zip(bad, good, strict=True) for prompt in pair]
        outputs = llm.generate(mixed, params)
        ends = [(output.outputs[0].finish_reason, output.outputs[0].stop_reason) for output in outputs]
        assert ends == [("error", NOT_FINITE), ("length", None)] * 3
        assert [output.outputs[0].token_ids for output in outputs] == [
            ids for pair in zip([[]] * 3, expected, strict=True) for ids in pair
        ]
        assert_idle(llm)
    assert tokens(llm.generate(good, params)) == expected


def test_a_model_that_is_all_nan_is_an_error_and_stays_up(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = checkpoint("llama-plain")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][:] = math.nan
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    compile_model(tmp_path, tmp_path / "a.ingot", backend="reference", max_batch=8, max_tokens=64)
    llm = LLM(tmp_path / "a.ingot")
    for params in (GREEDY, SamplingParams(n=3, max_tokens=4)):
        with pytest.raises(GenerationError, match=f"all {len(PROMPTS)} requests failed: {NOT_FINITE}"):
            llm.generate(PROMPTS, params)
        assert_idle(llm)
        streamed: list[RequestOutput] = []
        with pytest.raises(GenerationError, match="requests failed"):
            streamed += (output for output in llm.stream(PROMPTS, params))
        last = {output.request_id: output for output in streamed}
        assert len(last) == len(PROMPTS) and all(output.finished for output in last.values())
        for output in last.values():
            assert {(one.finish_reason, one.stop_reason) for one in output.outputs} == {("error", NOT_FINITE)}
            assert all(one.token_ids == [] for one in output.outputs)
        assert_idle(llm)
    with pytest.raises(GenerationError, match="the request failed"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=4))


@pytest.mark.parametrize("data", drawn(2, [b"{", b"[]", b"\xff", b'{"temperature": -1}', b'{"top_k": "x"}']))
def test_a_generation_config_that_is_wrong(checkpoint: Callable[[str], Path], tmp_path: Path, data: bytes) -> None:
    for file in checkpoint("llama-plain").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_bytes(data)
    compile_model(tmp_path, tmp_path / "a.ingot", backend="reference", max_batch=8, max_tokens=64)
    llm = LLM(tmp_path / "a.ingot")
    with pytest.raises(ArtifactError, match=r"generation_config\.json"):
        llm.generate([[1]])
    assert_idle(llm)
    llm.generate([[1]], GREEDY)
