"""Writes a response: whole, or as the events of a stream, from `response.created` to `response.completed`."""

import secrets
import time
from typing import Literal

import msgspec

from ingot.runtime.chat.messages import Message
from ingot.runtime.sampling_params import SamplingParams
from ingot.serve.engine.messages import Delta
from ingot.serve.http.errors import HttpError
from ingot.serve.http.generation import Generation
from ingot.serve.http.logprobs import ChatTokenLogprob, chat_logprobs
from ingot.serve.http.responses_api.events import (
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    TextDelta,
    TextDone,
)
from ingot.serve.http.responses_api.fields import ResponseFields
from ingot.serve.http.responses_api.objects import (
    OutputMessage,
    OutputText,
    ResponseError,
    ResponseObject,
    response_usage,
)
from ingot.serve.http.responses_api.store import ResponseStore, StoredResponse
from ingot.serve.http.typed_events import TypedAnswer, typed_event

# OpenAI's ids are as long. Without API keys, only the id protects a response from other clients.
_ID_BYTES = 24


class ResponseWriter(TypedAnswer):
    """Writes the response to a checked request, and stores it at its end.

    messages   the conversation before the answer, without instructions
    params     the sampling parameters of the generation
    store      where the response is stored; None if the request or the server stores nothing
    owner      the name that `Guard` gave to the owner of the request's API key; "" without keys
    """

    def __init__(
        self,
        fields: ResponseFields,
        model_name: str,
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
        self._item_id = f"msg_{secrets.token_hex(_ID_BYTES)}"
        self._created = int(time.time())
        self._text: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []
        self._finish_reason: str | None = None
        self._events = 0

    async def whole(self) -> ResponseObject:
        """Wait for the end of the generation, and return the response."""
        async for _, deltas in self._generation:
            for delta in deltas:
                self._add(delta)
        return self._ended()

    def events(self, _index: int, deltas: list[Delta]) -> bytes:
        """Return the events for deltas: first those that announce the response, its message and its text."""
        made = self._first_events() if self._events == 0 else []
        for delta in deltas:
            logprobs = self._add(delta)
            if delta.text or logprobs:
                made.append(self._event(TextDelta, **self._place(), delta=delta.text, logprobs=logprobs))
        return b"".join(made)

    def last_events(self) -> bytes:
        """Return the events that complete the text, the message and the response. "" if the client has left."""
        if self._finish_reason is None:
            return b""
        text, message = self._output_text(), self._message()
        response = self._ended()
        kind = ResponseCompleted if response.status == "completed" else ResponseIncomplete
        made = (
            self._event(TextDone, **self._place(), text=text.text, logprobs=text.logprobs),
            self._event(PartDone, **self._place(), part=text),
            self._event(ItemDone, output_index=0, item=message),
            self._event(kind, response=response),
        )
        return b"".join(made)

    def error_events(self, error: HttpError) -> bytes:
        """Return the event of a failed response."""
        failed = self._object("failed", [], error=ResponseError("server_error", error.message))
        return self._event(ResponseFailed, response=failed)

    def _add(self, delta: Delta) -> list[ChatTokenLogprob]:
        """Add a delta to the text. Return its log-probabilities in OpenAI's form; none if they are not requested."""
        self._text.append(delta.text)
        self._finish_reason = delta.finish_reason
        if self._params.logprobs is None or delta.logprobs is None:
            return []
        logprobs = chat_logprobs(delta.logprobs, self._params.logprobs, as_ids=False).content
        self._logprobs += logprobs
        return logprobs

    def _first_events(self) -> list[bytes]:
        message = OutputMessage(self._item_id, "in_progress", [])
        return [
            self._event(ResponseCreated, response=self._object("in_progress", [])),
            self._event(ResponseInProgress, response=self._object("in_progress", [])),
            self._event(ItemAdded, output_index=0, item=message),
            self._event(PartAdded, **self._place(), part=OutputText("", [])),
        ]

    def _event(self, kind: type[ResponseEvent], **fields: object) -> bytes:
        made = typed_event(kind(sequence_number=self._events, **fields))
        self._events += 1
        return made

    def _place(self) -> dict[str, object]:
        """Return the fields that say to which text of the output an event belongs."""
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _output_text(self) -> OutputText:
        return OutputText("".join(self._text), self._logprobs)

    def _message(self) -> OutputMessage:
        return OutputMessage(self._item_id, self._status(), [self._output_text()])

    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _ended(self) -> ResponseObject:
        """Return the response after its end, and store it. Raises HttpError if the client has left before the end."""
        if self._finish_reason is None:
            raise HttpError(400, "the client left before the end")
        message = self._message()
        response = self._object(self._status(), [message])
        response.usage = response_usage(self._generation)
        response.completed_at = int(time.time()) if response.status == "completed" else None
        if self._store is not None:
            answer: Message = {"role": "assistant", "content": message.content[0].text}
            stored = StoredResponse(msgspec.json.encode(response), (*self._messages, answer))
            self._store.put(self._owner, self._id, stored)
        return response

    def _object(
        self,
        status: Literal["in_progress", "completed", "incomplete", "failed"],
        output: list[OutputMessage],
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
            tool_choice="none" if fields.tool_choice == "none" else "auto",
            tools=fields.tools or [],
            top_logprobs=fields.top_logprobs or 0,
            top_p=params.top_p,
            truncation=fields.truncation or "disabled",
            user=fields.user,
            metadata=fields.metadata or {},
        )
