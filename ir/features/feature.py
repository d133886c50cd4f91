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
    """A state that a feature, such as penalties, adds to a program: a tensor with one row per running sequence.

    It stays on the device between steps. `dtype` and `shape` describe one row. A size in `shape` is a number, "vocab",
    "edit_words" (the words of a request's logit edits), or the name of an option of the program's ending, such as
    "drafted". If `like` names a value of the program, a row is instead like a row of that value.
    """

    name: str
    dtype: torch.dtype = torch.int32
    shape: tuple[Size, ...] = ()
    like: str = ""


@dataclass(frozen=True)
class OpCall:
    """A call that a feature (such as penalties) or an ending (such as "sample") adds to a program.

    op       the name of the op
    results  the names of its results; "" for an unused one
    given    for some parameters of the op: the name of the value to pass

    Any other parameter takes the value with the parameter's name. A value is a step input, a state, an output of the
    model, or a result of an earlier call. Keyword-only constants take the ending's options of their names. A result
    with the name of a state is the next version of the state. A result with the name of an earlier value replaces that
    value.
    """

    op: str
    results: tuple[str, ...]
    given: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Feature:
    """An ability that is added to a program around the model's computation, such as penalties or drafts.

    before   calls before the model
    between  calls after the model; they may replace the value `choices`, which tokens are sampled from; it starts as
             the logits
    after    calls at the end, after the calls of the ending (such as sampling)
    inputs   the step inputs that the host fills for it
    rows     the states with a row per running sequence that it needs
    tables   more values that the host keeps per running sequence, besides the values of `inputs`
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

    name   the output's name
    value  the name of the program's value that it returns
    type   the type of this value
    read   whether the host reads it after each step, as integers
    open   whether the size of its last axis comes from the model and not from `type`
    """

    name: str
    value: str
    type: TensorType
    read: bool = False
    open: bool = False

    def fits(self, found: TensorType) -> bool:
        """Return whether a value of type `found` can be this output.

        The types must be equal. If the output is `open`, its last axis may have any size.
        """
        if self.open and len(found.shape) == len(self.type.shape):
            return found == replace(self.type, shape=(*self.type.shape[:-1], found.shape[-1]))
        return found == self.type


@dataclass(frozen=True)
class Ending:
    """The way in which an entry (program of a model) uses the model's outputs, such as sampling tokens from logits.

    It adds calls after the calls of the model.

    needs        the model's outputs that these calls read; other outputs of the model stay outputs of the program
    features     the names of the features that it always has, in the order of their calls before the model
    calls        its own calls, in order
    outputs      the outputs that it adds; they come before the model's outputs
    attributes   its options with their defaults, by name; a model definition may set them
    lengths      a function that returns the most tokens of a sequence in a decode step, from the options
    caches       calls that are repeated for each KV cache, after `calls`; `kv` names the cache in them
    tree         whether a token attends only to its ancestors in a tree of drafts, by the step input `ancestors`
    all_or_none  whether a decode step holds exactly `lengths` tokens of a sequence and keeps all of them or none; they
                 start at a multiple of `lengths`, and if none is kept, the next step runs them again
    misfit       a function that returns why options do not fit together; "" if they fit
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
        """Return the most tokens of one sequence in a decode step, for the options that `use` sets."""
        return self.lengths(self.set_by(use))

    def set_by(self, use: "EndingUse") -> dict[str, Attribute]:
        """Return all options of this ending by name: the values that `use` sets, and defaults for the rest."""
        return {**self.attributes, **dict(use.attributes)}


@dataclass(frozen=True)
class EndingUse:
    """An entry's choice of an ending, such as "sample" or "verify(drafted=3)". An entry is a program of a model.

    name        the ending's name
    attributes  the options that the entry sets, as (name, value)
    features    names of features, such as penalties, that the entry has besides the features of the ending
    """

    name: str = "sample"
    attributes: tuple[tuple[str, Attribute], ...] = ()
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        given = [*(f"{name}={value}" for name, value in self.attributes), *self.features]
        return f"{self.name}({', '.join(given)})" if given else self.name


# The default ending of an entry.
SAMPLED = EndingUse()
