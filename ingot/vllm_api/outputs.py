"""vLLM's outputs of models that pool. Outputs of models that generate are `ingot.RequestOutput`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ingot.ir.errors import RequestError
from ingot.serve.http.class_scores import probabilities

if TYPE_CHECKING:
    import torch

    from ingot.runtime.engines.outputs import EmbeddingOutput as IngotOutput


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of elements of the vector."""
        return len(self.embedding)


@dataclass(frozen=True)
class PoolingOutput:
    """The pooled result of a prompt, as a tensor of float32 on the CPU: its embedding vector, or the
    probabilities of classes."""

    data: "torch.Tensor"


@dataclass(frozen=True)
class ClassificationOutput:
    """The probability of each class for a prompt, or the logits with `use_activation` False."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    """How similar two texts are: the cosine of the angle between their embedding vectors, from -1 to 1."""

    score: float


Output = TypeVar("Output")


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[Output]):
    """The output of a request to a model that pools.

    request_id         the request's id
    outputs            the vector, the probabilities or the score
    prompt_token_ids   the model's input; for a score the tokens of both texts, one after the other
    num_cached_tokens  prompt tokens that were found in the prefix cache
    finished           always True
    """

    request_id: str
    outputs: Output
    prompt_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The embedding vector of one prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The probabilities of classes for one prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The similarity of one pair of texts."""


def vector_of(output: "IngotOutput") -> list[float]:
    """Return the vector of an output of `ingot.LLM.embed`. Raises RequestError if the request ended without one."""
    if not output.embedding:
        raise RequestError(
            f"request {output.request_id} ended without a vector: {output.finish_reason} {output.stop_reason or ''}",
            expected="a prompt whose vector is finite, and that fits into the device's memory",
        )
    return output.embedding


def embedded(output: "IngotOutput") -> EmbeddingRequestOutput:
    """Return an output of `ingot.LLM.embed` in vLLM's form."""
    vector = EmbeddingOutput(vector_of(output))
    return EmbeddingRequestOutput(output.request_id, vector, output.prompt_token_ids, output.num_cached_tokens or 0)


def classified(output: "IngotOutput", *, activate: bool) -> ClassificationRequestOutput:
    """Return an output of `ingot.LLM.embed` in vLLM's form, from a model whose vectors are logits of classes.

    activate   whether to return probabilities: the softmax of the logits, or for a single class the sigmoid
    """
    logits = vector_of(output)
    found = ClassificationOutput(probabilities(logits) if activate else logits)
    return ClassificationRequestOutput(output.request_id, found, output.prompt_token_ids, output.num_cached_tokens or 0)


def tensor_of(
    one: "EmbeddingRequestOutput | ClassificationRequestOutput", numbers: list[float]
) -> PoolingRequestOutput[PoolingOutput]:
    """Return an output with `numbers`, those of `one`, as a tensor."""
    import torch

    data = PoolingOutput(torch.tensor(numbers))
    return PoolingRequestOutput(one.request_id, data, one.prompt_token_ids, one.num_cached_tokens)


def scored(one: "IngotOutput", other: "IngotOutput") -> ScoringRequestOutput:
    """Return the similarity of two prompts, from their outputs of `ingot.LLM.embed`, in vLLM's form."""
    import torch

    pair = torch.tensor([vector_of(one), vector_of(other)], dtype=torch.float64)
    score = torch.nn.functional.cosine_similarity(pair[0], pair[1], dim=0).item()
    cached = (one.num_cached_tokens or 0) + (other.num_cached_tokens or 0)
    tokens = [*one.prompt_token_ids, *other.prompt_token_ids]
    return ScoringRequestOutput(f"{one.request_id}_{other.request_id}", ScoringOutput(score), tokens, cached)
