"""Answers of `/v1/responses`: the object of a response, and its parts.

The forms are those of OpenAI's Python client (openai/types/responses/response.py, version 3.54).
"""

from typing import Any, Literal

import msgspec

from ingot.serve.http.generation import Generation
from ingot.serve.http.logprobs import ChatTokenLogprob


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message. It has log-probabilities if the request includes them."""

    text: str
    logprobs: list[ChatTokenLogprob]
    annotations: tuple[()] = ()


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A message of the assistant."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """Reasoning of the model. It has no summary."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[ReasoningText]
    summary: tuple[()] = ()


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call of a function. `arguments` is the text of a JSON object, unless the call is incomplete."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputDetails(msgspec.Struct):
    """How many tokens of the prompt came from the prefix cache. Writing to it is free, so nothing counts as written."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """How many tokens of the output are reasoning. They are not counted: reasoning is separated as text."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """OpenAI's count of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. `output` is empty, and `usage` None, until it has ended."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


def response_usage(generation: Generation) -> ResponseUsage:
    """Return the tokens of a generation so far."""
    prompt, output = generation.num_prompt_tokens, generation.num_tokens
    return ResponseUsage(prompt, InputDetails(generation.num_cached), output, OutputDetails(), prompt + output)
