"""Infer the types of calls from an op's shape function alone.

Each symbol is replaced by a prime that occurs nowhere else in the call. The shape function runs on meta tensors, and
the primes in its result become symbols again. This is exact: the only arithmetic on sizes in a flattened program is the
division of rows over ranks, which has a symbol of its own (`part_of_symbol`).
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from ingot.ir.errors import IngotError, VerifyError
from ingot.ir.ops import op_of
from ingot.ir.ops.stand_ins import STAND_INS
from ingot.ir.program import Program, RegionCall, StateSpec, target_name
from ingot.ir.types import Size, StateType, TensorType, TupleType, ValueType

_SYMBOLS = {prime: name for name, prime in STAND_INS.items()}


def meta_tensor(value_type: TensorType) -> torch.Tensor:
    """Return a meta tensor of this type, for inferring the shapes of results.

    Each symbol in the shape, such as "T", becomes a large prime from `STAND_INS`. `type_of` turns the primes back into
    symbols.
    """
    return sized_meta_tensor(value_type, STAND_INS)


def sized_meta_tensor(value_type: TensorType, sizes: Mapping[str, int]) -> torch.Tensor:
    """Return a meta tensor of this type. `sizes` maps each symbol in the shape, such as "T", to its size."""
    shape = value_type.bind(sizes)
    if value_type.strides is None:
        return torch.empty(shape, dtype=value_type.dtype, device="meta")
    return torch.empty_strided(shape, value_type.strides, dtype=value_type.dtype, device="meta")


def type_of(tensor: torch.Tensor) -> TensorType:
    """Return the type of a tensor. Primes of `STAND_INS` in its shape become symbols such as "T" again.

    Raises VerifyError if a size or stride is a multiple of such a prime. It would mean a size such as 2 * T, and types
    cannot express that.
    """
    shape: list[Size] = [_SYMBOLS.get(int(size), int(size)) for size in tensor.shape]
    strides: tuple[int, ...] | None = None
    if not tensor.is_contiguous():
        strides = tuple(int(stride) for stride in tensor.stride())
        if any(stride % prime == 0 and stride for stride in strides for prime in _SYMBOLS):
            raise VerifyError(f"a stride of {strides} depends on a symbol", expected="symbols on the first axis only")
    for size in tensor.shape:
        if int(size) not in _SYMBOLS and any(int(size) % prime == 0 and size for prime in _SYMBOLS):
            raise VerifyError(f"size {int(size)} is arithmetic on a symbol", expected="a number or a symbol")
    return TensorType(tensor.dtype, tuple(shape), strides)


def infer(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], program: Program) -> ValueType:
    """Return the type of the result of calling `target` with these arguments.

    Arguments are nodes of `program` and constants. Raises VerifyError if the op rejects them.
    """
    if target is operator.getitem:
        return _item_type(args, kwargs)
    if isinstance(target, RegionCall):
        return _region_type(target, args, kwargs, program)
    try:
        frozen = _freeze(list(args), program.states)
        frozen_kwargs = tuple((name, _freeze(value, program.states)) for name, value in kwargs.items())
        results, several = _result_types(target, frozen, frozen_kwargs)
    except IngotError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        types = ", ".join(str(node.meta["type"]) for node in _nodes(args))
        first_line = str(error).strip().partition("\n")[0]
        for name, prime in STAND_INS.items():
            first_line = first_line.replace(str(prime), name)
        raise VerifyError(f"{target_name(target)} cannot take ({types}): {first_line}") from error
    states = _states_written(target, args, kwargs)
    named: tuple[ValueType, ...] = (*results[: len(results) - len(states)], *states)
    return TupleType(named) if several else named[0]


@dataclass(frozen=True)
class _Constant:
    """A constant argument and its Python type, as part of a cache key.

    The type is there because 1, 1.0 and True are equal in Python, but are different arguments.
    """

    kind: type
    value: Any


def _freeze(value: Any, states: Mapping[str, StateSpec]) -> Any:
    """Return a call's argument in hashable form, as part of a cache key.

    A node becomes its tensor type. A list becomes a tuple. A constant becomes a `_Constant`.
    """
    if isinstance(value, fx.Node):
        return _tensor_type_of(value, states)
    if isinstance(value, list | tuple):
        return tuple(_freeze(item, states) for item in value)
    return _Constant(type(value), value)


def _thaw(value: Any) -> Any:
    if isinstance(value, TensorType):
        return meta_tensor(value)
    if isinstance(value, tuple):
        return [_thaw(item) for item in value]
    return value.value


@lru_cache(maxsize=4096)  # the layers of a model repeat a few dozen calls
def _result_types(
    target: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> tuple[tuple[TensorType, ...], bool]:
    """Return the types of the tensors that a call returns, and whether the call returns a tuple.

    `args` and `kwargs` hold what `_freeze` returns for each argument.
    """
    result = target(*_thaw(args), **{name: _thaw(value) for name, value in kwargs})
    several = isinstance(result, tuple | list)
    return tuple(type_of(item) for item in (result if several else (result,))), several


def _item_type(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ValueType:
    if len(args) != 2 or kwargs or not isinstance(args[0], fx.Node) or type(args[1]) is not int:
        raise VerifyError("getitem takes a value and a number")
    whole = args[0].meta["type"]
    if not isinstance(whole, TupleType) or not 0 <= args[1] < len(whole.items):
        raise VerifyError(f"no item {args[1]} in {whole}")
    return whole.items[args[1]]


def _nodes(args: Sequence[Any]) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(list(args), lambda node: found.append(node))
    return found


def _states_written(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[StateType, ...]:
    """Return the types of the states that a call overwrites; empty if it overwrites none.

    The call returns the new versions of these states after its other results.
    """
    op = op_of(target)
    if op is None or not op.states:
        return ()
    named = op.bind(args, dict(kwargs))
    types = tuple(named[name].meta["type"] for name in op.states)
    for name, value_type in zip(op.states, types, strict=True):
        if not isinstance(value_type, StateType):
            raise VerifyError(f"'{name}' of {target_name(target)} is {value_type}", expected="a state")
    if len(set(types)) != len(types):
        raise VerifyError(f"{target_name(target)} is given one state twice: {', '.join(map(str, types))}")
    return types


def _tensor_type_of(node: fx.Node, states: Mapping[str, StateSpec]) -> TensorType:
    value_type = node.meta["type"]
    if isinstance(value_type, StateType):
        if value_type.name not in states:
            raise VerifyError(f"%{node.name} is a version of the unknown state '{value_type.name}'")
        return states[value_type.name].type
    if isinstance(value_type, TupleType):
        raise VerifyError(f"%{node.name} is a tuple; take its items first")
    assert isinstance(value_type, TensorType)
    return value_type


def _region_type(target: RegionCall, args: Sequence[Any], kwargs: Mapping[str, Any], program: Program) -> ValueType:
    region = program.regions.get(target.name)
    if region is None:
        raise VerifyError(f"unknown region '{target.name}'", expected=", ".join(program.regions) or "no region exists")
    if kwargs or not all(isinstance(value, fx.Node) for value in args):
        raise VerifyError(f"region {target.name} is called with constants or names", expected="values in order")
    wanted = list(region.body.input_types().values())
    found = [node.meta["type"] for node in args]
    if wanted != found:
        raise VerifyError(
            f"region {target.name} is called with ({', '.join(map(str, found))})",
            expected=f"({', '.join(map(str, wanted))})",
        )
    results = tuple(node.meta["type"] for node in region.body.output_nodes().values())
    return results[0] if len(results) == 1 else TupleType(results)
