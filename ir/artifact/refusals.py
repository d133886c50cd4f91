"""The refusals of a pass in an artifact's files. Most nodes share their reasons, so each reason is written once."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ingot.ir.artifact.record import Refusal


class RefusalTable(BaseModel):
    """Refusals in order, as passes.json and choices.json hold them.

    reasons  all reasons, each once
    nodes    a node, and the indices of its reasons in `reasons`; a node has several rows if others are between them
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    reasons: tuple[str, ...] = ()
    nodes: tuple[tuple[str, tuple[Annotated[int, Field(ge=0)], ...]], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(index >= len(self.reasons) for _, indices in self.nodes for index in indices):
            raise ValueError("a node has a reason that is not in the table")
        return self

    def refusals(self) -> tuple[Refusal, ...]:
        return tuple(Refusal(node, self.reasons[index]) for node, indices in self.nodes for index in indices)
