"""`/score` and `/rerank`: how similar texts are, by the cosine of their embedding vectors, in vLLM's form."""

import time
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ingot.runtime.params.pooling_params import PoolingParams
from ingot.runtime.params.prompt import Prompt
from ingot.serve.engine.messages import Vector
from ingot.serve.http.answers import answer_id, json_response
from ingot.serve.http.body import body_schema, read_fields
from ingot.serve.http.errors import HttpError, checked
from ingot.serve.http.pooling_fields import PoolingFields, read_texts
from ingot.serve.http.serving import Serving, serving_of
from ingot.serve.http.vectors import PoolingUsage, compute_vectors, usage_of, vector_kind

router = APIRouter()

# The names that the two sides of a request may have.
_PAIRS = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))


class ScoreFields(PoolingFields, kw_only=True):
    """A request to `/score`: two texts or lists of texts, under one of the pairs of names in `_PAIRS`. One text is
    compared with each of a list; two lists are compared pair by pair."""

    queries: Any = None
    documents: Any = None
    items: Any = None
    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None


class RerankFields(PoolingFields, kw_only=True):
    """A request to `/rerank`. `top_n` is how many documents to return; None or 0: all."""

    query: Any
    documents: Any
    top_n: int | None = None
    return_documents: bool = True


class Score(msgspec.Struct):
    """The similarity of one pair: the cosine of the angle between their vectors, -1 to 1."""

    index: int
    object: str
    score: float


class Scores(msgspec.Struct):
    """An answer of `/score`."""

    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class Document(msgspec.Struct):
    """A document of the request."""

    text: str


class Ranked(msgspec.Struct, omit_defaults=True):
    """A document with its number in the request, and its similarity to the query."""

    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(msgspec.Struct):
    """An answer of `/rerank`: the documents that are most similar to the query, the best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]


@router.post("/score", openapi_extra=body_schema(ScoreFields))
@router.post("/v1/score", openapi_extra=body_schema(ScoreFields))
async def create_scores(request: Request) -> Response:
    """Return the similarity of each pair of texts."""
    serving = serving_of(request)
    fields = await read_fields(request, ScoreFields, serving.options)
    name = serving.model_name(fields.model)
    vector_kind(serving, classes=False)
    first, second = _sides(fields)
    if not (len(first[1]) == len(second[1]) or 1 in (len(first[1]), len(second[1]))):
        counts = f"{len(first[1])} {first[0]} and {len(second[1])} {second[0]}"
        raise HttpError(400, f"{counts}; expected: as many, or one of one of them", param=first[0])
    scores, usage = await _similarities(request, serving, fields, first, second)
    data = [Score(index, "score", score) for index, score in enumerate(scores)]
    return json_response(Scores(answer_id("score", request, fields), "list", int(time.time()), name, data, usage))


@router.post("/rerank", openapi_extra=body_schema(RerankFields))
@router.post("/v1/rerank", openapi_extra=body_schema(RerankFields))
@router.post("/v2/rerank", openapi_extra=body_schema(RerankFields))
async def rerank(request: Request) -> Response:
    """Return the documents in the order of their similarity to the query."""
    serving = serving_of(request)
    fields = await read_fields(request, RerankFields, serving.options)
    name = serving.model_name(fields.model)
    vector_kind(serving, classes=False)
    checked(400, "top_n", fields.top_n, fields.top_n is None or fields.top_n >= 0, "an integer >= 0")
    (query,) = _texts("query", [fields.query])
    documents = _texts("documents", fields.documents)
    scores, usage = await _similarities(request, serving, fields, ("query", [query]), ("documents", documents))
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields.top_n or None]
    results = [
        Ranked(index, scores[index], Document(documents[index]) if fields.return_documents else None) for index in best
    ]
    return json_response(Ranking(answer_id("rerank", request, fields), name, usage, results))


def _sides(fields: ScoreFields) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
    """Return both sides of a request, each as the name of its field and the texts. Raises HttpError."""
    given = [name for name in dict.fromkeys(sum(_PAIRS, ())) if getattr(fields, name) is not None]
    for pair in _PAIRS:
        if sorted(given) == sorted(pair):
            one, other = ((name, _texts(name, getattr(fields, name))) for name in pair)
            return one, other
    pairs = ", or ".join(" and ".join(pair) for pair in _PAIRS)
    raise HttpError(400, f"fields {', '.join(given) or 'without texts'}; expected: {pairs}", param="text_1")


def _texts(field: str, given: Any) -> list[str]:
    """Return the texts of a field: one text, or a list of texts or of objects {"text": …}. Raises HttpError."""
    listed = given if isinstance(given, list) else [given]
    found = [one.get("text") if isinstance(one, dict) and len(one) == 1 else one for one in listed]
    texts = [one for one in found if isinstance(one, str)]
    if not texts or len(texts) != len(found):
        raise HttpError(400, f"{field} = {given!r:.80}; expected: a text, or a list of texts", param=field)
    return texts


async def _similarities(
    request: Request,
    serving: Serving,
    fields: PoolingFields,
    first: tuple[str, list[str]],
    second: tuple[str, list[str]],
) -> tuple[list[float], PoolingUsage]:
    """Return the cosine of each pair, and the number of tokens. A side is the name of its field and its texts; one of
    a single text belongs to all pairs."""
    prompts: list[Prompt] = []
    for name, texts in (first, second):
        prompts += await read_texts(request, serving, fields, list(texts), name)
    params = PoolingParams(normalize=True)
    vectors = await compute_vectors(serving, prompts, params, fields.priority, request.receive)
    count = len(first[1])
    return _cosines(vectors[:count], vectors[count:]), usage_of(*prompts)


def _cosines(first: list[Vector], second: list[Vector]) -> list[float]:
    """Return the dot product of each pair of unit vectors, in float64. One vector is repeated for all of the others."""
    import numpy as np

    left, right = (
        np.stack([np.frombuffer(one.values, "<f4") for one in side]).astype("f8") for side in (first, second)
    )
    dots: list[float] = np.clip((left * right).sum(1), -1.0, 1.0).tolist()
    return dots
