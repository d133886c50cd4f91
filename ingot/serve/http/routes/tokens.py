"""`/tokenize` and `/detokenize`, in vLLM's form."""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ingot.runtime.chat.template import ChatOptions
from ingot.runtime.text.tokenizer import Tokenizer
from ingot.serve.http.answers import json_response
from ingot.serve.http.body import body_schema, read_fields
from ingot.serve.http.errors import HttpError
from ingot.serve.http.serving import Serving, serving_of

router = APIRouter()


class TokenizeFields(msgspec.Struct, kw_only=True):
    """A request: a prompt or messages. The options are those of completions and chats."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """A request: token ids."""

    model: str | None = None
    tokens: list[int]


@router.post("/tokenize", openapi_extra=body_schema(TokenizeFields))
async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt, or of a conversation by the chat template."""
    serving = serving_of(request)
    fields = await read_fields(request, TokenizeFields, serving.options)
    tokenizer = _tokenizer(serving, fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise HttpError(400, "expected: either prompt or messages", param="prompt")
    if fields.messages is not None:
        begins = fields.add_generation_prompt and not fields.continue_final_message
        options = ChatOptions(begins, fields.continue_final_message, None, fields.chat_template_kwargs)
        ids = (await serving.llm.render(fields.messages, options)).token_ids
    elif not fields.prompt:
        ids = []
    elif fields.add_special_tokens:
        ids = (await serving.llm.read_prompt(fields.prompt)).token_ids
    else:
        ids = tokenizer.encode_plain(fields.prompt)
    texts = [tokenizer.backend.id_to_token(token) for token in ids] if fields.return_token_strs else None
    answer = {
        "count": len(ids),
        "max_model_len": serving.llm.model.max_seq_len,
        "tokens": ids,
        "token_strs": texts,
    }
    return json_response(answer)


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeFields))
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, including special tokens."""
    serving = serving_of(request)
    fields = await read_fields(request, DetokenizeFields, serving.options)
    tokenizer = _tokenizer(serving, fields.model)
    vocab_size = serving.llm.model.vocab_size
    for token in fields.tokens:
        if not 0 <= token < vocab_size:
            raise HttpError(
                400, f"token id {token!r:.40} is out of range; expected: 0 to {vocab_size - 1}", param="tokens"
            )
    return json_response({"prompt": tokenizer.decode(fields.tokens, skip_special_tokens=False)})


def _tokenizer(serving: Serving, model: str | None) -> Tokenizer:
    serving.model_name(model)
    if serving.llm.model.tokenizer is None:
        raise HttpError(400, "this model has no tokenizer; send token ids to /v1/completions")
    return serving.llm.model.tokenizer
