"""Beam search by `AsyncLLM` and over HTTP: the sequences of `LLM.beam_search`, with other requests in between."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from http_server import HttpServer, until

from ingot import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from ingot.ir.errors import EngineDeadError, QueueFullError, RequestError
from ingot.runtime.engines.beams import BeamSearchOutput
from ingot.serve.engine.client import EngineLimits

pytestmark = pytest.mark.xdist_group("serve")
PROMPT, WIDTH, COUNT = "def f", 3, 7
SEARCH = {"prompt": PROMPT, "use_beam_search": True, "n": WIDTH, "max_tokens": COUNT, "temperature": 0}


@pytest.fixture(scope="module")
def llm(chat_artifact: Path) -> LLM:
    return LLM(chat_artifact)


def searched(llm: LLM, prompt: Any = PROMPT, **params: Any) -> Any:
    (found,) = llm.beam_search(prompt, BeamSearchParams(**{"beam_width": WIDTH, "max_tokens": COUNT, **params}))
    return found.sequences


def outputs(llm: LLM, sequences: Any, prompt: Any = PROMPT) -> list[list[int]]:
    """The tokens without the prompt's."""
    ids = llm.get_tokenizer().encode(prompt)  # type: ignore[union-attr]
    assert all(one.tokens[: len(ids)] == ids for one in sequences)
    return [one.tokens[len(ids) :] for one in sequences]


@pytest.mark.usefixtures("engine_thread")
def test_async_llm_finds_what_llm_finds(chat_artifact: Path, llm: LLM) -> None:
    params = [BeamSearchParams(WIDTH, COUNT), BeamSearchParams(2, 9, length_penalty=0.0, ignore_eos=True)]
    expected = [llm.beam_search(PROMPT, one)[0].sequences for one in params]

    async def body() -> None:
        async with AsyncLLM(chat_artifact) as served:
            other = served.generate("a", SamplingParams(max_tokens=40, ignore_eos=True))
            first, second, last = await asyncio.gather(
                *(served.beam_search(PROMPT, one) for one in params), collected(other)
            )
            for found, sequences in zip((first, second), expected, strict=True):
                assert [(one.tokens, one.text, one.finish_reason) for one in found.sequences] == [
                    (one.tokens, one.text, one.finish_reason) for one in sequences
                ]
                assert [one.cum_logprob for one in found.sequences] == pytest.approx(
                    [one.cum_logprob for one in sequences], rel=1e-4
                )
            assert len(last.outputs[0].token_ids) == 40 and served.engine.num_unfinished == 0
            for bad in ({"params": SamplingParams()}, {"prompt": [260]}, {"prompt": [5] * 4096}):
                with pytest.raises(RequestError):
                    await served.beam_search(**{"prompt": PROMPT, "params": params[0], **bad})

    asyncio.run(body())


async def collected(outputs: Any) -> Any:
    async for output in outputs:
        last = output
    return last


@pytest.mark.usefixtures("engine_thread")
def test_a_cancelled_search_leaves_nothing(chat_artifact: Path) -> None:
    async def body() -> None:
        async with AsyncLLM(chat_artifact, limits=EngineLimits(max_waiting=2)) as served:
            task = asyncio.create_task(served.beam_search(PROMPT, BeamSearchParams(4, 3000, ignore_eos=True)))
            while served.engine.num_unfinished < 4:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert served.engine.num_unfinished == 0
            wide = BeamSearchParams(10, 9, ignore_eos=True)  # as many requests in a step as may run and wait
            both = (served.beam_search(PROMPT, wide) for _ in range(2))
            ends = [type(one) for one in await asyncio.gather(*both, return_exceptions=True)]
            assert set(ends) == {BeamSearchOutput, QueueFullError}
            assert served.engine.num_unfinished == 0
            dying = asyncio.create_task(served.beam_search(PROMPT, BeamSearchParams(2, 3000, ignore_eos=True)))
            await asyncio.sleep(0.02)
            served.engine.fail_all(EngineDeadError("it has ended"))
            with pytest.raises(EngineDeadError):
                await dying

    asyncio.run(body())


def test_completions(server: HttpServer, llm: LLM) -> None:
    found = searched(llm)
    made = server.complete(**SEARCH, return_token_ids=True, logprobs=2, length_penalty=1.0).json()
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2]
    assert [choice["token_ids"] for choice in made["choices"]] == outputs(llm, found)
    assert [choice["finish_reason"] for choice in made["choices"]] == [one.finish_reason for one in found]
    for choice, one in zip(made["choices"], found, strict=True):
        logprobs = choice["logprobs"]
        assert sum(logprobs["token_logprobs"]) == pytest.approx(one.cum_logprob, abs=1e-3)
        assert "".join(logprobs["tokens"]).startswith(choice["text"]) or "\ufffd" in choice["text"]
        assert all(1 <= len(top) <= 3 for top in logprobs["top_logprobs"])
    usage = made["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, sum(map(len, outputs(llm, found))))
    assert usage["prompt_tokens_details"]["cached_tokens"] <= 5


def test_several_prompts_and_penalties(server: HttpServer, llm: LLM) -> None:
    fields = {**SEARCH, "prompt": ["def f", "class"], "length_penalty": -2.0, "n": 2, "ignore_eos": True}
    made = server.complete(**fields, return_token_ids=True, echo=True).json()["choices"]
    given = {"beam_width": 2, "length_penalty": -2.0, "ignore_eos": True}
    expected = [tokens for one in ("def f", "class") for tokens in outputs(llm, searched(llm, one, **given), one)]
    assert [choice["token_ids"] for choice in made] == expected
    assert [choice["text"][:5] for choice in made] == ["def f"] * 2 + ["class"] * 2


def test_an_end_token_ends_a_sequence(server: HttpServer, llm: LLM) -> None:
    """It is one of the tokens, and in the text only if the request says so."""
    prompts = [f"{letter}x" for letter in "abcdefghij"]
    wanted = {**SEARCH, "n": 10, "max_tokens": 24, "length_penalty": -4.0, "return_token_ids": True}
    ends = llm.loaded.eos_token_ids
    for prompt in prompts:
        found = searched(llm, prompt, beam_width=10, max_tokens=24, length_penalty=-4.0)
        if any(one.finish_reason == "stop" for one in found):
            break
    else:
        pytest.fail("no search of this random model meets an end token")
    plain = server.complete(**{**wanted, "prompt": prompt}).json()["choices"]
    shown = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    whole = server.complete(**{**wanted, "prompt": prompt, **shown}).json()["choices"]
    assert [one["finish_reason"] for one in plain] == [one.finish_reason for one in found]
    for short, long in zip(plain, whole, strict=True):
        assert short["token_ids"] == long["token_ids"]
        stopped = short["finish_reason"] == "stop"
        assert (short["token_ids"][-1] in ends) == stopped and long["text"].endswith("<end>") == stopped
        assert "<end>" not in short["text"]


def test_chats(server: HttpServer, llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (prompt,) = llm.preprocess_chat(messages)
    found = llm.beam_search(prompt, BeamSearchParams(2, 5))[0].sequences
    fields = {"messages": messages, "use_beam_search": True, "n": 2, "max_tokens": 5, "temperature": 0}
    answer = server.http.post(
        "/v1/chat/completions", json={**fields, "return_token_ids": True, "logprobs": True, "top_logprobs": 1}
    ).json()
    count = len(prompt.token_ids)
    assert [one["token_ids"] for one in answer["choices"]] == [one.tokens[count:] for one in found]
    assert [len(one["logprobs"]["content"]) for one in answer["choices"]] == [len(one.tokens) - count for one in found]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 11}, "n"),
        ({"n": 0}, "n"),
        ({"length_penalty": 99.0}, "length_penalty"),
        ({"length_penalty": "long"}, "length_penalty"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 3}, "top_k"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"seed": 3}, "seed"),
        ({"stop": ["a"]}, "stop"),
        ({"stop_token_ids": [3]}, "stop_token_ids"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"3": 5}}, "logit_bias"),
        ({"allowed_token_ids": [3]}, "allowed_token_ids"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"use_beam_search": False, "n": 1, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
    ],
    ids=str,
)
def test_what_a_beam_search_does_not_have(server: HttpServer, fields: dict[str, Any], param: str) -> None:
    refused = server.http.post("/v1/completions", json={**SEARCH, **fields})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text


def test_values_that_ask_for_nothing_are_taken(server: HttpServer) -> None:
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "stop": [], "seed": None, "best_of": 1}
    assert server.complete(**SEARCH, **neutral).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ],
)
def test_other_routes_have_no_beams(server: HttpServer, path: str, body: dict[str, Any]) -> None:
    refused = server.http.post(path, json={**body, "use_beam_search": True})
    assert refused.status_code == 400 and "/v1/completions" in refused.json()["error"]["message"]
    assert server.http.post(path, json={**body, "use_beam_search": False, "typical_p": 0.9}).status_code == 200


def test_a_search_holds_up_no_other_request(server: HttpServer) -> None:
    """Short requests are answered during a long search. A client that leaves ends its search."""
    before = server.gauge("engine_steps_total")
    with server.sent("/v1/completions", **{**SEARCH, "n": 4, "max_tokens": 4000, "ignore_eos": True}):
        until(lambda: server.load() > 0, 20)
        assert server.complete(max_tokens=2).status_code == 200
        until(lambda: server.load() > 0, 20)  # between two steps of a search no request is unfinished
    server.until_idle()
    assert server.gauge("engine_steps_total") - before < 4000, "the search ran to its end"
