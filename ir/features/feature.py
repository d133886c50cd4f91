"""The classes by which features and endings are declared: step inputs, states, and calls added to a program."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from ingot.ir.features.step_input import RowTable, StepInput
from ingot.ir.types import Size, TensorType

# The values of sizes that a `RowState` names, such as "vocab"; the pass insert-ending knows them.
Sizes = Mapping[str, int]
# The value of an attribute of an ending.
Attribute = int | str


@dataclass(frozen=True)
class RowState:
    """A state that a feature adds to a program: a tensor on the device with a row per running sequence.

    `dtype` and `shape` are those of one row. A size in `shape` may be "vocab" or the name of a numeric attribute of the
    entry's ending. If `like` names a value of the program, `dtype` and `shape` are not used: a row is then like a row
    of that value.
    """

    name: str
    dtype: torch.dtype = torch.int32
    shape: tuple[Size, ...] = ()
    like: str = ""


@dataclass(frozen=True)
class OpCall:
    """A call of the op `op` that a feature or ending adds to a program.

    Each parameter of the op takes the value of the same name: a step input, a state, an output of the entry, or a
    result of an earlier call. `given` maps a parameter to a value with another name. An attribute of the op takes the
    ending's attribute of the same name. `results` names the call's results, "" for an unused one. A result with the
    name of a state is the state's next version; one with the name of an earlier value replaces that value.
    """

    op: str
    results: tuple[str, ...]
    given: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Feature:
    """An ability that is added to a program around the model's computation, such as penalties or drafts.

    The program then computes the calls `before`, the model, the calls `between`, the calls of the ending (such as
    sampling), and the calls `after`.

    inputs   the step inputs that the host fills for it
    rows     the states that it needs, with a row per running sequence
    between  these calls may replace the value `choices`, from which tokens are sampled; at first it is the logits
    tables   values that the host keeps per running sequence, in addition to those of `inputs`
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
    """An output that an ending (such as "sample") adds to a program.

    The output `name` is the program's value `value`, and has the type `type`. `read`: the host reads it after every
    step, as integers. `open`: the model determines the size of its last axis, whatever `type` says.
    """

    name: str
    value: str
    type: TensorType
    read: bool = False
    open: bool = False

    def fits(self, found: TensorType) -> bool:
        """Return whether a value of the type `found` can be this output.

        The types must be equal; if the output is `open`, the last axis may have any size.
        """
        if self.open and len(found.shape) == len(self.type.shape):
            return found == replace(self.type, shape=(*self.type.shape[:-1], found.shape[-1]))
        return found == self.type


@dataclass(frozen=True)
class Ending:
    """The way in which an entry (program of a model) uses the model's outputs, such as sampling tokens from logits.

    It adds calls after those of the model.

    needs        the model's outputs that these calls read; further ones stay outputs of the program
    features     the names of the features that it always has, in the order of their calls before the model
    calls        the ending's own calls, in order
    outputs      the outputs that it adds; they come before those of the model
    attributes   its options, numbers and names: the default of each, which a model definition may change
    lengths      returns, from the attributes, the most tokens of one sequence in a decode step
    caches       calls to repeat for each KV cache, after `calls`; their argument and result `kv` is the cache
    tree         a token of the step attends only to its ancestors in a tree of drafts, by the step input `ancestors`
    all_or_none  a decode step holds exactly `lengths` tokens of a sequence, from a multiple of `lengths` on, and
                 commits all of them or none; if none, the next step runs them again
    misfit       returns why attributes do not fit together; "" if they do
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
        """Return the most tokens of one sequence in a decode step, for the attributes that `use` sets."""
        return self.lengths(self.set_by(use))

    def set_by(self, use: "EndingUse") -> dict[str, Attribute]:
        """Return all attributes of the ending by name: the values that `use` sets, and the defaults of the others."""
        return {**self.attributes, **dict(use.attributes)}


@dataclass(frozen=True)
class EndingUse:
    """The choice of an ending (such as "sample" or "verify") by an entry, which is a program of a model.

    `name` is the ending's name. `attributes` holds the ending's options that the entry sets, as (name, value).
    `features` names further features of the entry, in addition to those of the ending. `str` is the text form, such as
    "verify(drafted=3)".
    """

    name: str = "sample"
    attributes: tuple[tuple[str, Attribute], ...] = ()
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        given = [*(f"{name}={value}" for name, value in self.attributes), *self.features]
        return f"{self.name}({', '.join(given)})" if given else self.name


# The default ending of an entry.
SAMPLED = EndingUse()
