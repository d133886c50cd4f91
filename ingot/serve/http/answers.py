"""Parts that several routes share: usage, the ids of answers, cache salts, JSON responses, and how answers are sent."""

from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ingot.serve.http.event_stream import Answer, EventStream
from ingot.serve.http.generation import Generation
from ingot.serve.http.sampling_fields import SamplingFields, StreamOptions


class RequestFields(Protocol):
    """The fields that the requests of all routes have: the client's id of a request, and its cache salt."""

    @property
    def request_id(self) -> str | None: ...

    @property
    def cache_salt(self) -> str | None: ...


class PromptDetails(msgspec.Struct):
    """How many of the prompt's tokens came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's count of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage_of(generation: Generation) -> Usage:
    """Return the tokens of a generation so far."""
    prompt, output = generation.num_prompt_tokens, generation.num_tokens
    return Usage(prompt, output, prompt + output, PromptDetails(generation.num_cached))


def answer_id(prefix: str, request: Request, fields: RequestFields) -> str:
    """Return the id of an answer, such as "cmpl-7f…": the prefix, and the request's id from its fields or headers."""
    return f"{prefix}-{fields.request_id or request.state.request_id}"


def cache_salt(request: Request, fields: RequestFields) -> str | None:
    """Return the salt of a request in the prefix cache: its own, and the owner of its API key. None: no salt.

    So no client can measure by the time of an answer what clients with other keys have sent."""
    tenant: str = request.state.tenant
    if not tenant or fields.cache_salt == "":  # an empty one is an error, which the prompt's check reports
        return fields.cache_salt
    return f"{tenant}:{fields.cache_salt or ''}"


def stream_options(fields: SamplingFields) -> StreamOptions:
    """Return the request's stream options, or the default ones."""
    return fields.stream_options or StreamOptions()


def json_response(content: Any) -> Response:
    """Return a response with `content` as JSON. Structs and plain data are encoded by msgspec."""
    return Response(msgspec.json.encode(content), media_type="application/json")


async def respond(request: Request, generation: Generation, answer: Answer, *, stream: bool | None) -> Response:
    """Return the response to a request: a stream of events, or the whole answer when it is complete.

    If the client leaves, or an error ends the generation, close the generation. Raises the errors of the engine.
    """
    try:
        if stream:
            await generation.begin(request.receive)
            return EventStream(generation, answer)
        async with generation.closed_if_left(request.receive):
            whole = await answer.whole()
        generation.close()
        return json_response(whole)
    except BaseException:
        generation.close()
        raise
