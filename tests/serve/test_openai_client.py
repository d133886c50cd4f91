"""OpenAI's own client: sync, async and streaming, against what the engine does without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import HttpServer
from openai import AsyncOpenAI, NotFoundError, OpenAI

from ingot import LLM, SamplingParams

pytestmark = pytest.mark.xdist_group("serve")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "héllo"}]


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def llm(chat_artifact: Path) -> LLM:
    return LLM(chat_artifact)


def answer(llm: LLM, **params: object):
    (output,) = llm.chat(MESSAGES, SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params}))
    return output


def test_a_chat(client: OpenAI, llm: LLM) -> None:
    made = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=12)
    expected = answer(llm)
    (choice,) = made.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.outputs[0].text)
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert made.usage is not None and made.model == "tiny" and made.object == "chat.completion"
    assert made.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert made.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens


def test_a_streamed_chat(client: OpenAI, llm: LLM) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    expected = answer(llm).outputs[0]
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(one.choices[0].delta.content or "" for one in chunks[:-1]) == expected.text
    assert [one.choices[0].finish_reason for one in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        expected.finish_reason
    ]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert len({one.id for one in chunks}) == 1 and {one.object for one in chunks} == {"chat.completion.chunk"}
    assert len(chunks) > 4, "the text came at once"


def test_several_streamed_answers(client: OpenAI, llm: LLM) -> None:
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(
        model="tiny", messages=MESSAGES, seed=7, n=3, max_tokens=8, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [one.text for one in answer(llm, n=3, seed=7, temperature=1.0, max_tokens=8).outputs]


def test_many_async_requests(server: HttpServer, llm: LLM) -> None:
    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(index: int) -> str:
                text = ""
                stream = await client.completions.create(
                    model="tiny", prompt=f"prompt {index}", max_tokens=10, seed=index, stream=True
                )
                async for chunk in stream:
                    text += chunk.choices[0].text
                return text

            return await asyncio.gather(*(one(index) for index in range(20)))

    made = asyncio.run(all_of_them())
    params = [SamplingParams(max_tokens=10, seed=index) for index in range(20)]
    expected = llm.generate([f"prompt {index}" for index in range(20)], params)
    assert made == [output.outputs[0].text for output in expected]


def test_logprobs_of_a_chat(client: OpenAI, llm: LLM) -> None:
    made = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2
    )
    expected = answer(llm, logprobs=2, max_tokens=5).outputs[0]
    logprobs = made.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert expected.logprobs is not None and len(logprobs.content) == len(expected.token_ids) == 5
    for one, token, entry in zip(logprobs.content, expected.token_ids, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(entry[token].logprob, abs=1e-6) and one.token == entry[token].decoded_token
        assert one.bytes == list((entry[token].decoded_token or "").encode())
        best = sorted(entry.values(), key=lambda other: other.rank)[:2]
        assert [top.logprob for top in one.top_logprobs] == pytest.approx([other.logprob for other in best], abs=1e-6)


def test_a_message_continued(client: OpenAI, llm: LLM) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Well,"}]
    made = client.chat.completions.create(
        model="tiny",
        messages=messages,
        temperature=0,
        max_tokens=6,
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "echo": True},
    )
    (expected,) = llm.chat(
        messages,
        SamplingParams(temperature=0.0, max_tokens=6),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert made.choices[0].message.content == "Well," + expected.outputs[0].text


def test_the_models(client: OpenAI, chat_artifact: Path) -> None:
    assert [one.id for one in client.models.list()] == ["tiny", str(chat_artifact)]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"
