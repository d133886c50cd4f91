"""Writes a response: whole, or as the events of a stream, from `response.created` to `response.completed`."""

import secrets
import time
from typing import Literal

import msgspec

from ingot.runtime.chat.messages import Message
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.serve.engine.messages import Delta
from ingot.serve.http.errors import HttpError
from ingot.serve.http.generation import Generation
from ingot.serve.http.logprobs import ChatTokenLogprob, chat_logprobs
from ingot.serve.http.parsed_deltas import ParsedMessage
from ingot.serve.http.responses_api.events import (
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
)
from ingot.serve.http.responses_api.fields import ResponseFields
from ingot.serve.http.responses_api.items import OutputItems
from ingot.serve.http.responses_api.objects import (
    OutputItem,
    ResponseError,
    ResponseObject,
    response_usage,
)
from ingot.serve.http.responses_api.store import ResponseStore, StoredResponse
from ingot.serve.http.typed_events import TypedAnswer, typed_event
from ingot.serve.parsers.events import Content

# OpenAI's ids are as long. Without API keys, only the id protects a response from other clients.
_ID_BYTES = 24


class ResponseWriter(TypedAnswer):
    """Writes the response to a checked request, and stores it at its end.

    message    separates the text, the reasoning and the calls
    messages   the conversation before the answer, without instructions
    params     the sampling parameters of the generation
    store      where the response is stored; None if the request or the server stores nothing
    owner      the name that `Guard` gave to the owner of the request's API key; "" without keys
    """

    def __init__(
        self,
        fields: ResponseFields,
        model_name: str,
        message: ParsedMessage,
        messages: list[Message],
        generation: Generation,
        params: SamplingParams,
        store: ResponseStore | None,
        owner: str,
    ) -> None:
        self._fields, self._model_name, self._params = fields, model_name, params
        self._messages, self._generation = messages, generation
        self._store, self._owner = store, owner
        self._id = f"resp_{secrets.token_hex(_ID_BYTES)}"
        self._parsed = message
        self._items = OutputItems(self._event)
        self._created = int(time.time())
        self._finish_reason: str | None = None
        self._events = 0

    async def whole(self) -> ResponseObject:
        """Wait for the end of the generation, and return the response."""
        async for _, deltas in self._generation:
            for delta in deltas:
                self._add(delta)
        self._close()
        return self._ended()

    def events(self, _index: int, deltas: list[Delta]) -> bytes:
        """Return the events for deltas: first those that announce the response, and its message if it has only one."""
        made = self._first_events() if self._events == 0 else []
        for delta in deltas:
            made += self._add(delta)
        return b"".join(made)

    def last_events(self) -> bytes:
        """Return the events that complete the last item and the response. "" if the client has left."""
        if self._finish_reason is None:
            return b""
        made = self._close()
        response = self._ended()
        kind = ResponseCompleted if response.status == "completed" else ResponseIncomplete
        return b"".join((*made, self._event(kind, response=response)))

    def error_events(self, error: HttpError) -> bytes:
        """Return the event of a failed response."""
        failed = self._object("failed", [], error=ResponseError("server_error", error.message))
        return self._event(ResponseFailed, response=failed)

    def _add(self, delta: Delta) -> list[bytes]:
        """Add a delta to the output, and return its events. Its log-probabilities belong to its first text, and are
        left out if it has none, as when it is part of a call."""
        self._finish_reason = delta.finish_reason
        logprobs: list[ChatTokenLogprob] = []
        if self._params.logprobs is not None and delta.logprobs is not None:
            logprobs = chat_logprobs(delta.logprobs, self._params.logprobs, as_ids=False).content
        found = self._parsed.events_of(delta)
        if logprobs and not found and not self._parsed.parses:  # tokens of an incomplete character
            found = [Content("")]
        made: list[bytes] = []
        for event in found:
            made += self._items.take(event, logprobs)
            logprobs = [] if isinstance(event, Content) else logprobs
        return made

    def _close(self) -> list[bytes]:
        """End the last item. An output without any has an empty message."""
        made = [] if self._items.items else self._items.open_message()
        return [*made, *self._items.close(self._status())]

    def _first_events(self) -> list[bytes]:
        made = [
            self._event(ResponseCreated, response=self._object("in_progress", [])),
            self._event(ResponseInProgress, response=self._object("in_progress", [])),
        ]
        return made if self._parsed.parses else [*made, *self._items.open_message()]

    def _event(self, kind: type[ResponseEvent], **fields: object) -> bytes:
        made = typed_event(kind(sequence_number=self._events, **fields))
        self._events += 1
        return made

    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _ended(self) -> ResponseObject:
        """Return the response after its end, and store it. Raises HttpError if the client has left before the end."""
        if self._finish_reason is None:
            raise HttpError(400, "the client left before the end")
        response = self._object(self._status(), self._items.items)
        response.usage = response_usage(self._generation)
        response.completed_at = int(time.time()) if response.status == "completed" else None
        if self._store is not None:
            messages = (*self._messages, self._items.as_message())
            stored = StoredResponse(msgspec.json.encode(response), messages)
            self._store.put(self._owner, self._id, stored)
        return response

    def _object(
        self,
        status: Literal["in_progress", "completed", "incomplete", "failed"],
        output: list[OutputItem],
        error: ResponseError | None = None,
    ) -> ResponseObject:
        fields, params = self._fields, self._params
        return ResponseObject(
            id=self._id,
            created_at=self._created,
            status=status,
            error=error,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=fields.instructions,
            max_output_tokens=fields.max_output_tokens,
            max_tool_calls=fields.max_tool_calls,
            model=self._model_name,
            output=output,
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            previous_response_id=fields.previous_response_id,
            prompt_cache_key=fields.prompt_cache_key,
            reasoning={"effort": None, "summary": None},
            safety_identifier=fields.safety_identifier,
            store=self._store is not None,
            temperature=params.temperature,
            text={"format": (fields.text or {}).get("format") or {"type": "text"}},
            tool_choice=fields.tool_choice or "auto",
            tools=fields.tools or [],
            top_logprobs=fields.top_logprobs or 0,
            top_p=params.top_p,
            truncation=fields.truncation or "disabled",
            user=fields.user,
            metadata=fields.metadata or {},
        )
