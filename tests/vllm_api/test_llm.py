"""vLLM's classes, on a tiny model: the calls of its example scripts, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM as IngotLLM
from ingot import SamplingParams as FrozenParams
from ingot.ir.errors import ArtifactError, OptionError, RequestError
from ingot.vllm_api import (
    LLM,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
    cleanup_dist_env_and_memory,
    print_embeddings,
)

GREEDY = {"temperature": 0.0, "max_tokens": 6}
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llm(chat_artifact: Path) -> LLM:
    return LLM(model=str(chat_artifact), enforce_eager=True, scheduling_policy="priority")


@pytest.fixture(scope="module")
def pooling(pooling_artifact: Path) -> LLM:
    return LLM(str(pooling_artifact), runner="pooling")


def text(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_outputs_are_those_of_ingot(llm: LLM, chat_artifact: Path) -> None:
    prompts = [TextPrompt(prompt="one"), "two", TokensPrompt(prompt_token_ids=[3, 4])]
    found = llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
    own = IngotLLM(chat_artifact).generate(
        [{**p} if isinstance(p, dict) else p for p in prompts], FrozenParams(**GREEDY)
    )
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in own]
    assert found[0].prompt == "one" and found[2].prompt_token_ids == [3, 4]


def test_forms_of_prompts(llm: LLM) -> None:
    params = SamplingParams(**GREEDY)
    both = TokensPrompt(prompt_token_ids=[3, 4], prompt="its text", cache_salt="a")
    for prompt in (both, [both], {"prompt_token_ids": [3, 4], "multi_modal_data": None}):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.prompt_token_ids == [3, 4]
        assert output.prompt == (None if "multi_modal_data" in prompt else "its text")
    for wrong in ({"prompt": "a", "multi_modal_data": {}}, {"prompt_token_ids": [-1], "prompt": "a"}, 3, None, [[]]):
        with pytest.raises(RequestError):
            llm.generate(wrong, params, use_tqdm=False)


def test_parameters_can_be_set_and_do_not_change_what_runs(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature, params.top_k = 3, 0, -1
    (output,) = llm.generate("go", params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3 and params.top_k == 0
    other = params.clone()
    other.max_tokens = 5
    assert (params.max_tokens, other.max_tokens) == (3, 5)
    with pytest.raises(RequestError, match="max_tokens"):
        params.max_tokens = 0
    assert params.max_tokens == 3
    with pytest.raises(RequestError, match="unknown sampling parameter 'max_token'"):
        params.max_token = 1
    assert SamplingParams.from_optional(top_k=None, max_tokens=2) == SamplingParams(max_tokens=2)


def test_default_parameters_can_be_overridden(chat_artifact: Path) -> None:
    changed = EngineArgs(model=str(chat_artifact), override_generation_config={"max_new_tokens": 2, "top_k": 4})
    params = LLM.from_engine_args(changed).get_default_sampling_params()
    assert (params.max_tokens, params.top_k) == (2, 4)


def test_a_bar_is_shown_unless_it_is_off(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate("go", SamplingParams(**GREEDY))
    assert "Processed prompts" in capfd.readouterr().err
    llm.generate("go", SamplingParams(**GREEDY), use_tqdm=False)
    assert capfd.readouterr().err == ""
    calls: list[Any] = []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            calls.append(total)

        def update(self, n: int) -> None:
            calls.append(n)

        def close(self) -> None:
            calls.append("closed")

    llm.generate(["a", "b"], SamplingParams(**GREEDY), use_tqdm=Bar)
    assert calls == [2, 1, 1, "closed"]
    with pytest.raises(RequestError, match="use_tqdm is 3"):
        llm.generate("a", SamplingParams(**GREEDY), use_tqdm=3)  # type: ignore[arg-type]


def test_priorities(llm: LLM) -> None:
    params = SamplingParams(**GREEDY)
    assert text(llm.generate(["a", "b"], params, priority=1)) == text(llm.generate(["a", "b"], params, priority=[2, 1]))


def test_conversations(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(**GREEDY)
    (one,) = llm.chat(CHAT, params, use_tqdm=False)
    assert text(llm.chat([CHAT, CHAT], params, False)) == [one.outputs[0].text] * 2
    template = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    (other,) = llm.chat(CHAT, params, use_tqdm=False, chat_template=template)
    assert other.prompt == "Hello!" != one.prompt
    file = tmp_path / "other.jinja"
    file.write_text(template)
    assert llm.chat(CHAT, params, use_tqdm=False, chat_template=str(file))[0].prompt == "Hello!"
    with pytest.raises(ArtifactError, match="cannot be read"):
        llm.chat(CHAT, params, chat_template="nowhere.jinja")


@pytest.mark.parametrize(
    "given",
    [
        {"lora_request": LoRARequest("a", 1, "/adapter")},
        {"lora_request": [None, LoRARequest("a", 1, "/adapter")]},
        {"tokenization_kwargs": {"truncation": True}},
        {"guess": 1},
    ],
)
def test_arguments_of_calls_are_refused_with_the_reason(llm: LLM, given: dict[str, Any]) -> None:
    (name,) = given
    for call in (llm.generate, llm.embed, llm.chat):
        with pytest.raises(RequestError, match=name):
            call("go", **given)
    assert llm.generate("go", SamplingParams(**GREEDY), use_tqdm=False, lora_request=None)


def test_a_grammar_is_a_type_and_not_supported_yet() -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))


def test_vectors(pooling: LLM, pooling_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = pooling.embed(["one", "two"], use_tqdm=False)
    own = IngotLLM(pooling_artifact).embed(["one", "two"])
    assert [one.outputs.embedding for one in found] == [one.embedding for one in own]
    assert found[0].outputs.hidden_size == 32 and found[0].finished and found[0].prompt_token_ids
    (short,) = pooling.embed("one", pooling_params=PoolingParams(dimensions=3), use_tqdm=False)
    assert len(short.outputs.embedding) == 3
    (tensor,) = pooling.encode(["one"], pooling_task="embed", use_tqdm=False)
    assert tensor.outputs.data.tolist() == pytest.approx(own[0].embedding, abs=1e-5)  # computed alone: other sums
    print_embeddings(found[0].outputs.embedding)
    assert capsys.readouterr().out.endswith(", ...] (size=32)\n")


def test_scores_are_cosines(pooling: LLM) -> None:
    first, second, third = (one.outputs.embedding for one in pooling.embed(["a b", "c", "d e f"], use_tqdm=False))
    scores = [one.outputs.score for one in pooling.score("a b", ["c", "d e f", "a b"], use_tqdm=False)]
    cosines = [sum(x * y for x, y in zip(first, other, strict=True)) for other in (second, third, first)]
    assert scores == pytest.approx(cosines, abs=1e-5)  # the vectors have length 1
    assert pooling.score(["c", "d e f"], ["c", "a b"], use_tqdm=False)[1].outputs.score == pytest.approx(scores[1])
    with pytest.raises(RequestError, match="2 texts and 3 texts"):
        pooling.score(["a", "b"], ["a", "b", "c"])


def test_what_a_model_does_not_do_is_refused(llm: LLM, pooling: LLM, chat_artifact: Path) -> None:
    with pytest.raises(OptionError, match="the model generates tokens"):
        LLM(str(chat_artifact), runner="pooling")
    with pytest.raises(RequestError, match="makes vectors"):
        pooling.generate("a", SamplingParams(**GREEDY))
    with pytest.raises(RequestError, match="makes vectors"):
        _ = pooling.llm_engine
    for refused in (llm.embed, pooling.classify, pooling.reward):
        with pytest.raises(RequestError):
            refused("a")
    with pytest.raises(RequestError, match="token_classify"):
        pooling.encode("a", pooling_task="token_classify")


def drained(engine: LLMEngine) -> Iterator[RequestOutput]:
    while engine.has_unfinished_requests():
        yield from engine.step()


def test_an_engine_that_a_program_steps(chat_artifact: Path) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(chat_artifact)))
    assert engine.step() == [] and not engine.has_unfinished_requests()
    assert engine.add_request("a", "one", SamplingParams(**GREEDY, ignore_eos=True)) == "a"
    engine.add_request("b", {"prompt_token_ids": [3, 4]}, SamplingParams(n=2, max_tokens=3, ignore_eos=True))
    engine.add_request("c", "three", SamplingParams(max_tokens=50, ignore_eos=True))
    assert engine.get_num_unfinished_requests() == 3
    seen: dict[str, list[RequestOutput]] = {}
    for output in drained(engine):
        seen.setdefault(output.request_id, []).append(output)
        if output.request_id == "c":
            engine.abort_request(["c", "unknown"])
    assert [len(one.outputs[0].token_ids) for one in seen["a"]] == [1, 2, 3, 4, 5, 6] and seen["a"][-1].finished
    assert [len(one.token_ids) for one in seen["b"][-1].outputs] == [3, 3] and len(seen["c"]) == 1
    for request_id, given in (("a", {"lora_request": LoRARequest("a", 1, "/b")}), (7, {})):
        with pytest.raises(RequestError):
            engine.add_request(request_id, "x", SamplingParams(), **given)  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests() and engine.get_tokenizer() is not None
    assert engine.reset_prefix_cache()
    with pytest.raises(RequestError, match="reset_running_requests"):
        engine.reset_prefix_cache(reset_running_requests=True)


def test_cached_prefixes_are_forgotten(llm: LLM) -> None:
    assert llm.reset_prefix_cache() and llm.llm_engine.get_num_unfinished_requests() == 0
    cleanup_dist_env_and_memory()
