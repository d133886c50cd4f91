"""The classes of features (step inputs, rows of state, and calls added to a program) and of endings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from ingot.ir.features.step_input import RowTable, StepInput
from ingot.ir.types import Size, TensorType

# Named sizes of a row of state; insert-ending knows their values.
Sizes = Mapping[str, int]
# The value of an attribute of an ending.
Attribute = int | str


@dataclass(frozen=True)
class RowState:
    """A state with a row per running sequence; `dtype` and `shape` are those of a row. A size may be a name: "vocab",
    or an attribute of the ending. With `like`, dtype and shape are those of a row of this value of the program."""

    name: str
    dtype: torch.dtype = torch.int32
    shape: tuple[Size, ...] = ()
    like: str = ""


@dataclass(frozen=True)
class OpCall:
    """A call by name. The op's parameters are values of the program with the same names: step inputs, rows of state,
    outputs of the entry, results of earlier calls. `given` maps a parameter to another value's name. Attributes are
    those of the ending. `results` names the call's results, "" for an unused one. A result with the name of a state is
    the state's next version; one with the name of an earlier value replaces it.
    """

    op: str
    results: tuple[str, ...]
    given: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Feature:
    """An ability of a step in addition to the model's own computation.

    `before` are calls before the model's own, `between` those between the model's and the ending's, `after` those after
    the ending's. In `between` the value `choices`, at first the logits, is what tokens are sampled from. `tables` are
    the host's tables by device row in addition to those of inputs.
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
    integers. `open`: its last size is the model's own, not that in `type`.
    """

    name: str
    value: str
    type: TensorType
    read: bool = False
    open: bool = False

    def fits(self, found: TensorType) -> bool:
        """Return whether a value of this type can be the output."""
        if self.open and len(found.shape) == len(self.type.shape):
            return found == replace(self.type, shape=(*self.type.shape[:-1], found.shape[-1]))
        return found == self.type


@dataclass(frozen=True)
class Ending:
    """The use of an entry's outputs: the second segment of its plan.

    needs        outputs that the entry must have; it may have others, which pass through
    features     by name, in the order of their calls before the model's own
    calls        in order, after the model's own
    outputs      the outputs of the entry before the model's own
    attributes   numbers and names of the ending, with their defaults; a definition may set them
    lengths      the most tokens of one sequence in a decode step, from the attributes
    caches       calls for each paged cache, after the others: `kv` is its state, and the next version of it
    tree         attention sees, among the step's tokens, the ancestors of each, given by the step input `ancestors`
    all_or_none  a decode step holds exactly `lengths` tokens of a sequence, from a multiple of `lengths` on, and
                 commits all of them or none; if none, the next step runs them again
    misfit       the reason if the attributes do not fit together; "" if they do
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
        """Return the names of the outputs that the host reads after every step."""
        return tuple(one.name for one in self.outputs if one.read)

    def fed(self, use: "EndingUse") -> int:
        """Return the most tokens of one sequence in a decode step."""
        return self.lengths(self.set_by(use))

    def set_by(self, use: "EndingUse") -> dict[str, Attribute]:
        """Return the attributes as an entry sets them."""
        return {**self.attributes, **dict(use.attributes)}


@dataclass(frozen=True)
class EndingUse:
    """The ending of an entry: its name, attributes, and features in addition to its own."""

    name: str = "sample"
    attributes: tuple[tuple[str, Attribute], ...] = ()
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        given = [*(f"{name}={value}" for name, value in self.attributes), *self.features]
        return f"{self.name}({', '.join(given)})" if given else self.name


# The default ending of an entry.
SAMPLED = EndingUse()
