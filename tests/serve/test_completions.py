"""`/v1/completions`: prompts in all forms, echo, log-probabilities, stops, against `LLM`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from http_server import HttpServer

from ingot import LLM, SamplingParams

pytestmark = pytest.mark.xdist_group("serve")


@pytest.fixture(scope="module")
def llm(chat_artifact: Path) -> LLM:
    return LLM(chat_artifact)


def greedy(llm: LLM, prompt: Any, **params: Any) -> Any:
    (output,) = llm.generate([prompt], SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **params}))
    return output


def test_prompts_in_all_forms(server: HttpServer, llm: LLM) -> None:
    ids = list(b"def f")
    ids = llm.get_tokenizer().encode("def f")  # type: ignore[union-attr]
    expected = greedy(llm, "def f").outputs[0].text
    for prompt, count in (("def f", 1), (ids, 1), (["def f", "def f"], 2), ([ids, ids, ids], 3), (["def f", ids], 2)):
        made = server.complete(prompt=prompt, temperature=0, max_tokens=6).json()
        assert [choice["text"] for choice in made["choices"]] == [expected] * count
        assert [choice["index"] for choice in made["choices"]] == list(range(count))
        assert made["usage"]["prompt_tokens"] == 5 * count and made["usage"]["completion_tokens"] == 6 * count


def test_choices_of_several_prompts_are_in_order(server: HttpServer, llm: LLM) -> None:
    prompts = ["one", "two", "three"]
    made = server.complete(prompt=prompts, n=2, seed=3, max_tokens=5).json()
    params = SamplingParams(n=2, seed=3, max_tokens=5)
    texts = [one.text for output in llm.generate(prompts, params) for one in output.outputs]
    assert [choice["text"] for choice in made["choices"]] == texts
    assert [choice["index"] for choice in made["choices"]] == list(range(6))


def test_echo_with_logprobs_scores_the_prompt(server: HttpServer, llm: LLM) -> None:
    """As lm-eval computes the likelihood of a continuation."""
    expected = greedy(llm, "abcdef", max_tokens=1, logprobs=2, prompt_logprobs=2)
    scores = [None, *(entry[token].logprob for entry, token in _scored(expected))]
    for most in (1, 0):
        made = server.complete(prompt="abcdef", echo=True, logprobs=2, max_tokens=most, temperature=0).json()
        (choice,) = made["choices"]
        found = choice["logprobs"]
        generated = expected.outputs[0].text if most else ""
        assert choice["text"] == "abcdef" + generated
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:6] == pytest.approx(scores[1:], abs=1e-6)
        assert found["tokens"][:6] == list("abcdef") and found["text_offset"][:6] == [0, 1, 2, 3, 4, 5]
        assert len(found["tokens"]) == 6 + most and made["usage"]["completion_tokens"] == most
        assert all(len(top) in (2, 3) for top in found["top_logprobs"][1:])


def _scored(output: Any) -> list[tuple[Any, int]]:
    return list(zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True))


def test_a_stream_is_the_answer_in_parts(server: HttpServer) -> None:
    fields = {"prompt": ["ab", "cd"], "temperature": 0, "max_tokens": 7, "logprobs": 1, "echo": True}
    whole = server.complete(**fields).json()["choices"]
    texts, tokens, reasons = ["", ""], [[], []], [None, None]  # type: ignore[var-annotated]
    with server.http.stream("POST", "/v1/completions", json={**fields, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    for line in lines[:-1]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole]
    assert reasons == [choice["finish_reason"] for choice in whole]
    for choice, found in zip(whole, tokens, strict=True):
        assert found == list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))


def test_stops(server: HttpServer, llm: LLM) -> None:
    text = greedy(llm, "ab", max_tokens=20).outputs[0].text
    stop = text[4:6]
    made = server.complete(prompt="ab", temperature=0, max_tokens=20, stop=[stop]).json()["choices"][0]
    assert made["text"] == text[: text.index(stop)]
    assert (made["finish_reason"], made["stop_reason"]) == ("stop", stop)
    kept = server.complete(
        prompt="ab", temperature=0, max_tokens=20, stop=stop, include_stop_str_in_output=True
    ).json()["choices"][0]
    assert kept["text"] == text[: text.index(stop) + len(stop)]


def test_logit_edits(server: HttpServer, llm: LLM) -> None:
    """The same as `LLM`'s; token ids are text as keys of JSON."""
    plain = greedy(llm, "def f").outputs[0]
    edits: list[dict[str, Any]] = [
        {"logit_bias": {plain.token_ids[0]: -100.0}},
        {"allowed_token_ids": plain.token_ids[1:4]},
        {"bad_words": [plain.text[0]] if plain.text.strip() else ["f"]},
    ]
    for edit in edits:
        expected = greedy(llm, "def f", **edit).outputs[0].text
        sent = {**edit}
        if "logit_bias" in edit:
            sent["logit_bias"] = {str(token): bias for token, bias in edit["logit_bias"].items()}
            assert expected != plain.text
        made = server.complete(prompt="def f", temperature=0, max_tokens=6, **sent).json()
        assert made["choices"][0]["text"] == expected


def test_extensions_of_vllm(server: HttpServer, llm: LLM) -> None:
    """Fields that OpenAI's API lacks and vLLM's clients send."""
    ids = llm.get_tokenizer().encode("0123456789")  # type: ignore[union-attr]
    cut = server.complete(
        prompt="0123456789", truncate_prompt_tokens=3, max_tokens=2, temperature=0, return_token_ids=True
    ).json()
    assert cut["usage"]["prompt_tokens"] == 3 and cut["choices"][0]["prompt_token_ids"] == ids[-3:]
    assert cut["choices"][0]["token_ids"] == list(
        greedy(llm, {"prompt_token_ids": ids[-3:]}, max_tokens=2).outputs[0].token_ids
    )
    named = server.complete(logprobs=0, max_tokens=2, return_tokens_as_token_ids=True).json()["choices"][0]
    assert all(token.startswith("token_id:") for token in named["logprobs"]["tokens"])
    typical = {"typical_p": 0.3, "seed": 5, "max_tokens": 8}
    (drawn_here,) = llm.generate(["go"], SamplingParams(**typical))  # type: ignore[arg-type]
    assert server.complete(**typical).json()["choices"][0]["text"] == drawn_here.outputs[0].text
    drawn = [server.complete(seed=5, top_k=3, min_p=0.1, max_tokens=6).json()["choices"][0]["text"] for _ in range(2)]
    assert drawn[0] == drawn[1]
    scored = server.complete(prompt="abc", prompt_logprobs=1, max_tokens=1).json()["choices"][0]["prompt_logprobs"]
    assert (
        scored[0] is None
        and len(scored) == 3
        and all("logprob" in one for entry in scored[1:] for one in entry.values())
    )


def test_the_prefix_cache_is_salted(server: HttpServer) -> None:
    prompt = "x" * 100

    def cached(**fields: Any) -> int:
        made = server.complete(prompt=prompt, max_tokens=1, **fields).json()
        found: int = made["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached(cache_salt="a") == 0 and cached(cache_salt="a") > 50 and cached(cache_salt="b") == 0


def test_tokenize_and_back(server: HttpServer, llm: LLM) -> None:
    made = server.http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert made["tokens"] == llm.get_tokenizer().encode("héllo") and made["count"] == 6  # type: ignore[union-attr]
    assert made["max_model_len"] == 4096 and len(made["token_strs"]) == 6
    assert server.http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "héllo"}
    messages = [{"role": "user", "content": "hi"}]
    chat = server.http.post("/tokenize", json={"messages": messages}).json()
    assert chat["tokens"] == llm.preprocess_chat(messages)[0].token_ids
