"""The vectors for one HTTP request: one engine request for each prompt, their metrics, their encodings."""

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from ingot.runtime.params.pooling_params import PoolingParams
from ingot.runtime.params.prompt import Prompt
from ingot.serve.engine.messages import Vector, VectorKind
from ingot.serve.engine.vector_answer import VectorAnswer
from ingot.serve.engine.vector_values import vector_values
from ingot.serve.http.errors import HttpError, check_priority, checked
from ingot.serve.http.metrics import EngineMetrics
from ingot.serve.http.pooling_fields import EncodingFields
from ingot.serve.http.serving import Serving

Receive = Callable[[], Awaitable[Any]]  # ASGI's `receive`
# Vectors that are written as JSON before other requests run: 16 of 4096 numbers take some 5 ms.
_VECTORS_AT_ONCE = 16


class PoolingUsage(msgspec.Struct):
    """OpenAI's count of tokens, for requests that generate none."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


def usage_of(*prompts: Prompt) -> PoolingUsage:
    """Return the number of tokens of prompts."""
    total = sum(len(prompt.token_ids) for prompt in prompts)
    return PoolingUsage(total, total)


def vector_kind(serving: Serving, *, classes: bool | None = None) -> VectorKind:
    """Return what the model's vectors are.

    classes   True if the route needs a model of classes, False if it needs an embedding model, None if it takes both

    Raises HttpError 400 if the model makes none or others, and 503 if no engine has started yet.
    """
    kind = serving.llm.engine.vectors
    if kind is None:
        if serving.llm.engine.state != "ready":
            raise HttpError(503, "the engine is not ready", code="engine_unavailable")
        message = "this model generates tokens and makes no vectors"
        raise HttpError(400, f"{message}; expected: a model whose entry 'main' ends in pooling", code="model_task")
    if classes is not None and kind.classes != classes:
        has = "the logits of classes" if kind.classes else "embedding vectors"
        needed = "class scores" if classes else "embedding vectors"
        other = "/classify" if kind.classes else "/v1/embeddings"
        raise HttpError(
            400, f"this model returns {has}, and no {needed}; expected: requests to {other}", code="model_task"
        )
    return kind


async def compute_vectors(
    serving: Serving, prompts: Sequence[Prompt], params: PoolingParams, priority: int | None, receive: Receive
) -> list[Vector]:
    """Return the vector of each prompt. If the client leaves, abort the requests.

    Raises RequestError, QueueFullError or EngineDeadError if the engine does not serve one of them. Raises HttpError
    500 if a vector is not finite, and 400 for a priority that is too large. All others are aborted then."""
    if serving.draining:
        raise HttpError(503, "the server is shutting down", code="shutting_down")
    rank = priority or 0
    check_priority(rank)
    serving.llm.engine.check_room(len(prompts))  # all or none, so that a full queue costs no work
    begin, answers = time.monotonic(), list[VectorAnswer]()
    reason = "abort"
    try:
        for prompt in prompts:
            answers.append(serving.llm.submit_pooling(prompt, params, priority=rank))
        async with _closed_if_left(answers, receive):
            vectors = [await _finite(answer) for answer in answers]
        reason = "stop"
        return vectors
    except BaseException:
        reason = "error" if any(answer.failed for answer in answers) else "abort"
        raise
    finally:
        seconds = time.monotonic() - begin
        for prompt, answer in zip(prompts, answers, strict=False):  # an error may have kept the last from being sent
            answer.close()
            _count(serving.metrics.of_engine(answer.engine), prompt, reason, seconds)


@contextlib.asynccontextmanager
async def _closed_if_left(answers: Sequence[VectorAnswer], receive: Receive) -> AsyncIterator[None]:
    """Close the answers if the client leaves inside the block."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for answer in answers:
            answer.close()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


async def _finite(answer: VectorAnswer) -> Vector:
    vector = await answer.vector()
    if vector is None:
        raise HttpError(400, "the client left while it waited for the answer")
    if vector.finish_reason == "error":
        raise HttpError(500, f"the request failed: {vector.stop_reason}", code="generation_failed")
    return vector


def _count(metrics: EngineMetrics, prompt: Prompt, reason: str, seconds: float) -> None:
    """Count the end of an engine request."""
    metrics.finished[reason].inc()
    metrics.whole.observe(seconds)
    metrics.prompt_lengths.observe(len(prompt.token_ids))
    if reason == "stop":
        metrics.prompt_tokens.inc(len(prompt.token_ids))


def check_encoding(fields: EncodingFields) -> None:
    """Raise HttpError unless a request wants vectors as a list of numbers, or as float32 in base64."""
    name = fields.encoding_format
    checked(400, "encoding_format", name, name in ("float", "base64"), '"float" or "base64"')
    checked(400, "embed_dtype", fields.embed_dtype, fields.embed_dtype == "float32", '"float32"')
    checked(400, "endianness", fields.endianness, fields.endianness in ("native", "little"), '"native" or "little"')


async def encode_vectors(vectors: Sequence[Vector], encoding_format: str) -> list[msgspec.Raw]:
    """Return the JSON of each vector: its numbers, or with "base64" the text of its bytes in float32, little-endian.

    Other requests run in between, because the numbers of a large request take a large part of a second."""
    encode = msgspec.json.Encoder().encode
    made: list[msgspec.Raw] = []
    for vector in vectors:
        if encoding_format == "base64":
            content: Any = base64.b64encode(vector.values).decode("ascii")
        else:
            content = vector_values(vector)
        made.append(msgspec.Raw(encode(content)))
        if len(made) % _VECTORS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return made
