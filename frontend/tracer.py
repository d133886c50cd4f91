"""The tracer: it runs a module once, on values without data, and records the module's calls as a program."""

from collections.abc import Iterator, Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode, resolve_name

from ingot.frontend.arguments import one_spelling
from ingot.frontend.call_site import find_call_site
from ingot.frontend.traced_value import METHODS, TracedSize, Value, ended_trace, refused_operation, undecided
from ingot.ir import build
from ingot.ir.errors import ConfigError, VerifyError
from ingot.ir.program import ParamSpec, Program, target_name, tensor_type
from ingot.ir.types import TensorType, TupleType
from ingot.ir.verify import RULES

# Tensor attributes and methods that a parameter supports: it has a type and no data.
_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "requires_grad", "is_meta"})
_QUESTIONS = frozenset({"size", "dim", "numel", "element_size", "is_floating_point", "__repr__"})


class Tracer(TorchFunctionMode):
    """Runs a module once on tensors without data, and adds its calls to a program.

    While the module runs, torch passes each call of a torch function, tensor method or op to the tracer. A call with a
    traced value or a parameter is added to the program, and raises ConfigError if programs cannot contain it. Any other
    call runs as usual. `where` names the module in errors.
    """

    def __init__(self, program: Program, module: nn.Module, where: str) -> None:
        super().__init__()
        self._program, self._module, self._where = program, module, where
        self._modules = {id(one): name for name, one in module.named_modules()}
        self._params: dict[int, fx.Node] = {}
        self._legal = RULES[program.stage].ops()
        self._runs = False

    def add_param(self, parameter: nn.Parameter, name: str, spec: ParamSpec) -> None:
        """Add a parameter of the module to the program.

        `name` is its name in the program. `spec` has its type and recipe (how it is made from checkpoint tensors).
        """
        self._params[id(parameter)] = self._program.add_param(name, spec)

    def run(self, inputs: Mapping[str, TensorType]) -> list[fx.Node]:
        """Run the module and record its calls. Return the graph nodes of the tensors that it returns, in order.

        `inputs` maps argument names to types. Raises ConfigError if the module returns anything but tensors.
        """
        given = {name: Value(self._program.add_input(name, one), self) for name, one in inputs.items()}
        self._runs = True
        try:
            with self:
                returned = self._module(**given)
        finally:
            self._runs = False
        results = list(returned) if isinstance(returned, tuple | list) else [returned]
        for result in results:
            if not self._is_traced(result):
                raise ConfigError(
                    f"the module returns {_named(result)}",
                    where=self._where,
                    expected="a tensor that it computed, or a tuple of them",
                )
        return [self._argument(result) for result in results]

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Add a call of `target` to the program. Return its result: a `Value`, or a tuple of values.

        Raises ConfigError for a call that programs cannot contain.
        """
        if not self._runs:
            raise ended_trace(target_name(target))
        if target_name(target) not in self._legal:
            raise refused_operation(self, target_name(target))
        ordered, named = one_spelling(target, args, kwargs or {})
        ordered = [self._argument(one) for one in ordered]
        named = {name: self._argument(one) for name, one in named.items()}
        if target is torch.ops.aten.slice.Tensor:
            self._check_slice(*ordered)
        origin = find_call_site(self._modules, Tracer.run.__code__).origin
        try:
            node = build.call(self._program, target, ordered, named, origin=origin)
        except VerifyError as error:
            raise self.refusal(error.what, expected=error.expected or str(target._schema), hint=error.hint) from error
        if not isinstance(node.meta["type"], TupleType):
            return Value(node, self)
        items = range(len(node.meta["type"].items))
        return tuple(Value(build.call(self._program, getitem, (node, i), origin=origin), self) for i in items)

    def refusal(self, what: str, *, expected: str = "", hint: str = "") -> ConfigError:
        """Return the error for a problem in the model's code, at the line that is running.

        `what` is the problem, `expected` the right use, and `hint` says what to do.
        """
        at = find_call_site(self._modules, Tracer.run.__code__).at
        return ConfigError(what, where=self._where + f", {at}" * bool(at), expected=expected, hint=hint)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(map(self._is_traced, _leaves([args, kwargs]))):
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverloadPacket) and func.overloads() == ["default"]:
            func = func.default
        if isinstance(func, torch._ops.OpOverload):
            return self.call(func, args, kwargs)
        name = func.__name__
        if name == "__get__":  # a parameter's attribute; attributes of values do not come here
            name = func.__self__.__name__
            if name in _ATTRIBUTES:
                return func(*args)
        elif name in METHODS and args and isinstance(args[0], Value | torch.Tensor):
            return METHODS[name](Value(self._argument(args[0]), self), *args[1:], **kwargs)
        elif name in _QUESTIONS and args and isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs)
        raise refused_operation(self, resolve_name(func) or name)

    def _is_traced(self, value: Any) -> bool:
        return isinstance(value, Value) or id(value) in self._params

    def _argument(self, value: Any) -> Any:
        """Return an argument of a call as it appears in the `fx` graph: a node, a constant, or a list of them.

        Raises ConfigError for any other object.
        """
        if isinstance(value, Value) and value.recorder is self:
            return value.node
        if isinstance(value, torch.Tensor) and id(value) in self._params:
            return self._params[id(value)]
        if isinstance(value, list | tuple):
            return [self._argument(one) for one in value]
        if value is None or isinstance(value, bool | int | float | str | torch.dtype):
            return value
        if isinstance(value, TracedSize):
            raise undecided(value, "passes to a call")
        raise self.refusal(
            f"a call gets {_named(value)}",
            expected="values of this run, parameters of the module, numbers, strings and dtypes",
            hint="a table or a constant tensor is a parameter with a recipe",
        )

    def _check_slice(self, source: fx.Node, axis: int = 0, *_: Any) -> None:
        """Raise ConfigError if a slice cuts an axis of symbolic size, such as T. That size differs from step to step.

        `source` is the sliced value.
        """
        shape = tensor_type(source).shape
        if -len(shape) <= axis < len(shape) and isinstance(shape[axis], str):
            raise self.refusal(
                f"the definition slices an axis of {shape[axis]}, which differs from step to step",
                expected="slices of axes whose size the model fixes",
                hint="use ops.select_rows to select rows of a step",
            )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _named(value: Any) -> str:
    """Return a text that describes a Python value in an error, such as an argument that cannot be traced."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} that is neither computed from inputs nor a parameter of the module"
    return f"{value!r}, a {type(value).__name__}"
