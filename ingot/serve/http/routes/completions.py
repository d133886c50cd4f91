"""`/v1/completions`: continue texts or token ids."""

import time
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ingot.runtime.params.prompt import Prompt
from ingot.serve.engine.messages import Delta
from ingot.serve.http.answers import Usage, answer_id, cache_salt, respond, stream_options, usage_of
from ingot.serve.http.beam_search import request_params
from ingot.serve.http.body import body_schema, read_fields
from ingot.serve.http.errors import HttpError, checked
from ingot.serve.http.event_stream import Answer, event
from ingot.serve.http.generation import Generation
from ingot.serve.http.logprobs import CompletionLogprobs, completion_logprobs, prompt_logprobs
from ingot.serve.http.sampling_fields import MAX_TOP_LOGPROBS, SamplingFields, output_room
from ingot.serve.http.serving import Serving, serving_of

router = APIRouter()
_MAX_TOKENS = 16  # OpenAI's default
_encode = msgspec.json.Encoder().encode


class CompletionFields(SamplingFields, kw_only=True):
    """A request. `prompt` is a text, a list of token ids, or a list of either."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class CompletionChoice(msgspec.Struct, omit_defaults=True):
    """One of the answer's texts, or what is new of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(msgspec.Struct, omit_defaults=True):
    """An answer, or a chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


@router.post("/v1/completions", openapi_extra=body_schema(CompletionFields))
async def create_completion(request: Request) -> Response:
    """Complete each prompt n times; as one answer, or as a stream of events."""
    serving = serving_of(request)
    fields = await read_fields(request, CompletionFields, serving.options)
    answer = await _CompletionAnswer.read(request, serving, fields)
    return await respond(request, answer.generation(serving), answer, stream=fields.stream)


class _CompletionAnswer(Answer):
    """Writes the answer to a checked request: whole, or as events."""

    def __init__(self, request: Request, serving: Serving, fields: CompletionFields, prompts: list[Prompt]) -> None:
        self._fields = fields
        self._id = answer_id("cmpl", request, fields)
        self._model = serving.model_name(fields.model)
        self._created = int(time.time())
        self._prompts = prompts
        self._tokenizer = serving.llm.model.tokenizer
        self._stream = stream_options(fields)
        self._n = fields.n or 1
        self._echo = bool(fields.echo)
        # Only the prompt is wanted: the engine still generates one token, which is dropped.
        self._only_prompt = self._echo and fields.max_tokens == 0
        self._as_ids = bool(fields.return_tokens_as_token_ids)
        # By index of a choice that has begun: the length of the texts of its tokens so far, with log-probabilities.
        self._offsets: dict[int, int] = {}
        self._prompt_entries: dict[int, list[Any]] = {}  # by prompt: its log-probabilities

    @classmethod
    async def read(cls, request: Request, serving: Serving, fields: CompletionFields) -> "_CompletionAnswer":
        """Check the fields and tokenize the prompts. Raises HttpError or RequestError."""
        serving.model_name(fields.model)
        checked(400, "suffix", fields.suffix, not fields.suffix, "no suffix; it is not supported")
        legal = f"an integer in [0, {MAX_TOP_LOGPROBS}]"
        checked(
            400, "logprobs", fields.logprobs, fields.logprobs is None or 0 <= fields.logprobs <= MAX_TOP_LOGPROBS, legal
        )
        prompts = [
            await _read_prompt(serving, one, fields, cache_salt(request, fields)) for one in _listed(fields.prompt)
        ]
        return cls(request, serving, fields, prompts)

    def generation(self, serving: Serving) -> Generation:
        """Send all prompts to the engine. Raises what `Generation` raises, and errors of the sampling fields."""
        fields, model = self._fields, serving.llm.model
        if self._echo and fields.logprobs is not None and fields.prompt_logprobs is None:
            fields.prompt_logprobs = fields.logprobs
        params = []
        for prompt in self._prompts:
            most = fields.max_tokens if not self._only_prompt else 1
            room = output_room(most, _MAX_TOKENS, len(prompt.token_ids), model.max_seq_len, "max_tokens")
            params.append(request_params(fields, model.defaults, max_tokens=room, logprobs=fields.logprobs))
        streams, rank = bool(fields.stream), fields.priority or 0
        self._generation = Generation(serving, self._prompts, params, stream=streams, priority=rank, model=fields.model)
        return self._generation

    async def whole(self) -> Completion:
        """Wait for all sequences, and return the answer."""
        ended: dict[tuple[int, int], Delta] = {}
        async for index, deltas in self._generation:
            for delta in deltas:  # one for each sequence, at its end
                ended[index, delta.index] = delta
        choices = [self._choice(index, delta) for (index, _), delta in sorted(ended.items(), key=lambda one: one[0])]
        return self._completion(choices, self._usage())

    def events(self, index: int, deltas: list[Delta]) -> bytes:
        """Return an event for each delta of the prompt number `index`."""
        usage = self._usage() if self._stream.continuous_usage_stats else None
        return b"".join(event(_encode(self._completion([self._choice(index, one)], usage))) for one in deltas)

    def last_events(self) -> bytes:
        """Return the event with the usage, if it is requested."""
        return event(_encode(self._completion([], self._usage()))) if self._stream.include_usage else b""

    def _usage(self) -> Usage:
        usage = usage_of(self._generation)
        if self._only_prompt:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(self._id, "text_completion", self._created, self._model, choices, usage)

    def _choice(self, index: int, delta: Delta) -> CompletionChoice:
        """Return a delta as a choice; the first of a choice includes the prompt, if it is echoed."""
        number = index * self._n + delta.index
        first, offset = number not in self._offsets, self._offsets.get(number, 0)
        prompt = self._prompts[index]
        text, token_ids, entries = delta.text, delta.token_ids, delta.logprobs
        if self._only_prompt:
            text, token_ids, entries = "", [], None if entries is None else []
        first_texts: list[str] = []
        if first and self._echo:
            text = self._text_of(prompt) + text
            token_ids = prompt.token_ids + token_ids
            scores = self._prompt_entries.setdefault(index, delta.prompt_logprobs or [])
            if entries is not None and self._fields.logprobs is not None:
                first_texts = [self._text_of_token(prompt.token_ids[0])]
                entries = scores + entries
        logprobs = None
        if entries is not None and self._fields.logprobs is not None:
            logprobs, offset = completion_logprobs(entries, token_ids, first_texts, offset=offset, as_ids=self._as_ids)
        self._offsets[number] = offset
        wanted = self._fields.return_token_ids
        scored = self._fields.prompt_logprobs is not None and delta.prompt_logprobs and not self._echo
        return CompletionChoice(
            number,
            text,
            logprobs,
            "length" if self._only_prompt else delta.finish_reason,
            delta.stop_reason,
            prompt_logprobs(delta.prompt_logprobs or ()) if scored else None,
            delta.token_ids if wanted else None,
            prompt.token_ids if wanted and first else None,
        )

    def _text_of(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return "" if self._tokenizer is None else self._tokenizer.decode(prompt.token_ids)

    def _text_of_token(self, token: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode_alone(token, skip_special_tokens=False)


def _listed(prompt: str | list[Any]) -> list[str | list[Any]]:
    """Return the prompts of a request as a list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise HttpError(400, "prompt is an empty list; expected: at least one prompt", param="prompt")
    if set(map(type, prompt)) == {int}:
        return [prompt]
    if not all(isinstance(one, str | list) for one in prompt):
        raise HttpError(400, "prompt is a mixed list; expected: a text, token ids, or a list of these", param="prompt")
    return prompt


async def _read_prompt(serving: Serving, given: str | list[Any], fields: CompletionFields, salt: str | None) -> Prompt:
    """Return one prompt as token ids, cut to its last tokens if the request says so."""
    model = serving.llm.model
    if isinstance(given, str) and fields.add_special_tokens is False and model.tokenizer is not None:
        prompt = Prompt(given, model.tokenizer.encode_plain(given))
    elif isinstance(given, list):
        prompt = Prompt(None, given)  # checked below
    else:
        prompt = await serving.llm.read_prompt(given)
    most = fields.truncate_prompt_tokens
    checked(400, "truncate_prompt_tokens", most, most is None or (most >= -1 and most != 0), "an integer >= 1, or -1")
    if most is not None:
        kept = prompt.token_ids[-(model.max_seq_len - 1 if most == -1 else most) :]
        prompt = Prompt(prompt.text if len(kept) == len(prompt.token_ids) else None, kept)
    (checked_prompt,) = model.read_prompts([Prompt(prompt.text, prompt.token_ids, salt)])
    return checked_prompt
