"""The schema of adapters.json: how a LoRA adapter fills the states of an artifact that was compiled for adapters."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_FROZEN = ConfigDict(frozen=True, extra="forbid")
_Count = Annotated[int, Field(ge=1, lt=1 << 40)]

ADAPTERS_FILE = "adapters.json"
# The entry that computes the steps in which a sequence uses an adapter. Other steps run `main`.
ADAPTED = "adapted"


class Segment(BaseModel):
    """A part of a linear's result that belongs to one checkpoint tensor.

    rows    the number of its rows in the weight
    tensor  the name of the checkpoint tensor
    shape   the shape of this tensor
    recipe  the recipe that makes the part of the weight, as text
    """

    model_config = _FROZEN
    rows: _Count
    tensor: str
    shape: tuple[_Count, ...]
    recipe: str


class AdaptedLinear(BaseModel):
    """A linear that has adapters: the states with its factors, and the parts of its result.

    a  the name of the state [adapters, parts * R, K]
    b  the name of the state [adapters, N, R]
    """

    model_config = _FROZEN
    a: str
    b: str
    segments: tuple[Segment, ...]


class AdapterSites(BaseModel):
    """All linears of an artifact that have adapters."""

    model_config = _FROZEN
    linears: tuple[AdaptedLinear, ...]
