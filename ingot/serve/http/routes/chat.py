"""`/v1/chat/completions`: the assistant's next message in a conversation."""

import time
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ingot.runtime.chat.template import ChatOptions
from ingot.runtime.params.prompt import Prompt
from ingot.serve.engine.messages import Delta
from ingot.serve.http.answers import Usage, answer_id, respond, stream_options, usage_of
from ingot.serve.http.beam_search import request_params
from ingot.serve.http.body import body_schema, read_fields
from ingot.serve.http.chat_prompts import chat_prompt
from ingot.serve.http.chat_tools import read_tools, refusals_of_tools, tool_use
from ingot.serve.http.errors import HttpError, checked
from ingot.serve.http.event_stream import Answer, event
from ingot.serve.http.generation import Generation
from ingot.serve.http.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs
from ingot.serve.http.parsed_deltas import DeltaToolCall, MessagePart, ParsedMessage, ToolCall
from ingot.serve.http.sampling_fields import MAX_TOP_LOGPROBS, SamplingFields, output_room
from ingot.serve.http.serving import Serving, serving_of
from ingot.serve.parsers.tool_use import ToolUse

router = APIRouter()
_encode = msgspec.json.Encoder().encode


class ChatFields(SamplingFields, kw_only=True):
    """A request. `messages` are checked by `ingot.runtime.chat.messages`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    # Refused unless neutral.
    chat_template: str | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    # No effect on the output.
    verbosity: str | None = None


class AnswerMessage(msgspec.Struct):
    """The assistant's message. The reasoning has both of its names among clients."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class DeltaMessage(msgspec.Struct, omit_defaults=True):
    """The new part of the assistant's message in a stream. The first chunk has the role and an empty content."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChatChoice(msgspec.Struct, omit_defaults=True):
    """One of the answer's messages."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatChunkChoice(msgspec.Struct, omit_defaults=True):
    """The new part of one of the messages."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = None
    stop_reason: int | str | None = None


class ChatCompletion(msgspec.Struct, omit_defaults=True):
    """An answer, or a chunk of a stream; only answers have the prompt's log-probabilities."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatFields))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation n times; as one answer, or as a stream of events."""
    serving = serving_of(request)
    fields = await read_fields(request, ChatFields, serving.options)
    model_name = serving.model_name(fields.model)
    _check(fields)
    use = _tool_use(fields, serving)
    prompt = await chat_prompt(request, serving, fields.messages, _chat_options(fields, use), fields)
    answer = _ChatAnswer(answer_id("chatcmpl", request, fields), model_name, fields, prompt, use)
    with refusals_of_tools(use):
        return await respond(request, answer.generation(serving), answer, stream=fields.stream)


class _ChatAnswer(Answer):
    """Writes the answer to a checked request: whole, or as events."""

    def __init__(self, answer_id: str, model_name: str, fields: ChatFields, prompt: Prompt, use: ToolUse) -> None:
        self._id, self._model_name, self._created = answer_id, model_name, int(time.time())
        self._fields, self._prompt, self._stream = fields, prompt, stream_options(fields)
        self._top = (fields.top_logprobs or 0) if fields.logprobs else None
        self._use = use
        self._messages: dict[int, ParsedMessage] = {}  # by the index of the choice, those that have begun

    def generation(self, serving: Serving) -> Generation:
        """Send the prompt to the engine. Raises what `Generation` raises, and errors of the sampling fields."""
        fields, model = self._fields, serving.llm.model
        name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
        self._form = serving.chat_form
        sampling = self._form.sampling(fields, self._prompt, self._use, continues=bool(fields.continue_final_message))
        room = output_room(getattr(fields, name), None, len(self._prompt.token_ids), model.max_seq_len, name)
        params = request_params(sampling, model.defaults, max_tokens=room, logprobs=self._top)
        streams, rank = bool(fields.stream), fields.priority or 0
        self._generation = Generation(
            serving, [self._prompt], [params], stream=streams, priority=rank, model=fields.model
        )
        return self._generation

    async def whole(self) -> ChatCompletion:
        """Wait for all sequences, and return the answer."""
        ended: dict[int, Delta] = {}
        async for _, deltas in self._generation:
            for delta in deltas:  # one for each sequence, at its end
                ended[delta.index] = delta
        choices = [self._choice(delta) for _, delta in sorted(ended.items())]
        scores = ended[0].prompt_logprobs if 0 in ended else None
        wanted = self._fields.return_token_ids
        return ChatCompletion(
            self._id,
            "chat.completion",
            self._created,
            self._model_name,
            choices,
            usage_of(self._generation),
            None if scores is None else prompt_logprobs(scores),
            self._prompt.token_ids if wanted else None,
        )

    def events(self, _index: int, deltas: list[Delta]) -> bytes:
        """Return the events for deltas: for each choice first one with the role, then its parts."""
        events: list[bytes] = []
        for delta in deltas:
            if delta.index not in self._messages:
                message = DeltaMessage("assistant", "")
                events.append(self._event([ChatChunkChoice(delta.index, message, None, None)]))
                if self._fields.echo:
                    message = DeltaMessage(content=self._last_content())
                    events.append(self._event([ChatChunkChoice(delta.index, message, None, None)]))
            parsed = self._message(delta.index)
            part = parsed.part_of(delta)
            if self._shows(delta, parsed, part):
                usage = usage_of(self._generation) if self._stream.continuous_usage_stats else None
                events.append(self._event([self._chunk(delta, parsed, part)], usage))
        return b"".join(events)

    def last_events(self) -> bytes:
        """Return the event with the usage, if it is requested."""
        return self._event([], usage_of(self._generation)) if self._stream.include_usage else b""

    def _event(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        chunk = ChatCompletion(self._id, "chat.completion.chunk", self._created, self._model_name, choices, usage)
        return event(_encode(chunk))

    def _choice(self, delta: Delta) -> ChatChoice:
        parsed = self._message(delta.index)
        part = parsed.part_of(delta)
        content = self._last_content() + part.content if self._fields.echo else part.content
        message = AnswerMessage("assistant", content)
        if part.reasoning:
            message.reasoning = message.reasoning_content = part.reasoning
        if part.calls:
            message.tool_calls = part.whole_calls()
        if not content and (part.reasoning or part.calls):
            message.content = None
        return ChatChoice(
            delta.index,
            message,
            self._logprobs(delta),
            self._finish_reason(delta, parsed),
            delta.stop_reason,
            delta.token_ids if self._fields.return_token_ids else None,
        )

    def _new_message(self) -> ParsedMessage:
        fields = self._fields
        return self._form.new_message(
            self._prompt,
            self._use,
            continues=bool(fields.continue_final_message),
            with_reasoning=fields.include_reasoning is not False,
        )

    def _message(self, index: int) -> ParsedMessage:
        """Return the message of a choice, which begins with its first delta."""
        if index not in self._messages:
            self._messages[index] = self._new_message()
        return self._messages[index]

    def _finish_reason(self, delta: Delta, parsed: ParsedMessage) -> str | None:
        """Return why a message has ended. A call of the function that the request names ends with "stop", as OpenAI's
        does; https://github.com/vllm-project/vllm/pull/25054 has its answers."""
        return delta.finish_reason if self._use.named else parsed.finish_reason(delta)

    def _shows(self, delta: Delta, parsed: ParsedMessage, part: MessagePart) -> bool:
        """Return whether a delta makes a chunk. Without anything new for the client, it makes none."""
        new = part.content or part.reasoning or part.calls or delta.finish_reason is not None
        return bool(new) or self._top is not None or bool(self._fields.return_token_ids) or not parsed.parses

    def _chunk(self, delta: Delta, parsed: ParsedMessage, part: MessagePart) -> ChatChunkChoice:
        content = part.content if part.content or not (part.reasoning or part.calls) else None
        reasoning = part.reasoning or None
        return ChatChunkChoice(
            delta.index,
            DeltaMessage(None, content, reasoning, reasoning, part.calls or None),
            self._logprobs(delta),
            self._finish_reason(delta, parsed),
            delta.token_ids if self._fields.return_token_ids else None,
            delta.stop_reason,
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if self._top is None or delta.logprobs is None:
            return None
        return chat_logprobs(delta.logprobs, self._top, as_ids=bool(self._fields.return_tokens_as_token_ids))

    def _last_content(self) -> str:
        """Return the content of the last message, for `echo`; "" if it is not text."""
        last = self._fields.messages[-1].get("content")
        return last if isinstance(last, str) else ""


def _check(fields: ChatFields) -> None:
    """Raise HttpError for fields that are out of range, or that this server does not support."""
    top = fields.top_logprobs
    checked(400, "top_logprobs", top, top is None or 0 <= top <= MAX_TOP_LOGPROBS, "an integer in [0, 20]")
    checked(400, "top_logprobs", top, not top or bool(fields.logprobs), "logprobs = true with top_logprobs")
    if fields.chat_template is not None:
        raise HttpError(400, "a request may not bring a chat template; leave it out", param="chat_template")
    if fields.functions and fields.function_call != "none":
        raise HttpError(400, "functions are an old form of tools; send tools", param="functions")
    if fields.audio is not None or fields.modalities not in (None, ["text"]):
        raise HttpError(400, "this model makes text only; leave audio and modalities out", param="modalities")


def _tool_use(fields: ChatFields, serving: Serving) -> ToolUse:
    """Return the calls that the message may have; none with tool_choice "none". Raises HttpError."""
    several, has_grammar = fields.parallel_tool_calls is not False, fields.structured_outputs is not None
    use = tool_use(read_tools(fields.tools or ()), fields.tool_choice, several=several, has_grammar=has_grammar)
    serving.check_tools(use)
    return use


def _chat_options(fields: ChatFields, use: ToolUse) -> ChatOptions:
    continues = bool(fields.continue_final_message)
    begins = fields.add_generation_prompt
    variables: dict[str, Any] = {}
    if fields.reasoning_effort is not None:
        variables["reasoning_effort"] = fields.reasoning_effort
    variables |= fields.chat_template_kwargs or {}
    return ChatOptions(
        not continues if begins is None else begins, continues, fields.tools if use.functions else None, variables
    )
