"""The interpreter: runs a program of any stage, call by call, with the reference functions of its ops."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ingot.ir.cache.exact import exact_cache, is_narrow_cache
from ingot.ir.errors import VerifyError
from ingot.ir.mesh import groups, mesh_text, world_size
from ingot.ir.ops import Op, op_of
from ingot.ir.program import Program, RegionCall, target_name
from ingot.ir.types import StateType, TensorType

Watch = Callable[[fx.Node, Any], None]


def interpret(
    program: Program,
    values: Mapping[str, torch.Tensor],
    *,
    exact: bool = False,
    rowwise: bool = False,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Run a program with the reference functions of its ops, and return its outputs by name.

    `values` holds all inputs, params and states by name; none is modified. `exact` computes in float64, and then casts
    between floating-point types do nothing. KV caches of eight bits then hold float64 too. With `rowwise`, a token's
    result does not depend on the other tokens in the step. `watch` is called with each node and its result.

    Raises VerifyError if a value is missing or does not fit its declared type. Also raises it for a program on a mesh.
    """
    if program.mesh:
        raise VerifyError(
            f"program {program.name} is on the mesh {mesh_text(program.mesh)}",
            expected="one device; for a mesh, call interpret_ranks with the values of every rank",
        )
    return interpret_ranks(program, [values], exact=exact, rowwise=rowwise, watch=watch)[0]


def interpret_ranks(
    program: Program,
    values: Sequence[Mapping[str, torch.Tensor]],
    *,
    exact: bool = False,
    rowwise: bool = False,
    watch: Watch | None = None,
) -> list[dict[str, Any]]:
    """Run a program on all ranks of its mesh, and return the outputs by name, for each rank in order.

    `values` holds the inputs, params and states of each rank by name. All ranks compute one call before the next call
    starts, so that collectives see the values of all ranks. `exact` computes in float64. With `rowwise`, a token's
    result does not depend on the other tokens in the step. `watch` is called with each node and its result, for each
    rank.
    """
    if len(values) != world_size(program.mesh):
        raise VerifyError(
            f"values of {len(values)} ranks", where=f"program {program.name}", expected=str(world_size(program.mesh))
        )
    envs = [_placed(program, given, exact) for given in values]
    for node in program.calls():
        calls = [_arguments(node, env, exact) for env in envs]
        op = op_of(node.target)
        if op is not None and op.across is not None:
            results = _across(op, program, calls)
        elif (body := _body_across(node, program)) is not None:
            inputs = [dict(zip(body.input_types(), args, strict=True)) for args, _ in calls]
            found = interpret_ranks(body, inputs, exact=exact, rowwise=rowwise, watch=watch)
            results = [next(iter(one.values())) if len(one) == 1 else tuple(one.values()) for one in found]
        else:
            results = [_call(node, args, kwargs, program, exact, rowwise, watch) for args, kwargs in calls]
        for env, result in zip(envs, results, strict=True):
            env[node] = result
            if watch is not None:
                watch(node, result)
    return [
        {name: _widened(env[node]) if exact else env[node] for name, node in program.output_nodes().items()}
        for env in envs
    ]


def _arguments(node: fx.Node, env: Mapping[fx.Node, Any], exact: bool) -> tuple[Any, Any]:
    """Return the positional and keyword arguments of a call, with nodes replaced by their values in `env`.

    With `exact`, floating-point values become float64. They are converted at each use, because all params in float64
    take four times the memory of a bfloat16 model.
    """
    get = (lambda source: _widened(env[source])) if exact else env.__getitem__
    return fx.node.map_arg(node.args, get), fx.node.map_arg(node.kwargs, get)


def _widened(value: Any) -> Any:
    """Return a floating-point tensor in float64 with the strides of `value`, and any other value unchanged.

    The body of a region declares strides of its inputs, such as those of a slice. torch keeps only strides without
    gaps.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    wide = value.double()
    if wide.stride() == value.stride() or 0 in value.stride():  # an expanded axis overlaps itself
        return wide
    return torch.empty_strided(value.shape, value.stride(), dtype=wide.dtype, device=wide.device).copy_(wide)


def _placed(program: Program, values: Mapping[str, torch.Tensor], exact: bool) -> dict[fx.Node, Any]:
    """Return one rank's values by placeholder node. `values` holds them by name.

    Raises VerifyError if a value is missing or does not fit its declared type.
    """
    env: dict[fx.Node, Any] = {}
    sizes: dict[str, int] = {}
    for node in program.placeholders():
        name = str(node.target)
        if name not in values:
            raise VerifyError(f"no value for {node.meta['kind']} '{name}'", where=f"program {program.name}")
        value = values[name]
        declared = node.meta["type"]
        if isinstance(declared, StateType):
            declared = program.states[name].type
            if exact and is_narrow_cache(program, node):  # rounding to eight bits is a cast, also to i8
                if value.dtype is declared.dtype:
                    value = exact_cache(value, node)
                declared = replace(declared, dtype=value.dtype)
        _check(value, declared, sizes, name, exact)
        env[node] = value
    return env


def _body_across(node: fx.Node, program: Program) -> Program | None:
    """Return the body of a region, on the program's mesh, if ranks compute a call of it together; None otherwise."""
    if not isinstance(node.target, RegionCall):
        return None
    body = program.regions[node.target.name].body
    if not any((op := op_of(call.target)) is not None and op.across is not None for call in body.calls()):
        return None
    return replace(body, mesh=program.mesh)


def _across(op: Op, program: Program, calls: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Return the result of a collective for each rank. `calls` holds the (args, kwargs) of each rank."""
    assert op.across is not None
    results: list[Any] = [None] * len(calls)
    for group in groups(program.mesh, calls[0][1]["axis"]):
        columns = zip(*(calls[index][0] for index in group), strict=True)
        for index, result in zip(group, op.across(*map(list, columns), **calls[group[0]][1]), strict=True):
            results[index] = result
    return results


def _check(value: torch.Tensor, declared: TensorType, sizes: dict[str, int], name: str, exact: bool) -> None:
    if not isinstance(value, torch.Tensor):
        raise VerifyError(f"'{name}' is a {type(value).__name__}", expected=str(declared))
    for size, found in zip(declared.shape, value.shape, strict=False):
        if isinstance(size, str):
            sizes.setdefault(size, found)
    if exact and value.is_floating_point() and declared.dtype.is_floating_point:
        declared = replace(declared, dtype=value.dtype)
    if problem := declared.mismatch(value, sizes):
        raise VerifyError(f"'{name}' has {problem}")


def _call(
    node: fx.Node,
    args: Any,
    kwargs: Any,
    program: Program,
    exact: bool,
    rowwise: bool,
    watch: Watch | None,
) -> Any:
    if node.target is operator.getitem:
        return args[0][args[1]]
    if isinstance(node.target, RegionCall):
        body = program.regions[node.target.name].body
        inputs = dict(zip(body.input_types(), args, strict=True))
        results = tuple(interpret(body, inputs, exact=exact, rowwise=rowwise, watch=watch).values())
        return results[0] if len(results) == 1 else results
    op = op_of(node.target)
    if exact and isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point:
        kwargs = {**kwargs, "dtype": torch.float64}
    try:
        if op is None:
            assert callable(node.target)
            return node.target(*args, **kwargs)
        return (op.rowwise if rowwise else op.reference)(*args, **kwargs)
    except (RuntimeError, IndexError, TypeError) as error:
        raise VerifyError(
            f"{target_name(node.target)} failed: {error}", where=f"%{node.name}, {node.meta.get('origin', '')}"
        ) from error
