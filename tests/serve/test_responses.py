"""`/v1/responses` with OpenAI's own client, against what the engine does without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import HttpServer
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response

from ingot import LLM, SamplingParams

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.one_in_file(3)]
USER = {"role": "user", "content": "héllo"}
SYSTEM = {"role": "system", "content": "Be brief."}
FIRST_TYPES = ["created", "in_progress", "output_item.added", "content_part.added"]
LAST_TYPES = ["output_text.done", "content_part.done", "output_item.done"]


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def llm(chat_artifact: Path) -> LLM:
    return LLM(chat_artifact)


def expected(llm: LLM, messages: list[dict[str, str]], **params: Any):
    (output,) = llm.chat(messages, SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params}))
    return output


def create(client: OpenAI, given: Any = "héllo", **fields: Any) -> Response:
    made = client.responses.create(
        **{"model": "tiny", "input": given, "temperature": 0, "max_output_tokens": 12, **fields}
    )
    assert isinstance(made, Response)
    return made


def test_a_response(client: OpenAI, llm: LLM) -> None:
    made, output = create(client, instructions="Be brief."), expected(llm, [SYSTEM, USER])
    assert made.output_text == output.outputs[0].text
    assert (made.object, made.model, made.temperature, made.instructions) == ("response", "tiny", 0, "Be brief.")
    assert made.usage is not None
    assert made.usage.input_tokens == len(output.prompt_token_ids)
    assert made.usage.output_tokens == len(output.outputs[0].token_ids) == 12
    assert made.usage.total_tokens == made.usage.input_tokens + 12
    assert made.status == "incomplete" and made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    (item,) = made.output
    assert item.type == "message" and item.role == "assistant" and item.status == "incomplete"


def test_a_response_that_ends_by_itself(client: OpenAI, llm: LLM) -> None:
    """Sampled until the end token, with a seed of vLLM's extension fields."""
    output = expected(llm, [USER], temperature=1.0, seed=45, max_tokens=40).outputs[0]
    assert output.finish_reason == "stop"
    made = create(client, temperature=1, max_output_tokens=40, extra_body={"seed": 45})
    assert made.output_text == output.text and made.status == "completed"
    assert made.incomplete_details is None and made.completed_at is not None
    assert made.output[0].status == "completed"


@pytest.mark.parametrize(
    "given",
    [
        [SYSTEM, USER],
        [
            {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "héllo"}]},
        ],
    ],
)
def test_lists_of_messages(given: list[Any], client: OpenAI, llm: LLM) -> None:
    assert create(client, given).output_text == expected(llm, [SYSTEM, USER]).outputs[0].text


def test_the_output_of_a_response_as_input(client: OpenAI, llm: LLM) -> None:
    first = create(client)
    given = [USER, *first.output, {"role": "user", "content": "more"}]
    answer = {"role": "assistant", "content": first.output_text}
    messages = [USER, answer, {"role": "user", "content": "more"}]
    assert create(client, given).output_text == expected(llm, messages).outputs[0].text


def test_a_length_above_the_room_of_the_model(client: OpenAI) -> None:
    """`max_output_tokens` is an upper bound, so a large one is no error."""
    made = create(client, "x" * 4070, max_output_tokens=1000)
    assert made.status == "incomplete" and made.usage is not None and made.usage.total_tokens == 4096


def test_the_oldest_turns_are_dropped(client: OpenAI, llm: LLM) -> None:
    """With `truncation: auto`; a continuation of the response begins with the turns that were kept."""
    turns = [{"role": role, "content": "x" * (60 + index)} for index in range(60) for role in ("user", "assistant")]
    given, at_once = [SYSTEM, *turns, USER], {"stop_token_ids": [*range(256)]}
    with pytest.raises(BadRequestError, match="maximum context length"):
        create(client, given)
    # 3500 tokens for the output leave room for two turns of some 260 tokens, and the short messages.
    made = create(client, given, truncation="auto", instructions="Go on.", max_output_tokens=3500, extra_body=at_once)
    kept = [SYSTEM, *turns[-4:], USER]
    whole = [{"role": "system", "content": "Go on."}, *kept]
    assert made.usage is not None and made.truncation == "auto" and made.output_text == ""
    assert made.usage.input_tokens == len(expected(llm, whole, max_tokens=1).prompt_token_ids) <= 4096 - 3500
    count = client.responses.input_tokens.count(model="tiny", input="more", previous_response_id=made.id)
    more: Any = [*kept, {"role": "assistant", "content": ""}, {"role": "user", "content": "more"}]
    assert count.input_tokens == client.responses.input_tokens.count(model="tiny", input=more).input_tokens


def test_counting_tokens(client: OpenAI, llm: LLM) -> None:
    count = client.responses.input_tokens.count(model="tiny", input="héllo", instructions="Be brief.")
    assert count.object == "response.input_tokens"
    assert count.input_tokens == len(expected(llm, [SYSTEM, USER], max_tokens=1).prompt_token_ids)


def test_a_stream(client: OpenAI, llm: LLM) -> None:
    events = list(client.responses.create(model="tiny", input=[USER], temperature=0, max_output_tokens=12, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type.removeprefix("response.") for event in events]
    deltas = types.count("output_text.delta")  # they merge on a busy machine
    assert types == [*FIRST_TYPES, *["output_text.delta"] * deltas, *LAST_TYPES, "incomplete"] and deltas >= 1
    text = expected(llm, [USER]).outputs[0].text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    first, last = events[0], events[-1]
    assert first.type == "response.created" and last.type == "response.incomplete"
    assert first.response.status == "in_progress" and first.response.output == [] and first.response.usage is None
    assert last.response.output_text == text and last.response.id == first.response.id
    items = {event.item_id for event in events if hasattr(event, "item_id")}
    assert items == {last.response.output[0].id}
    assert client.responses.retrieve(last.response.id).output_text == text


def test_the_clients_own_accumulation(client: OpenAI, llm: LLM) -> None:
    """`responses.stream` checks the order of the events, and builds the response from them."""
    output = expected(llm, [USER], temperature=1.0, seed=45, max_tokens=40).outputs[0]
    fields = {"model": "tiny", "input": [USER], "temperature": 1, "max_output_tokens": 40, "extra_body": {"seed": 45}}
    with client.responses.stream(**fields) as stream:  # type: ignore[arg-type]
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.status == "completed" and final.output_text == text == output.text
    assert final.usage is not None and final.usage.output_tokens == len(output.token_ids)


def test_async_responses(server: HttpServer, llm: LLM) -> None:
    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(index: int) -> str:
                fields: Any = {"model": "tiny", "input": f"prompt {index}", "temperature": 0, "max_output_tokens": 8}
                if index % 2 == 0:
                    return (await client.responses.create(**fields)).output_text
                stream = await client.responses.create(**fields, stream=True)
                return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

            return await asyncio.gather(*(one(index) for index in range(4)))

    made = asyncio.run(all_of_them())
    for index, text in enumerate(made):
        message = {"role": "user", "content": f"prompt {index}"}
        assert text == expected(llm, [message], max_tokens=8).outputs[0].text


def test_a_conversation_continued_by_id(client: OpenAI, llm: LLM) -> None:
    """Three turns; the instructions of a turn are not carried over."""
    conversation = [USER]
    made = create(client, instructions="Be brief.")
    assert made.output_text == expected(llm, [SYSTEM, *conversation]).outputs[0].text
    for text in ("more", "and more"):
        turn = {"role": "user", "content": text}
        conversation += [{"role": "assistant", "content": made.output_text}, turn]
        before, made = made, create(client, text, previous_response_id=made.id)
        assert made.output_text == expected(llm, conversation).outputs[0].text
        assert made.previous_response_id == before.id
    # Both branches of a conversation can go on, also from a stream.
    streamed = client.responses.create(
        model="tiny", input="more", temperature=0, max_output_tokens=12, previous_response_id=made.id, stream=True
    )
    *_, last = streamed
    assert last.type == "response.incomplete" and create(client, previous_response_id=last.response.id).output_text


def test_a_stored_response(client: OpenAI) -> None:
    made = create(client, metadata={"topic": "greetings"})
    found = client.responses.retrieve(made.id)
    assert found.to_dict() == made.to_dict() and found.metadata == {"topic": "greetings"}
    later = create(client, previous_response_id=made.id)
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(NotFoundError, match=made.id):
            call(made.id)
    with pytest.raises(BadRequestError) as error:
        create(client, previous_response_id=made.id)
    assert error.value.code == "previous_response_not_found" and error.value.param == "previous_response_id"
    assert create(client, previous_response_id=later.id).output_text  # it has its whole conversation


def test_a_response_that_is_not_stored(client: OpenAI) -> None:
    made = create(client, store=False)
    assert made.to_dict()["store"] is False
    with pytest.raises(NotFoundError):
        client.responses.retrieve(made.id)


def test_logprobs(client: OpenAI, llm: LLM) -> None:
    include: Any = ["message.output_text.logprobs"]
    made = create(client, include=include, top_logprobs=2, max_output_tokens=5)
    output = expected(llm, [USER], logprobs=2, max_tokens=5).outputs[0]
    (content,) = made.output[0].content  # type: ignore[union-attr]
    assert content.type == "output_text" and content.logprobs is not None and output.logprobs is not None
    values = [one.logprob for one in content.logprobs]
    own = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    assert values == pytest.approx(own, abs=1e-6)
    assert all(len(one.top_logprobs) == 2 for one in content.logprobs)
    events = client.responses.create(
        model="tiny", input=[USER], temperature=0, max_output_tokens=5, include=include, top_logprobs=2, stream=True
    )
    streamed = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.logprob for one in streamed] == pytest.approx(values, abs=1e-6)
    assert create(client, top_logprobs=2).output[0].content[0].logprobs == []  # type: ignore[union-attr]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": 3}, "input"),
    ({"input": []}, "empty conversation"),
    ({"input": ["hi"]}, "input[0]"),
    ({"input": [{"role": "king", "content": "hi"}]}, "input[0].role"),
    ({"input": [{"role": ["user"], "content": "hi"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": ["x"]}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text only"),
    ({"input": [{"type": "item_reference", "id": "1"}]}, "references"),
    ({"input": [{"type": {}}]}, "input[0]"),
    ({"input": "x" * 5000}, "maximum context length"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**30}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["everything"]}, "include"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
    ({"temperature": -1}, "temperature"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, '["not"]'),
    ({"truncation": "middle"}, "truncation"),
    ({"input": "x" * 5000, "truncation": "auto"}, "maximum context length"),
    ({"background": True}, "background"),
    ({"logit_bias": {"1000": 2.0}}, "logit_bias"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "1"}}, "prompt"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
]


@pytest.mark.parametrize(("fields", "text"), BAD)
def test_bad_requests(fields: dict[str, Any], text: str, server: HttpServer) -> None:
    """The status is sent before a stream begins, so a stream has it too."""
    answer = server.http.post("/v1/responses", json={"input": "go", "stream": True, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error.keys() == {"message", "type", "param", "code"}
    assert text in error["message"] or text == error["param"], error


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto", "reasoning": {"effort": None}, "text": {"format": {"type": "text"}}},
        {"tools": [{"type": "function", "name": "f"}], "tool_choice": "none", "truncation": "auto"},
        {"include": ["reasoning.encrypted_content"], "background": False, "user": "me", "service_tier": "auto"},
    ],
)
def test_fields_that_change_nothing(fields: dict[str, Any], client: OpenAI, llm: LLM) -> None:
    assert create(client, **fields).output_text == expected(llm, [USER]).outputs[0].text


def test_other_models_and_stored_streams(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as error:
        create(client, model="gpt-6")
    assert error.value.code == "model_not_found"
    with pytest.raises(BadRequestError, match="without stream"):
        client.responses.retrieve(create(client).id, stream=True)
