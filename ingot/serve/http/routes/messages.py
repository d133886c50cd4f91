"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's form of chats."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ingot.serve.http.answers import json_response, respond
from ingot.serve.http.body import body_schema, read_fields
from ingot.serve.http.chat_prompts import chat_prompt
from ingot.serve.http.chat_tools import refusals_of_tools
from ingot.serve.http.generation import Generation
from ingot.serve.http.messages_api.answer import MessageWriter
from ingot.serve.http.messages_api.fields import (
    CountFields,
    MessageFields,
    check_supported,
    conversation,
    sampling_of,
)
from ingot.serve.http.sampling_fields import room_up_to, sampling_params
from ingot.serve.http.serving import serving_of

router = APIRouter()


@router.post("/v1/messages", openapi_extra=body_schema(MessageFields))
async def create_message(request: Request) -> Response:
    """Answer a conversation; as one message, or as a stream of events."""
    serving = serving_of(request)
    fields = await read_fields(request, MessageFields, serving.options)
    model_name = serving.model_name(fields.model)
    check_supported(fields, reasons=serving.chat_form.output.reasoning is not None)
    messages, options, use = conversation(fields)
    serving.check_tools(use)
    sampling = sampling_of(fields)
    prompt = await chat_prompt(request, serving, messages, options, sampling)
    continues = options.continue_final_message
    message = serving.chat_form.new_message(prompt, use, continues=continues)
    model = serving.llm.model
    room = room_up_to(fields.max_tokens, len(prompt.token_ids), model.max_seq_len, "max_tokens")
    with refusals_of_tools(use):
        sampling = serving.chat_form.sampling(sampling, prompt, use, continues=continues)
        params = sampling_params(sampling, model.defaults, max_tokens=room, logprobs=None)
        streams, rank = bool(fields.stream), fields.priority or 0
        generation = Generation(serving, [prompt], [params], stream=streams, priority=rank, model=fields.model)
        request_id: str = request.state.request_id
        writer = MessageWriter(
            f"msg_{request_id}", request_id, model_name, generation, message, full_length=room < fields.max_tokens
        )
        return await respond(request, generation, writer, stream=streams)


@router.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountFields))
async def count_tokens(request: Request) -> Response:
    """Return the number of tokens of a conversation's prompt."""
    serving = serving_of(request)
    fields = await read_fields(request, CountFields, serving.options)
    serving.model_name(fields.model)
    check_supported(fields, reasons=serving.chat_form.output.reasoning is not None)
    messages, options, use = conversation(fields)
    serving.check_tools(use)
    prompt = await serving.llm.render(messages, options)
    return json_response({"input_tokens": len(prompt.token_ids)})
