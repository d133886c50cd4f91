"""How an op is defined: once, by a function that is its meaning, fallback, shape function and test oracle."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ingot.ir.errors import InternalError
from ingot.ir.ops.parameters import Parameters
from ingot.ir.placements import Rule

# Ops go through torch.library.Library: unlike `custom_op` it imports neither dynamo nor inductor when one is called.
_LIBRARY = torch.library.Library("ingot", "DEF")


class Effect(enum.Enum):
    """What a call depends on or does beside its arguments and results: an op's contract with passes.

    PURE: equal arguments give equal bits. READS_STATE: so they do, a version of a state being an argument like any
    other. WRITES_STATE: the call makes the next version of a state. RANDOM: each call draws anew. (`sample` is pure:
    its draws are keyed by arguments.)
    """

    PURE = "pure"
    READS_STATE = "reads state"
    WRITES_STATE = "writes state"
    RANDOM = "random"

    @property
    def joinable(self) -> bool:
        """One call may stand for two equal ones."""
        return self in (Effect.PURE, Effect.READS_STATE)

    @property
    def droppable(self) -> bool:
        """The call may go when nothing uses its results."""
        return self is not Effect.WRITES_STATE


@dataclass(frozen=True)
class Cost:
    """What a call must do at least: floating-point operations, and bytes read or written once each."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Sample:
    """Arguments of one call, for tests of backends."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


Samples = Callable[[torch.Generator, torch.dtype], list[Sample]]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Op:
    """One op of the dialect.

    `reference` is its meaning. `placement` is its rule on an axis of a mesh: how its arguments must lie, and how its
    results then do. `flops` are the operations of a call: so many for each element of its results (0 where it only
    moves data), or a function of its arguments. `traffic` gives its bytes, by default those of all arguments and
    results but written states. Both look at shapes alone. `multiplies`: a call multiplies rows by its weights.

    `fake` gives results of the right shape for meta tensors. `rowwise` computes the same with each token's arithmetic
    independent of the other tokens in the step (bitwise batch-invariant), a row of the parameters `rows` at a time.
    `states` names the parameters that are state values; `in_place` is the lowered form that updates them instead of
    returning them, and returns the remaining results. `costliest` allocates what a call that runs (in place, if it has
    states) allocates at most, and looks at no data: memory is planned by it. `decompose` rebuilds a fused op from
    simpler ones. Every result has memory of its own. `fusible` says that a region compiler may take it into a region.
    `legal` says where it may stand: "any" stage, "pure" ones without states, "cached" ones with them, or only where
    placements are "open". `across` computes a collective for all ranks of its axis at once: from a list for each tensor
    argument to a list of results. `effect` says when two calls may become one, and when one may go. `on_device`: the
    forms that run compute with tensors alone and copy nothing from the host, so that a captured graph can hold a call
    of them. `needs_kernel`: its reference goes from one sequence to the next, and on a GPU stands in for a missing
    kernel only where references were asked for.
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
        """What stands in a graph as the target of a call."""
        overload = getattr(torch.ops.ingot, self.name).default
        assert isinstance(overload, torch._ops.OpOverload)
        return overload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(*args, **kwargs)

    @cached_property
    def parameters(self) -> Parameters:
        """Those of the reference."""
        return Parameters.of(self.reference)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by parameter, defaults filled in. Raises TypeError for a call that does not fit."""
        return self.parameters.bind(args, kwargs)

    def changed(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[str, Any], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, each as `change(name, value)` gives it."""
        names = self.parameters.names
        return (
            tuple(change(names[place], value) for place, value in enumerate(args)),
            {name: change(name, value) for name, value in kwargs.items()},
        )

    def cost(self, *args: Any, **kwargs: Any) -> Cost:
        """Cost of a call with these tensors; meta tensors will do. Of requests that ask for nothing but tokens."""
        with torch.device("meta"):
            result = self.fake(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
        return self.count(args, kwargs, [result] if isinstance(result, torch.Tensor) else list(result))

    def count(self, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[torch.Tensor]) -> Cost:
        """`cost` where the results are known too, or tensors like them. Computes nothing."""
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
    """Bytes of those of the values that are tensors."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))


def lookup_traffic(indices: torch.Tensor, table: torch.Tensor, **_: object) -> int:
    """Bytes of taking rows of a table: those rows are read, and written."""
    return bytes_of(indices) + 2 * indices.numel() * bytes_of(table[:1])


def _each_row(reference: Function, rows: tuple[str, ...]) -> Function:
    """`reference` applied to one row at a time of the parameters named in `rows`."""
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
    """The signature of a function in torch's schema language, "f(Tensor x, *, int n=1) -> Tensor"."""
    try:
        inferred: str = torch.library.infer_schema(reference, mutates_args=(), op_name=reference.__name__)
    except ValueError as error:
        raise InternalError(
            f"the signature of op '{reference.__name__}' says not what it takes and gives",
            where=str(error).partition("\n")[0],
            expected="annotations that torch.library.infer_schema reads",
        ) from None
    return inferred.replace("SymInt", "int")  # torch's symbols stand in no call: an attribute is a number


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
    """Define an op from its reference implementation, which gives its name and, by its annotations, its schema;
    attributes are keyword-only.

    What has no default is said of every op: how tests call it, how it lies on a mesh (`ingot.ir.placements.whole` where
    every rank takes and gives whole values), and what it costs. `rows` names the parameters whose leading axis counts
    independent rows; an op without any is independent of the batch by nature (or gives its own `rowwise`).
    `fake` defaults to the reference, which then must run on meta tensors, and `costliest` to the form that runs, which
    must too. A state result comes last, in the order of `states`; an op with any writes state, and one that only reads
    a state must say so by its `effect`. Defining a name twice is an error.
    """

    def register(reference: Function) -> Op:
        name, schema = reference.__name__, _schema_of(reference)
        if name in OPS:
            raise InternalError(f"op '{name}' is defined twice", where=schema)
        if states and effect is not Effect.PURE:
            raise InternalError(f"op '{name}' writes state and is declared '{effect.value}'", where=schema)
        if effect is Effect.WRITES_STATE:
            raise InternalError(f"op '{name}' writes state and does not say which", where=schema, expected="states=…")
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
            # Of what ranks do together, one rank allocates its result.
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
    """The op that a graph node's target calls; None when it is not one of ours."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "ingot":
        return OPS.get(target._schema.name.partition("::")[2])
    return None


def own_row(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Row `index` of a tensor, [1, …], in memory of its own.

    Math libraries choose kernels by alignment: where a row lies in its batch would show in its bits (seen with
    MKL 2024.2 on an AMD EPYC, whose products of one row differ between addresses 4 and 16 bytes apart).
    """
    return tensor[index : index + 1].clone(memory_format=torch.contiguous_format)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the precision that references compute in: float32, or float64 where it is given."""
    return tensor.to(_wide_dtype(tensor))


def wide_copy(tensor: torch.Tensor) -> torch.Tensor:
    """`wide`, always in memory of its own."""
    return tensor.to(_wide_dtype(tensor), copy=True)


def _wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
