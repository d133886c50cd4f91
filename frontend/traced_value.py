"""The values that a definition computes with during tracing: tensors of the program without data, and symbolic
sizes."""

import sys
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import fx

from ingot.ir.errors import ConfigError
from ingot.ir.program import tensor_type
from ingot.ir.types import TensorType


class Recorder(Protocol):
    """The interface of the tracer for traced values. They pass it each operation, and it adds a call to the program."""

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Add a call of `target` to the program. Return its result: a `Value`, or a tuple of values."""

    def refusal(self, what: str, *, expected: str = "", hint: str = "") -> ConfigError:
        """Return the error for a problem in the model's code, at the line that is running.

        `what` is the problem, `expected` the right use, and `hint` says what to do.
        """


def refused_operation(recorder: Recorder, name: str) -> ConfigError:
    """Return the error for a model definition that calls an operation which programs cannot contain.

    `name` is the operation, such as "Tensor.softmax".
    """
    return recorder.refusal(
        f"the definition calls {name}, and a traced program has no such call",
        expected="ops of ingot.ir.ops, +, *, view, permute and slices",
        hint="docs/reference.md lists the ops, docs/add-an-op.md says how to add one",
    )


def ended_trace(name: str) -> ConfigError:
    """Return the error for a traced value that is used after its trace has ended.

    `name` is the operation that gets the value.
    """
    return ConfigError(
        f"{name} gets a value of a trace that has ended",
        expected="values from the same run of the definition",
        hint="do not keep values in the module between calls",
    )


def _refused(name: str) -> Callable[..., NoReturn]:
    """Return a method for `Value` that always raises ConfigError: programs have no such operation.

    `name` is the operation, such as "==".
    """

    def method(self: "Value", *_: Any) -> NoReturn:
        raise refused_operation(self.recorder, name)

    return method


def _needs_data(name: str) -> Callable[..., NoReturn]:
    """Return a method for `Value` that always raises ConfigError: a traced value has no data to read.

    `name` is the operation that would read it, such as "len()".
    """

    def method(self: "Value", *_: Any) -> NoReturn:
        raise self.recorder.refusal(
            f"the definition reads a value's data, by {name}, but values have no data during tracing",
            expected="code that depends on the model's spec, and not on data",
            hint="write an op for work that depends on data: docs/add-an-op.md",
        )

    return method


def _needs_size(does: str) -> Callable[..., Any]:
    """Return a method for `TracedSize` that always raises ConfigError: a symbolic size has no number.

    `does` is a verb for the message, such as "compares".
    """

    def method(self: "TracedSize", *_: Any) -> Any:
        raise undecided(self, does)

    return method


def undecided(size: "TracedSize", does: str) -> ConfigError:
    """Return the error for a model definition that uses a symbolic size, such as T, as a number.

    `does` is a verb for the message, such as "compares".
    """
    return size.recorder.refusal(
        f"the definition {does} the size {size}, which differs from step to step",
        expected="code that is the same for every size",
        hint="write -1 for it in a view; a size that the model fixes belongs in its spec",
    )


class TracedSize:
    """A symbolic size of a traced value, such as T.

    It has no number, so code cannot compute with it or branch on it.
    """

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self.recorder = name, recorder

    def __repr__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, TracedSize) and other.name == self.name
        return same or _needs_size("compares")(self)

    __lt__ = __le__ = __gt__ = __ge__ = _needs_size("compares")
    __bool__ = __int__ = __index__ = __float__ = _needs_size("needs the number of")
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _needs_size("computes with")
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _needs_size("computes with")
    __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = _needs_size("computes with")


class Value:
    """A traced tensor. It has a dtype and a shape, but no data.

    It supports `+`, `*`, `view`, `permute` and slices. Any other tensor operation raises ConfigError, and the error
    names the operation and the source line.
    """

    def __init__(self, node: fx.Node, recorder: Recorder) -> None:
        self.node, self.recorder = node, recorder

    def __repr__(self) -> str:
        return f"%{self.node.name}: {self.type}"

    @property
    def type(self) -> TensorType:
        return tensor_type(self.node)

    @property
    def dtype(self) -> torch.dtype:
        return self.type.dtype

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    @property
    def shape(self) -> tuple[int | TracedSize, ...]:
        return tuple(TracedSize(size, self.recorder) if isinstance(size, str) else size for size in self.type.shape)

    @property
    def ndim(self) -> int:
        return len(self.type.shape)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def add(self, other: Any, **options: Any) -> Any:
        return self.recorder.call(torch.ops.aten.add.Tensor, (self, other), options)

    def mul(self, other: Any) -> Any:
        return self.recorder.call(torch.ops.aten.mul.Tensor, (self, other))

    def __add__(self, other: Any) -> Any:
        return self.add(other)

    def __mul__(self, other: Any) -> Any:
        return self.mul(other)

    __radd__, __rmul__ = __add__, __mul__

    def view(self, *shape: Any) -> Any:
        return self.recorder.call(torch.ops.aten.view.default, (self, _listed(shape)))

    def permute(self, *dims: Any) -> Any:
        return self.recorder.call(torch.ops.aten.permute.default, (self, _listed(dims)))

    def __getitem__(self, index: Any) -> Any:
        """Return a slice of the value. Each sliced axis becomes one call in the program.

        Raises ConfigError for an integer index, which would drop an axis, and for None, which would add one.
        """
        result = self
        for axis, part in enumerate(_by_axis(index, self.ndim)):
            if not isinstance(part, slice):
                raise refused_operation(self.recorder, f"x[{part!r}]")
            if part != slice(None):
                begin, end = (0 if part.start is None else part.start, sys.maxsize if part.stop is None else part.stop)
                step = () if part.step is None else (part.step,)
                result = self.recorder.call(torch.ops.aten.slice.Tensor, (result, axis, begin, end, *step))
        return result

    def __getattr__(self, name: str) -> NoReturn:
        if not hasattr(torch.Tensor, name):
            raise AttributeError(f"a traced value has no attribute '{name}'")
        raise refused_operation(self.recorder, f"Tensor.{name}")

    __hash__ = object.__hash__
    __bool__, __int__, __float__, __index__ = (_needs_data(f"{name}()") for name in ("bool", "int", "float", "int"))
    __len__, __iter__, __contains__ = (_needs_data(name) for name in ("len()", "iteration", "in"))
    __eq__, __ne__ = _refused("=="), _refused("!=")
    __lt__, __le__, __gt__, __ge__ = (_refused(name) for name in ("<", "<=", ">", ">="))
    __sub__ = __rsub__ = _refused("-")
    __truediv__ = __rtruediv__ = _refused("/")
    __floordiv__ = __rfloordiv__ = _refused("//")
    __mod__ = __rmod__ = _refused("%")
    __pow__ = __rpow__ = _refused("**")
    __matmul__ = __rmatmul__ = _refused("@")
    __and__ = __rand__ = _refused("&")
    __or__ = __ror__ = _refused("|")
    __neg__, __invert__, __abs__ = _refused("-x"), _refused("~x"), _refused("abs()")
    # In-place operations would change other names of the same tensor, but values of a program never change.
    __iadd__, __isub__, __imul__, __itruediv__ = (_refused(name) for name in ("+=", "-=", "*=", "/="))
    __setitem__ = _refused("x[…] =")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise ConfigError: the value's trace has ended. During a trace, the `Tracer` handles the call instead."""
        raise ended_trace(str(getattr(func, "__name__", func)))


# The operations that a traced program can contain, by the names of torch functions and tensor methods.
METHODS: dict[str, Callable[..., Any]] = {
    name: getattr(Value, name)
    for name in ("add", "__add__", "__radd__", "mul", "__mul__", "__rmul__", "view", "permute", "__getitem__")
}


def _listed(given: tuple[Any, ...]) -> list[Any]:
    """Return the sizes or dims given to a method such as `view` as a list.

    `view(2, 3)` and `view((2, 3))` both have [2, 3].
    """
    return list(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else list(given)


def _by_axis(index: Any, axes: int) -> list[Any]:
    """Return the index of `x[index]` as a list of items, one for each indexed axis from the first on.

    `axes` is the number of axes of x. An ellipsis becomes full slices.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    place = next((place for place, part in enumerate(parts) if part is Ellipsis), None)
    if place is not None:
        parts[place : place + 1] = [slice(None)] * (axes - len(parts) + 1)
    return parts
