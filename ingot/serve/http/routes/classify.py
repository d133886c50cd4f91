"""`/classify`: the class of each input, in vLLM's form."""

import time

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ingot.serve.engine.messages import Vector
from ingot.serve.engine.vector_values import vector_values
from ingot.serve.http.answers import answer_id, json_response
from ingot.serve.http.body import body_schema, read_fields
from ingot.serve.http.class_scores import probabilities
from ingot.serve.http.pooling_fields import InputFields, pooling_params, read_inputs
from ingot.serve.http.serving import serving_of
from ingot.serve.http.vectors import PoolingUsage, compute_vectors, usage_of, vector_kind

router = APIRouter()


class ClassifyFields(InputFields, kw_only=True):
    """A request."""


class Classification(msgspec.Struct):
    """The scores of one input.

    label   the name of the class with the highest score; None, because artifacts have no names of classes
    probs   the probability of each class, or its logit with `use_activation` false
    """

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Classifications(msgspec.Struct):
    """An answer."""

    id: str
    object: str
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage


@router.post("/classify", openapi_extra=body_schema(ClassifyFields))
async def classify(request: Request) -> Response:
    """Return the probabilities of the model's classes for each input."""
    serving = serving_of(request)
    fields = await read_fields(request, ClassifyFields, serving.options)
    name = serving.model_name(fields.model)
    params = pooling_params(fields, vector_kind(serving, classes=True))
    prompts = await read_inputs(request, serving, fields)
    vectors = await compute_vectors(serving, prompts, params, fields.priority, request.receive)
    activates = fields.activates is not False
    data = [_classification(index, vector, activates=activates) for index, vector in enumerate(vectors)]
    number = answer_id("classify", request, fields)
    return json_response(Classifications(number, "list", int(time.time()), name, data, usage_of(*prompts)))


def _classification(index: int, vector: Vector, *, activates: bool) -> Classification:
    logits = vector_values(vector)
    return Classification(index, None, probabilities(logits) if activates else logits, len(logits))
