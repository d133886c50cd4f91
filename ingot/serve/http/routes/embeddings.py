"""`/v1/embeddings` in OpenAI's form, and `/pooling` in vLLM's: the vectors of texts, token ids or a conversation."""

import time

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ingot.serve.http.answers import answer_id, json_response
from ingot.serve.http.body import body_schema, read_fields
from ingot.serve.http.class_scores import as_probabilities
from ingot.serve.http.errors import checked
from ingot.serve.http.pooling_fields import EncodingFields, pooling_params, read_inputs
from ingot.serve.http.serving import serving_of
from ingot.serve.http.vectors import (
    PoolingUsage,
    check_encoding,
    compute_vectors,
    encode_vectors,
    usage_of,
    vector_kind,
)

router = APIRouter()


class EmbeddingFields(EncodingFields, kw_only=True):
    """A request to `/v1/embeddings`."""


class PooledFields(EncodingFields, kw_only=True):
    """A request to `/pooling`. `task` is what the client expects of the model: "embed" or "classify"."""

    task: str | None = None


class Embedding(msgspec.Struct):
    """The vector of one input: the JSON of a list of numbers, or of a text in base64."""

    index: int
    object: str
    embedding: msgspec.Raw


class Embeddings(msgspec.Struct):
    """An answer of `/v1/embeddings`."""

    id: str
    object: str
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class Pooled(msgspec.Struct):
    """The vector of one input in an answer of `/pooling`."""

    index: int
    object: str
    data: msgspec.Raw


class PooledList(msgspec.Struct):
    """An answer of `/pooling`."""

    id: str
    object: str
    created: int
    model: str
    data: list[Pooled]
    usage: PoolingUsage


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingFields))
async def create_embeddings(request: Request) -> Response:
    """Return the embedding vector of each input."""
    serving = serving_of(request)
    fields = await read_fields(request, EmbeddingFields, serving.options)
    name = serving.model_name(fields.model)
    kind = vector_kind(serving, classes=False)
    check_encoding(fields)
    params = pooling_params(fields, kind, fields.dimensions)
    prompts = await read_inputs(request, serving, fields)
    vectors = await compute_vectors(serving, prompts, params, fields.priority, request.receive)
    contents = await encode_vectors(vectors, fields.encoding_format)
    data = [Embedding(index, "embedding", content) for index, content in enumerate(contents)]
    number = answer_id("embd", request, fields)
    return json_response(Embeddings(number, "list", int(time.time()), name, data, usage_of(*prompts)))


@router.post("/pooling", openapi_extra=body_schema(PooledFields))
async def create_pooled(request: Request) -> Response:
    """Return what the model pools for each input: an embedding vector, or the scores of classes."""
    serving = serving_of(request)
    fields = await read_fields(request, PooledFields, serving.options)
    name = serving.model_name(fields.model)
    checked(400, "task", fields.task, fields.task in (None, "embed", "classify"), '"embed" or "classify"')
    kind = vector_kind(serving, classes=None if fields.task is None else fields.task == "classify")
    check_encoding(fields)
    params = pooling_params(fields, kind, fields.dimensions)
    prompts = await read_inputs(request, serving, fields)
    vectors = await compute_vectors(serving, prompts, params, fields.priority, request.receive)
    if kind.classes and fields.activates is not False:
        vectors = [as_probabilities(vector) for vector in vectors]
    contents = await encode_vectors(vectors, fields.encoding_format)
    data = [Pooled(index, "pooling", content) for index, content in enumerate(contents)]
    number = answer_id("pool", request, fields)
    return json_response(PooledList(number, "list", int(time.time()), name, data, usage_of(*prompts)))
