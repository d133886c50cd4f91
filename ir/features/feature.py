"""What a feature is: step inputs, rows of state, and the calls that it puts into a program; and what an ending is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from ingot.ir.features.step_input import RowTable, StepInput
from ingot.ir.types import Size, TensorType

# Sizes that a row of state may have beside numbers: known when the ending is put into a program.
Sizes = Mapping[str, int]
# What an attribute of an ending holds.
Attribute = int | str


@dataclass(frozen=True)
class RowState:
    """A state with a row for each running sequence: `dtype` and `shape` are those of a row. A size may be named:
    "vocab", or an attribute of the ending. `like`: dtype and shape are those of a row of this value of the program."""

    name: str
    dtype: torch.dtype = torch.int32
    shape: tuple[Size, ...] = ()
    like: str = ""


@dataclass(frozen=True)
class OpCall:
    """A call by name. The op's parameters are found among the values of the program by their own names: step inputs,
    rows of state, outputs of the entry, results of earlier calls; `given` names another value for some. Attributes are
    found among those of the ending. `results` name what the call gives, "" for what nothing takes; one with the name of
    a state is the next version of it, and one with the name of an earlier value takes its place.
    """

    op: str
    results: tuple[str, ...]
    given: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Feature:
    """What a step can do beside the model's own work.

    `before` are calls before the model's own; `between` those between the model's and the ending's, where the value
    `choices` is what tokens are taken from, the logits at first; `after` those after the ending's. `tables` is what the
    host keeps by device row beside what inputs ask.
    """

    name: str
    inputs: tuple[StepInput, ...] = ()
    rows: tuple[RowState, ...] = ()
    before: tuple[OpCall, ...] = ()
    between: tuple[OpCall, ...] = ()
    after: tuple[OpCall, ...] = ()
    tables: tuple[RowTable, ...] = ()


@dataclass(frozen=True)
class Output:
    """The output `name` of an ending: the value `value`, of `type`. `read`: the host reads it after every step, as
    integers. `open`: its last size is the model's own, whatever `type` says.
    """

    name: str
    value: str
    type: TensorType
    read: bool = False
    open: bool = False

    def fits(self, found: TensorType) -> bool:
        """Whether a value of this type is the output."""
        if self.open and len(found.shape) == len(self.type.shape):
            return found == replace(self.type, shape=(*self.type.shape[:-1], found.shape[-1]))
        return found == self.type


@dataclass(frozen=True)
class Ending:
    """What becomes of the outputs of an entry: the second segment of its plan.

    needs        outputs that the entry must have, besides those that only pass through
    features     by name, in the order of their calls before the model's own
    calls        in order, after the model's own
    outputs      what the entry gives before its own outputs
    attributes   numbers and names of the ending, with their defaults: a definition may set them
    lengths      tokens of one sequence that a decode step feeds at most, from the attributes
    caches       for each paged cache, after the others: `kv` is its state, and the next version of it
    tree         attention sees, of the tokens that a step feeds, the ancestors of each, by the step input `ancestors`
    all_or_none  a decode step feeds just so many, at places whose number they divide, and commits all of them or none:
                 they are then fed again
    misfit       why the attributes do not go together; "" where they do
    """

    name: str
    needs: tuple[str, ...]
    features: tuple[str, ...]
    calls: tuple[OpCall, ...]
    outputs: tuple[Output, ...] = ()
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    lengths: Callable[[Mapping[str, Attribute]], int] = lambda attributes: 1
    caches: tuple[OpCall, ...] = ()
    tree: bool = False
    all_or_none: bool = False
    misfit: Callable[[Mapping[str, Attribute]], str] = lambda attributes: ""

    @property
    def read(self) -> tuple[str, ...]:
        """The outputs that the host reads after every step."""
        return tuple(one.name for one in self.outputs if one.read)

    def fed(self, use: "EndingUse") -> int:
        """Tokens of one sequence that a decode step feeds at most."""
        return self.lengths(self.set_by(use))

    def set_by(self, use: "EndingUse") -> dict[str, Attribute]:
        """The attributes as an entry sets them."""
        return {**self.attributes, **dict(use.attributes)}


@dataclass(frozen=True)
class EndingUse:
    """The ending of an entry: which, with which attributes, and with which features beside its own."""

    name: str = "sample"
    attributes: tuple[tuple[str, Attribute], ...] = ()
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        given = [*(f"{name}={value}" for name, value in self.attributes), *self.features]
        return f"{self.name}({', '.join(given)})" if given else self.name


# What an entry ends in where its definition says nothing.
SAMPLED = EndingUse()
