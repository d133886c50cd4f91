"""`/v1/responses`: OpenAI's Responses API. Ended responses are stored, so that a request can continue one by its id."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ingot.runtime.chat.messages import Message
from ingot.runtime.chat.template import ChatOptions
from ingot.runtime.params.prompt import Prompt
from ingot.serve.http.answers import json_response, respond
from ingot.serve.http.body import body_schema, read_fields
from ingot.serve.http.chat_prompts import chat_prompt
from ingot.serve.http.chat_tools import refusals_of_tools
from ingot.serve.http.errors import HttpError
from ingot.serve.http.generation import Generation
from ingot.serve.http.responses_api.answer import ResponseWriter
from ingot.serve.http.responses_api.fields import LOGPROBS, ResponseFields, check_supported, sampling_of
from ingot.serve.http.responses_api.input_items import input_messages, read_response_tools
from ingot.serve.http.responses_api.truncation import drop_oldest_turns
from ingot.serve.http.sampling_fields import room_up_to, sampling_params
from ingot.serve.http.serving import Serving, serving_of
from ingot.serve.parsers.tool_use import ToolUse

router = APIRouter()


@router.post("/v1/responses", openapi_extra=body_schema(ResponseFields))
async def create_response(request: Request) -> Response:
    """Answer a conversation; as one response, or as a stream of events."""
    serving = serving_of(request)
    fields = await read_fields(request, ResponseFields, serving.options)
    model_name = serving.model_name(fields.model)
    check_supported(fields)
    tools, use = _tool_use(fields, serving)
    messages, prompt = await _prompt(request, serving, fields, tools)
    message = serving.chat_form.new_message(prompt, use, continues=False)
    model = serving.llm.model
    room = room_up_to(fields.max_output_tokens, len(prompt.token_ids), model.max_seq_len, "max_output_tokens")
    logprobs = (fields.top_logprobs or 0) if LOGPROBS in (fields.include or ()) else None
    with refusals_of_tools(use):
        sampling = serving.chat_form.sampling(sampling_of(fields), prompt, use, continues=False)
        params = sampling_params(sampling, model.defaults, max_tokens=room, logprobs=logprobs)
        streams, rank = bool(fields.stream), fields.priority or 0
        generation = Generation(serving, [prompt], [params], stream=streams, priority=rank, model=fields.model)
        store = serving.responses if fields.store is not False and serving.responses.enabled else None
        writer = ResponseWriter(fields, model_name, message, messages, generation, params, store, request.state.tenant)
        return await respond(request, generation, writer, stream=streams)


@router.post("/v1/responses/input_tokens", openapi_extra=body_schema(ResponseFields))
async def count_input_tokens(request: Request) -> Response:
    """Return the number of tokens of a request's prompt. Fields that do not make the prompt have no effect."""
    serving = serving_of(request)
    fields = await read_fields(request, ResponseFields, serving.options)
    serving.model_name(fields.model)
    check_supported(fields)
    tools, _ = _tool_use(fields, serving)
    _, prompt = await _prompt(request, serving, fields, tools)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


@router.get("/v1/responses/{response_id}")
async def read_response(request: Request, response_id: str) -> Response:
    """Return a stored response of the request's API key."""
    stored = serving_of(request).responses.get(request.state.tenant, response_id)
    if stored is None:
        raise _not_found(response_id)
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise HttpError(400, "a stored response has ended; read it without stream", param="stream")
    return Response(stored.content, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a stored response of the request's API key. Later ones of its conversation remain."""
    if not serving_of(request).responses.delete(request.state.tenant, response_id):
        raise _not_found(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _tool_use(fields: ResponseFields, serving: Serving) -> tuple[list[Any] | None, ToolUse]:
    """Return a request's tools in the form of chats, and how it may use them. Raises HttpError."""
    several, has_grammar = fields.parallel_tool_calls is not False, fields.structured_outputs is not None
    tools, use = read_response_tools(fields.tools, fields.tool_choice, several=several, has_grammar=has_grammar)
    serving.check_tools(use)
    return tools, use


async def _prompt(
    request: Request, serving: Serving, fields: ResponseFields, tools: list[Any] | None
) -> tuple[list[Message], Prompt]:
    """Return the conversation of a request without its instructions, and its prompt with them.

    With `truncation: auto`, both are cut to the turns that leave room for the output. Raises HttpError or RequestError.
    """
    messages = [*_previous_messages(request, serving, fields), *input_messages(fields.input)]
    instructions: list[Message] = []
    if fields.instructions is not None:
        instructions.append({"role": "system", "content": fields.instructions})
    options = ChatOptions(tools=tools, variables=fields.chat_template_kwargs)
    sampling = sampling_of(fields)

    async def render(some: list[Message]) -> Prompt:
        return await chat_prompt(request, serving, [*instructions, *some], options, sampling)

    if fields.truncation != "auto":
        return messages, await render(messages)
    most = serving.llm.model.max_seq_len - (fields.max_output_tokens or 1)
    return await drop_oldest_turns(messages, most, render)


def _previous_messages(request: Request, serving: Serving, fields: ResponseFields) -> tuple[Message, ...]:
    """Return the conversation that a request continues. Raises HttpError if the response is not stored."""
    if fields.previous_response_id is None:
        return ()
    stored = serving.responses.get(request.state.tenant, fields.previous_response_id)
    if stored is None:
        raise HttpError(
            400,
            f"Previous response with id {fields.previous_response_id[:200]!r} not found; it may have been dropped. "
            "Send the whole conversation as input.",
            param="previous_response_id",
            code="previous_response_not_found",  # OpenAI's
        )
    return stored.messages


def _not_found(response_id: str) -> HttpError:
    return HttpError(404, f"Response with id {response_id[:200]!r} not found.")
