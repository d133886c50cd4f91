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

    `dtype` and `shape` are those of a row. A size in `shape` may be a name: "vocab", or an attribute of the ending. If
    `like` names a value of the program, a row has the dtype and shape of a row of that value instead.
    """

    name: str
    dtype: torch.dtype = torch.int32
    shape: tuple[Size, ...] = ()
    like: str = ""


@dataclass(frozen=True)
class OpCall:
    """A call of the op `op` that a feature or ending adds to a program.

    The op's parameters are values of the program with the same names: step inputs, states, outputs of the entry, or
    results of earlier calls. `given` maps a parameter to a value with another name. The op's attributes are the
    attributes of the ending with the same names. `results` names the call's results, "" for an unused one. A result
    with the name of a state is the state's next version; one with the name of an earlier value replaces it.
    """

    op: str
    results: tuple[str, ...]
    given: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Feature:
    """An ability that is added to a program around the model's computation, such as penalties or drafts.

    inputs   the step inputs that the host fills for it
    rows     the states with a row per running sequence that it needs
    before   calls before the model's own
    between  calls between the model's own and the ending's; the value `choices`, at first the logits, is what tokens
             are sampled from
    after    calls after the ending's
    tables   values that the host keeps per device row, in addition to those of `inputs`
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
    """An output that an ending adds to a program: the output `name` is the program's value named `value`, of `type`.

    `read`: the host reads it after every step, as integers. `open`: the size of its last axis comes from the model, not
    from `type`.
    """

    name: str
    value: str
    type: TensorType
    read: bool = False
    open: bool = False

    def fits(self, found: TensorType) -> bool:
        """Return whether a value of the type `found` can be this output."""
        if self.open and len(found.shape) == len(self.type.shape):
            return found == replace(self.type, shape=(*self.type.shape[:-1], found.shape[-1]))
        return found == self.type


@dataclass(frozen=True)
class Ending:
    """The use of a model's outputs, such as sampling tokens from logits: calls after the model's own.

    needs        the model's outputs that it reads; the model may have others, which stay outputs of the program
    features     the names of its features, in the order of their calls before the model's own
    calls        the ending's own calls, in order
    outputs      the outputs that it adds, before the model's own
    attributes   numbers and names that a definition may set, by name, with their defaults
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
        """Return the most tokens of one sequence in a decode step, with the attributes that an entry sets in `use`."""
        return self.lengths(self.set_by(use))

    def set_by(self, use: "EndingUse") -> dict[str, Attribute]:
        """Return the attributes by name: those that an entry sets in `use`, and the defaults of the others."""
        return {**self.attributes, **dict(use.attributes)}


@dataclass(frozen=True)
class EndingUse:
    """The ending that an entry (program of a model) uses, by name.

    `attributes` are those that the entry sets, as (name, value). `features` names further features of the entry, in
    addition to those of the ending. `str` is its text, such as "verify(drafted=3)".
    """

    name: str = "sample"
    attributes: tuple[tuple[str, Attribute], ...] = ()
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        given = [*(f"{name}={value}" for name, value in self.attributes), *self.features]
        return f"{self.name}({', '.join(given)})" if given else self.name


# The default ending of an entry.
SAMPLED = EndingUse()
