"""The events of a streamed response.

The forms are those of OpenAI's Python client (openai/types/responses/response_*_event.py, version 3.54).
"""

from ingot.serve.http.logprobs import ChatTokenLogprob
from ingot.serve.http.responses_api.objects import OutputItem, OutputText, ReasoningText, ResponseObject
from ingot.serve.http.typed_events import TypedEvent


class ResponseEvent(TypedEvent, kw_only=True):
    """Base class. The events of a stream have the numbers 0, 1, 2 and so on."""

    sequence_number: int


class _OfResponse(ResponseEvent, kw_only=True):
    response: ResponseObject


class ResponseCreated(_OfResponse, tag="response.created", kw_only=True):
    """The first event."""


class ResponseInProgress(_OfResponse, tag="response.in_progress", kw_only=True):
    """The response is being generated."""


class ResponseCompleted(_OfResponse, tag="response.completed", kw_only=True):
    """The response has ended by itself or at a stop string."""


class ResponseIncomplete(_OfResponse, tag="response.incomplete", kw_only=True):
    """The response has ended because its length reached a limit."""


class ResponseFailed(_OfResponse, tag="response.failed", kw_only=True):
    """An error has ended the response."""


class _OfItem(ResponseEvent, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(_OfItem, tag="response.output_item.added", kw_only=True):
    """An item of the output begins."""


class ItemDone(_OfItem, tag="response.output_item.done", kw_only=True):
    """An item of the output is complete."""


class _OfContent(ResponseEvent, kw_only=True):
    item_id: str
    output_index: int
    content_index: int


class PartAdded(_OfContent, tag="response.content_part.added", kw_only=True):
    """The text of a message or of reasoning begins."""

    part: OutputText | ReasoningText


class PartDone(_OfContent, tag="response.content_part.done", kw_only=True):
    """The text of a message or of reasoning is complete."""

    part: OutputText | ReasoningText


class TextDelta(_OfContent, tag="response.output_text.delta", kw_only=True):
    """New text."""

    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDone(_OfContent, tag="response.output_text.done", kw_only=True):
    """All text."""

    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDelta(_OfContent, tag="response.reasoning_text.delta", kw_only=True):
    """New text of reasoning."""

    delta: str


class ReasoningDone(_OfContent, tag="response.reasoning_text.done", kw_only=True):
    """All text of an item of reasoning."""

    text: str


class _OfCall(ResponseEvent, kw_only=True):
    item_id: str
    output_index: int


class ArgumentsDelta(_OfCall, tag="response.function_call_arguments.delta", kw_only=True):
    """New text of a call's arguments."""

    delta: str


class ArgumentsDone(_OfCall, tag="response.function_call_arguments.done", kw_only=True):
    """All arguments of a call."""

    name: str
    arguments: str
