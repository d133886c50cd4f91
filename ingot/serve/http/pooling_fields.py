"""The fields of requests for vectors: the inputs, and how to encode the answer."""

from typing import Any

import msgspec
from starlette.requests import Request

from ingot.ir.errors import RequestError
from ingot.runtime.chat.template import ChatOptions
from ingot.runtime.params.pooling_params import PoolingParams
from ingot.runtime.params.prompt import Prompt, PromptLike
from ingot.serve.engine.messages import VectorKind
from ingot.serve.http.answers import cache_salt
from ingot.serve.http.errors import HttpError, checked, http_error
from ingot.serve.http.serving import Serving

MAX_INPUTS = 2048  # OpenAI's limit on the inputs of a request for embeddings


class PoolingFields(msgspec.Struct, kw_only=True):
    """Fields of all routes that return vectors or scores. None means that the client left the field out.

    `user` has no effect. The others are vLLM's. `use_activation` is whether embedding vectors are normalized, and
    whether logits of classes become probabilities; `normalize` is its older name.
    """

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @property
    def activates(self) -> bool | None:
        """Return `use_activation`, or `normalize` in its place. Raises HttpError if they differ."""
        both = self.use_activation is not None and self.normalize is not None
        same = self.use_activation == self.normalize
        checked(400, "normalize", self.normalize, not both or same, "the value of use_activation, or none")
        return self.normalize if self.use_activation is None else self.use_activation


class InputFields(PoolingFields, kw_only=True):
    """Fields of the routes that take inputs. `input` is a text, a list of token ids, or a list of either. In its place,
    `messages` has a conversation for the chat template."""

    input: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    # Refused: a client may not send a template.
    chat_template: str | None = None


class EncodingFields(InputFields, kw_only=True):
    """Fields that say how to write a vector. `dimensions` is how many of its first elements to return."""

    encoding_format: str = "float"
    dimensions: int | None = None
    embed_dtype: str = "float32"
    endianness: str = "native"


async def read_inputs(request: Request, serving: Serving, fields: InputFields) -> list[Prompt]:
    """Return the inputs of a request as token ids. Raises HttpError."""
    checked(400, "chat_template", fields.chat_template, fields.chat_template is None, "none; the server has it")
    if (fields.input is None) == (fields.messages is None):
        raise HttpError(400, "expected: either input or messages", param="input")
    if fields.messages is not None:
        both = fields.add_generation_prompt and fields.continue_final_message
        checked(400, "add_generation_prompt", True, not both, "false with continue_final_message")
        options = ChatOptions(
            fields.add_generation_prompt, fields.continue_final_message, None, fields.chat_template_kwargs
        )
        return _finished([await serving.llm.render(fields.messages, options)], request, serving, fields)
    assert fields.input is not None
    given = _listed(fields.input)
    plain = fields.add_special_tokens is False
    return await read_texts(request, serving, fields, given, "input", plain=plain)


async def read_texts(
    request: Request, serving: Serving, fields: PoolingFields, given: list[Any], field: str, *, plain: bool = False
) -> list[Prompt]:
    """Return texts or lists of token ids as prompts, cut if the request says so.

    field   the field of the request that has them, for errors
    plain   encode texts without the tokens that the tokenizer adds

    Raises HttpError."""
    checked(400, field, f"a list of {len(given)}", len(given) <= MAX_INPUTS, f"at most {MAX_INPUTS} inputs")
    tokenizer = serving.llm.model.tokenizer
    prompts: list[PromptLike] = given
    try:
        if plain and tokenizer is not None:
            prompts = [Prompt(one, tokenizer.encode_plain(one)) if isinstance(one, str) else one for one in given]
        read = await serving.llm.read_prompts(prompts)
    except RequestError as error:
        answer = http_error(error)
        answer.param = field
        raise answer from None
    return _finished(read, request, serving, fields)


def _finished(prompts: list[Prompt], request: Request, serving: Serving, fields: PoolingFields) -> list[Prompt]:
    """Return prompts cut to `truncate_prompt_tokens`, with the salt of the request. Raises HttpError for one that is
    too long."""
    limit, most = serving.llm.model.max_seq_len, fields.truncate_prompt_tokens
    checked(400, "truncate_prompt_tokens", most, most is None or (most >= -1 and most != 0), "an integer >= 1, or -1")
    side = fields.truncation_side
    checked(400, "truncation_side", side, side in (None, "left", "right"), '"left" or "right"')
    if most is not None:
        kept = limit if most == -1 else most
        prompts = [_cut(prompt, kept, keeps_begin=side == "right") for prompt in prompts]
    for prompt in prompts:
        if len(prompt.token_ids) > limit:
            what = f"This model's maximum context length is {limit} tokens; an input has {len(prompt.token_ids)}."
            hint = "Shorten it, or send truncate_prompt_tokens."
            raise HttpError(400, f"{what} {hint}", param="input", code="context_length_exceeded")
    salt = cache_salt(request, fields)
    return serving.llm.model.read_prompts([Prompt(prompt.text, prompt.token_ids, salt) for prompt in prompts])


def _cut(prompt: Prompt, most: int, *, keeps_begin: bool) -> Prompt:
    """Return a prompt with at most `most` tokens: its first ones, or else its last ones."""
    if len(prompt.token_ids) <= most:
        return prompt
    return Prompt(None, prompt.token_ids[:most] if keeps_begin else prompt.token_ids[-most:])


def pooling_params(fields: PoolingFields, kind: VectorKind, dimensions: int | None = None) -> PoolingParams:
    """Return the pooling parameters of a request for the model's `kind` of vectors: the default ones for logits of
    classes. Raises RequestError or HttpError for bad ones."""
    if not kind.classes:
        most = kind.width
        good = dimensions is None or 1 <= dimensions <= most
        checked(400, "dimensions", dimensions, good, f"an integer in [1, {most}], the size of the model's vectors")
        return PoolingParams(dimensions, fields.activates)
    checked(400, "dimensions", dimensions, dimensions is None, "none, for the scores of classes")
    return PoolingParams()


def _listed(given: str | list[Any]) -> list[Any]:
    """Return the inputs of a request as a list of texts and lists of token ids. Raises HttpError."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise HttpError(400, "input is an empty list; expected: at least one input", param="input")
    if all(type(one) is int for one in given):
        return [given]
    if not all(isinstance(one, str | list) for one in given):
        raise HttpError(400, "input is a mixed list; expected: a text, token ids, or a list of these", param="input")
    return given
