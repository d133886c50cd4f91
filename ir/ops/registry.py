"""Define ops, each by one function, which serves as reference, fallback, shape function and test oracle."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ingot.ir.errors import InternalError
from ingot.ir.ops.parameters import Parameters
from ingot.ir.placements import Rule

# torch.library.Library, because calls of a `custom_op` import dynamo and inductor.
_LIBRARY = torch.library.Library("ingot", "DEF")


class Effect(enum.Enum):
    """The inputs and effects of a call other than its arguments and results. Passes rely on it.

    PURE: equal arguments give equal bits. READS_STATE: the same, with a version of a state among the arguments.
    WRITES_STATE: the call makes the next version of a state. RANDOM: each call draws new numbers. (`sample` is pure:
    its arguments key its draws.)
    """

    PURE = "pure"
    READS_STATE = "reads state"
    WRITES_STATE = "writes state"
    RANDOM = "random"

    @property
    def joinable(self) -> bool:
        """Return whether one call may replace two equal ones."""
        return self in (Effect.PURE, Effect.READS_STATE)

    @property
    def droppable(self) -> bool:
        """Return whether a call without users may be removed."""
        return self is not Effect.WRITES_STATE


@dataclass(frozen=True)
class Cost:
    """The least cost of a call: floating-point operations, and bytes, each read or written once."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Sample:
    """The arguments of one call, for tests of backends."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


Samples = Callable[[torch.Generator, torch.dtype], list[Sample]]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Op:
    """One op of the dialect.

    - `reference`: defines the results.
    - `placement`: the rule for a mesh axis, from the placements of arguments to those of results.
    - `flops`: operations per element of the results (0 for pure data movement), or a function of the arguments.
    - `traffic`: a function that returns the bytes; by default those of all arguments and results but written states.
      `flops` and `traffic` look at shapes only.
    - `multiplies`: the call multiplies rows by its weights.
    - `fake`: returns results of the right shape for meta tensors.
    - `rowwise`: computes the same with each token independent of the others in the step (bitwise batch-invariant), one
      row of the parameters `rows` at a time.
    - `states`: the parameters that are states. `in_place` updates them and returns only the other results; lowered
      programs call it.
    - `costliest`: allocates the most that a call (in place, if it has states) can allocate, without reading data.
      Memory is planned by it.
    - `decompose`: rebuilds a fused op from simpler ones.
    - `fusible`: a region compiler may put the op into a region.
    - `legal`: "any" stage, "pure" before states exist, "cached" once they do, or "open" only until insert-collectives.
    - `effect`: whether passes may join or remove calls.
    - `across`: computes a collective for all ranks of its axis, from one list per tensor argument to a list of results.
    - `on_device`: the forms that run use tensors alone and copy nothing from the host, so a CUDA graph can
      capture them.
    - `needs_kernel`: the reference loops over sequences. On a GPU it replaces a missing kernel only on request.

    Every result has its own memory.
    """

    name: str
    schema: str
    reference: Function
    placement: Rule
    fake: Function
    rowwise: Function
    rows: tuple[str, ...]
    samples: Samples
    flops: int | Function
    multiplies: bool
    traffic: Function | None
    states: tuple[str, ...]
    in_place: Function | None
    costliest: Function
    decompose: Function | None
    fusible: bool
    legal: str
    effect: Effect
    across: Function | None
    on_device: bool
    needs_kernel: bool

    @property
    def overload(self) -> torch._ops.OpOverload:
        """Return the target of calls in a graph."""
        overload = getattr(torch.ops.ingot, self.name).default
        assert isinstance(overload, torch._ops.OpOverload)
        return overload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(*args, **kwargs)

    @cached_property
    def parameters(self) -> Parameters:
        """Return the parameters of the reference."""
        return Parameters.of(self.reference)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by parameter, defaults filled in. Raises TypeError for a call that does not fit."""
        return self.parameters.bind(args, kwargs)

    def changed(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[str, Any], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call, each replaced by `change(name, value)`."""
        names = self.parameters.names
        return (
            tuple(change(names[place], value) for place, value in enumerate(args)),
            {name: change(name, value) for name, value in kwargs.items()},
        )

    def cost(self, *args: Any, **kwargs: Any) -> Cost:
        """Return the cost of a call with these tensors, which may be meta tensors. Assumes requests without extra
        features."""
        with torch.device("meta"):
            result = self.fake(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
        return self.count(args, kwargs, [result] if isinstance(result, torch.Tensor) else list(result))

    def count(self, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[torch.Tensor]) -> Cost:
        """Return the cost of a call from its arguments and results, or tensors like them. Computes nothing."""
        written = results[: len(results) - len(self.states)]
        read = [value for name, value in self.bind(args, kwargs).items() if name not in self.states]
        if isinstance(self.flops, int):
            flops = self.flops * sum(tensor.numel() for tensor in written)
        else:
            flops = self.flops(*args, **kwargs)
        traffic = self.traffic(*args, **kwargs) if self.traffic else bytes_of(*read, *written)
        return Cost(int(flops), int(traffic))


OPS: dict[str, Op] = {}


def bytes_of(*values: Any) -> int:
    """Return the bytes of the tensors among the values."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))


def lookup_traffic(indices: torch.Tensor, table: torch.Tensor, **_: object) -> int:
    """Return the bytes of a table lookup: the indices, and the selected rows read and written."""
    return bytes_of(indices) + 2 * indices.numel() * bytes_of(table[:1])


def _each_row(reference: Function, rows: tuple[str, ...]) -> Function:
    """Return `reference` applied to one row at a time of the parameters `rows`."""
    parameters = Parameters.of(reference)

    def rowwise(*args: Any, **kwargs: Any) -> Any:
        named = parameters.bind(args, kwargs)
        by_row = {name: named[name] for name in rows if named[name] is not None}
        results = [
            reference(**{**named, **{name: own_row(value, i) for name, value in by_row.items()}})
            for i in range(named[rows[0]].shape[0])
        ]
        if results and isinstance(results[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
        return torch.cat(results)

    return rowwise


def _schema_of(reference: Function) -> str:
    """Return a function's signature in torch's schema language, "f(Tensor x, *, int n=1) -> Tensor"."""
    try:
        inferred: str = torch.library.infer_schema(reference, mutates_args=(), op_name=reference.__name__)
    except ValueError as error:
        raise InternalError(
            f"the signature of op '{reference.__name__}' does not declare its argument and result types",
            where=str(error).partition("\n")[0],
            expected="annotations that torch.library.infer_schema reads",
        ) from None
    return inferred.replace("SymInt", "int")  # calls hold no torch symbols: an attribute is a number


def define(
    *,
    samples: Samples,
    placement: Rule,
    flops: int | Function,
    rows: tuple[str, ...] = (),
    rowwise: Function | None = None,
    fake: Function | None = None,
    multiplies: bool = False,
    traffic: Function | None = None,
    states: tuple[str, ...] = (),
    in_place: Function | None = None,
    costliest: Function | None = None,
    decompose: Function | None = None,
    fusible: bool = True,
    legal: str = "any",
    effect: Effect = Effect.PURE,
    across: Function | None = None,
    on_device: bool = False,
    needs_kernel: bool = False,
) -> Callable[[Function], Op]:
    """Define an op from its reference, whose name and annotations give the op's name and schema. Attributes are
    keyword-only.

    Every op must set `samples` (how tests call it), `placement` (`ingot.ir.placements.whole` if every rank takes and
    returns whole values) and `flops`. `rows` names the parameters with independent rows along their first axis. An op
    without `rows` must not depend on the batch, or must set `rowwise`.

    `fake` defaults to the reference, `costliest` to the form that runs; the default must then run on meta tensors.
    State results come last, in the order of `states`. An op with `states` writes state; one that only reads a state
    declares it in `effect`. Raises InternalError if the name is defined already.
    """

    def register(reference: Function) -> Op:
        name, schema = reference.__name__, _schema_of(reference)
        if name in OPS:
            raise InternalError(f"op '{name}' is defined twice", where=schema)
        if states and effect is not Effect.PURE:
            raise InternalError(f"op '{name}' writes state and is declared '{effect.value}'", where=schema)
        if effect is Effect.WRITES_STATE:
            raise InternalError(f"op '{name}' writes state but names none", where=schema, expected="states=…")
        op = Op(
            name=name,
            schema=schema,
            reference=reference,
            placement=placement,
            fake=fake or reference,
            rowwise=rowwise or (_each_row(reference, rows) if rows else reference),
            rows=rows,
            samples=samples,
            flops=flops,
            multiplies=multiplies,
            traffic=traffic,
            states=states,
            in_place=in_place,
            # A rank allocates only its own result of a collective.
            costliest=costliest or in_place or (fake if across and fake else reference),
            decompose=decompose,
            fusible=fusible,
            legal="cached" if states else legal,
            effect=Effect.WRITES_STATE if states else effect,
            across=across,
            on_device=on_device,
            needs_kernel=needs_kernel,
        )
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        _LIBRARY.impl(name, op.fake, "Meta")
        OPS[name] = op
        return op

    return register


def op_of(target: Any) -> Op | None:
    """Return the op of a graph node's target; None if it is not one of Ingot's."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "ingot":
        return OPS.get(target._schema.name.partition("::")[2])
    return None


def own_row(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Return a copy of row `index` of a tensor, [1, …].

    Math libraries choose kernels by alignment, so the address of a row in its batch would change its bits (seen with
    MKL 2024.2 on an AMD EPYC: one-row matmuls differ between addresses 4 and 16 bytes apart).
    """
    return tensor[index : index + 1].clone(memory_format=torch.contiguous_format)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the dtype that references compute in: float64 for float64, else float32."""
    return tensor.to(_wide_dtype(tensor))


def wide_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor as `wide` returns it."""
    return tensor.to(_wide_dtype(tensor), copy=True)


def _wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
