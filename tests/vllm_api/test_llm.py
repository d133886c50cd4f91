"""vLLM's classes, on a tiny model: the calls of its example scripts, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM as IngotLLM
from ingot import BeamSearchParams as FrozenBeams
from ingot import SamplingParams as FrozenParams
from ingot.ir.errors import ArtifactError, OptionError, RequestError
from ingot.serve.http.class_scores import probabilities
from ingot.vllm_api import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    FlexibleArgumentParser,
    LLMEngine,
    LoRARequest,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
    cleanup_dist_env_and_memory,
    load_chat_template,
    parse_model_prompt,
    print_embeddings,
)
from ingot.vllm_api.refused_methods import METHODS

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
    made = SamplingParams.from_optional(logit_bias={"3": 500, 4: -1.5})
    assert made.logit_bias == ((3, 100.0), (4, -1.5))
    for bad in ({"a": 1}, {3: "b"}, {3: True}):
        with pytest.raises(RequestError, match="logit_bias"):
            SamplingParams.from_optional(logit_bias=bad)


def test_edits_of_logits(llm: LLM) -> None:
    params = SamplingParams(**GREEDY, allowed_token_ids=[40, 41, 42], logit_bias={41: 100.0}, typical_p=0.9)
    assert llm.generate("go", params, use_tqdm=False)[0].outputs[0].token_ids == [41] * 6
    params.logit_bias = {42: 100.0}
    assert llm.generate("go", params, use_tqdm=False)[0].outputs[0].token_ids == [42] * 6
    params.truncate_prompt_tokens = 1
    assert len(llm.generate("go", params, use_tqdm=False)[0].prompt_token_ids) == 1


def test_beam_search(llm: LLM, chat_artifact: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In the form of vLLM's documentation, and with the order of its arguments."""
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    prompts = [TextPrompt(prompt="one"), {"prompt_token_ids": [3, 4], "multi_modal_data": None}, "two"]
    found = llm.beam_search(prompts, params)
    own = IngotLLM(chat_artifact).beam_search(["one", {"prompt_token_ids": [3, 4]}, "two"], FrozenBeams(3, 6))
    assert [[beam.tokens for beam in one.sequences] for one in found] == [
        [beam.tokens for beam in one.sequences] for one in own
    ]
    assert found[0].sequences[0].text.startswith("one") and capfd.readouterr().err == ""
    (one,) = llm.beam_search(prompts[:1], params, None, True, 1)
    assert one.sequences[0].tokens == found[0].sequences[0].tokens and "Beam search" in capfd.readouterr().err
    params.beam_width = 1
    assert len(llm.beam_search(["one"], params)[0].sequences) == 1
    with pytest.raises(RequestError, match="beam_width"):
        params.beam_width = 0
    with pytest.raises(RequestError, match="beam_with"):
        params.beam_with = 2
    with pytest.raises(RequestError, match="structured_outputs"):
        BeamSearchParams(2, 3, structured_outputs=StructuredOutputsParams(choice=["a"]))
    with pytest.raises(RequestError, match="lora_request"):
        llm.beam_search(["one"], params, LoRARequest("a", 1, "/adapter"))


def test_a_beam_search_within_a_lowered_length(chat_artifact: Path) -> None:
    short = LLM(str(chat_artifact), max_model_len=20)
    (found,) = short.beam_search([{"prompt_token_ids": [5] * 16}], BeamSearchParams(2, 50, ignore_eos=True))
    assert [len(beam.tokens) for beam in found.sequences] == [20, 20] and short.model_config.max_model_len == 20
    with pytest.raises(RequestError, match="20 tokens"):
        short.beam_search([{"prompt_token_ids": [5] * 20}], BeamSearchParams(2, 1))


def test_prompts_that_a_program_renders(llm: LLM) -> None:
    parsed = [
        parse_model_prompt(llm.model_config, one) for one in ("Hello", [3, 4], {"prompt": "a", "cache_salt": "s"})
    ]
    rendered = llm.renderer.render_cmpl(parsed)
    (plain,) = llm.generate("Hello", SamplingParams(**GREEDY), use_tqdm=False)
    (output,) = llm.generate(rendered[0], SamplingParams(**GREEDY), use_tqdm=False)
    assert output.prompt == "Hello" and output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert rendered[1] == {"prompt_token_ids": [3, 4]} and rendered[2]["cache_salt"] == "s"
    short = llm.renderer.default_cmpl_tok_params.with_kwargs(truncate_prompt_tokens=2, add_special_tokens=False)
    tokens = llm.renderer.get_tokenizer().encode_plain("Hello")  # type: ignore[union-attr]
    (cut,) = llm.renderer.render_cmpl(["Hello"], short)
    assert cut["prompt_token_ids"] == tokens[-2:]
    for bad in ({"truncate_prompt_tokens": 0}, {"do_lower_case": True}):
        with pytest.raises(RequestError):
            short.with_kwargs(**bad)
    for wrong in (3, None):
        with pytest.raises(RequestError):
            parse_model_prompt(llm.model_config, wrong)


def test_a_program_with_options(chat_artifact: Path, tmp_path: Path) -> None:
    """What vLLM's examples do: options of a command line, default parameters that are changed, then each method."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model=str(chat_artifact), enforce_eager=True, max_num_seqs=2)
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int)
    args = vars(parser.parse_args(["--max_tokens", "4", "--max_model_len", "64", "--enable-prefix-caching"]))
    most = args.pop("max_tokens")
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = most, 0.0
    assert llm.llm_engine.model_config.max_model_len == 64 and llm.get_world_size() == 1
    assert len(llm.generate(["a", "b", "c"], params)) == 3
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}")
    template = load_chat_template(file)
    (answer,) = llm.chat(CHAT, params, False, None, template)
    assert answer.prompt == "Hello" and load_chat_template(template) == template
    assert llm.beam_search([{"prompt": "a"}], BeamSearchParams(2, most))[0].sequences[0].text
    with pytest.raises(RequestError, match="cannot be read"):
        load_chat_template(tmp_path / "nothing.jinja")


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


def test_a_grammar(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), **GREEDY)
    params.max_tokens = 16
    (found,) = llm.generate("go", params, use_tqdm=False)
    assert found.outputs[0].text in ("yes", "no") and found.outputs[0].finish_reason == "stop"


def test_an_adapter_needs_an_artifact_for_adapters(llm: LLM, pooling: LLM) -> None:
    adapter = LoRARequest("a", 1, "/adapter")
    for given in (adapter, [adapter]):
        with pytest.raises(RequestError, match="compiled for none"):
            llm.generate("go", lora_request=given)
    with pytest.raises(RequestError, match="compiled for none"):
        llm.chat(CHAT, lora_request=adapter)
    with pytest.raises(RequestError, match="lora_request is not supported"):
        pooling.embed("go", lora_request=adapter)


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
    for refused in (llm.embed, llm.classify, pooling.classify, pooling.reward):
        with pytest.raises(RequestError):
            refused("a")
    with pytest.raises(RequestError, match="token_classify"):
        pooling.encode("a", pooling_task="token_classify")
    with pytest.raises(RequestError, match="makes vectors"):
        pooling.beam_search(["a"], BeamSearchParams(2, 3))


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_are_missing_give_the_reason(llm: LLM, name: str) -> None:
    for one in (llm, llm.llm_engine):
        with pytest.raises(RequestError, match=f"{name} is not supported") as caught:
            getattr(one, name)("a", b=1)
        assert caught.value.hint


def test_classes(classes_artifact: Path) -> None:
    classifier = LLM(str(classes_artifact), runner="pooling")
    prompts = ["one", "two"]
    logits = [one.embedding for one in IngotLLM(classes_artifact).embed(prompts)]
    found = classifier.classify(prompts, use_tqdm=False)
    assert [one.outputs.probs for one in found] == [probabilities(one) for one in logits]
    assert found[0].outputs.num_classes == 3 and sum(found[1].outputs.probs) == pytest.approx(1.0)
    params = [PoolingParams(use_activation=False), PoolingParams()]
    raw = classifier.classify(prompts, pooling_params=params, use_tqdm=False)
    assert [one.outputs.probs for one in raw] == [logits[0], probabilities(logits[1])]
    for task in (None, "classify"):
        (tensor,) = classifier.encode("one", pooling_task=task, use_tqdm=False)
        assert tensor.outputs.data.tolist() == pytest.approx(found[0].outputs.probs, abs=1e-5)
    for call in (classifier.embed, lambda prompt: classifier.score(prompt, prompt), classifier.reward):
        with pytest.raises(RequestError, match=r"classes|rewards"):
            call("a")
    with pytest.raises(RequestError, match="dimensions"):
        classifier.classify("a", pooling_params=PoolingParams(dimensions=2))


def test_pooling_parameters(pooling: LLM) -> None:
    (plain,) = pooling.embed("one", pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    (same,) = pooling.embed("one", pooling_params=[PoolingParams(normalize=False, task=None)], use_tqdm=False)
    assert plain.outputs.embedding == same.outputs.embedding
    assert sum(x * x for x in plain.outputs.embedding) != pytest.approx(1.0, abs=1e-3)
    for bad, name in (
        ({"task": "embed"}, "task"),
        ({"softmax": True}, "softmax"),
        ({"guess": None}, "guess"),
        ({"normalize": True, "use_activation": False}, "differ"),
    ):
        with pytest.raises(RequestError, match=name):
            PoolingParams(**bad)


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
