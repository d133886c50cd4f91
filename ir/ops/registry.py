"""Define ops: one function defines an op's results, and serves as fallback, shape function and oracle of tests."""

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
    """The effect of an op's calls besides their results. Passes may merge or remove calls accordingly.

    PURE          none: equal arguments have equal results, bit by bit
    READS_STATE   a call reads a state, such as a KV cache: equal arguments have equal results, bit by bit
    WRITES_STATE  a call returns the next version of a state
    RANDOM        a call draws new random numbers; not so `sample`, because its arguments determine its numbers
    """

    PURE = "pure"
    READS_STATE = "reads state"
    WRITES_STATE = "writes state"
    RANDOM = "random"

    @property
    def joinable(self) -> bool:
        """Return whether a pass may replace two equal calls by one call."""
        return self in (Effect.PURE, Effect.READS_STATE)

    @property
    def droppable(self) -> bool:
        """Return whether a pass may remove a call that nothing uses."""
        return self is not Effect.WRITES_STATE


@dataclass(frozen=True)
class Cost:
    """The least cost of a call: its floating-point operations, and the bytes that it reads and writes."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Sample:
    """The arguments of one call of an op, for tests."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


Samples = Callable[[torch.Generator, torch.dtype], list[Sample]]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Op:
    """One op that programs may call.

    - `schema`: its signature in torch's schema language.
    - `reference`: the function that defines the results.
    - `placement`: its placement rule: how arguments and results are distributed over a mesh axis.
    - `flops`: operations per element of the results (0 if data only moves), or a function of the arguments.
    - `traffic`: a function that takes a call's arguments and returns, by parameter, the bytes that the call reads or
      writes of arguments of which it needs only a part, such as the rows of a table. A call reads all other arguments
      whole, but none of the states that it writes. `flops` and `traffic` use only the shapes of tensors.
    - `multiplies`: whether the op is a matmul with weights.
    - `fake`: the shape function. It returns results of the right shape for meta tensors.
    - `rowwise`: computes the results so that a token's bits do not depend on the other tokens of the step.
    - `rows`: the parameters whose rows `rowwise` passes one by one.
    - `samples`: returns sample calls for tests.
    - `states`: the parameters that are states that the op writes.
    - `in_place`: updates these states in place and returns only the other results. Lowered programs call it.
    - `costliest`: allocates the most memory that a call can need, without reading data. The memory planner measures it.
    - `decompose`: computes a fused op by calls of the ops that it fuses. None for other ops.
    - `fusible`: whether a compiler may compile the op together with other ops.
    - `legal`: the stages that allow the op: "any", "pure" (before there are caches), "cached" (after that), or "open"
      (until the pass insert-collectives).
    - `effect`: whether passes may merge or remove calls.
    - `across`: for a collective, computes the results of all ranks. It takes and returns lists with a tensor per rank.
    - `on_device`: whether a CUDA graph can capture the op's functions: they use only tensors, and copy nothing from the
      host.
    - `needs_kernel`: whether a GPU needs a kernel for the op, because the reference loops over sequences or was never
      measured there. On a GPU the reference replaces a missing kernel only on request.

    No result shares memory with an argument or another result.
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
        """Return the torch op that is the target of graph nodes."""
        overload = getattr(torch.ops.ingot, self.name).default
        assert isinstance(overload, torch._ops.OpOverload)
        return overload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(*args, **kwargs)

    @cached_property
    def parameters(self) -> Parameters:
        """Return the op's parameters: names, defaults, and how many may be passed by position."""
        return Parameters.of(self.reference)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by parameter name, with defaults filled in.

        Raises TypeError if the arguments do not fit the parameters.
        """
        return self.parameters.bind(args, kwargs)

    def changed(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[str, Any], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's (args, kwargs) with each argument replaced by `change(parameter name, argument)`."""
        names = self.parameters.names
        return (
            tuple(change(names[place], value) for place, value in enumerate(args)),
            {name: change(name, value) for name, value in kwargs.items()},
        )

    def cost(self, *args: Any, **kwargs: Any) -> Cost:
        """Return the flops and bytes of a call with these arguments. Tensors may be meta tensors.

        Assumes that no request uses penalties, log-probabilities or the like.
        """
        with torch.device("meta"):
            result = self.fake(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
        return self.count(args, kwargs, [result] if isinstance(result, torch.Tensor) else list(result))

    def count(self, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[torch.Tensor]) -> Cost:
        """Return the flops and bytes of a call, from the shapes of its arguments and results.

        `results` ends with the new versions of the states that the call writes.
        """
        written = results[: len(results) - len(self.states)]
        if isinstance(self.flops, int):
            flops = self.flops * sum(tensor.numel() for tensor in written)
        else:
            flops = self.flops(*args, **kwargs)
        return Cost(int(flops), sum(self.moved(args, kwargs).values()) + bytes_of(*written))

    def moved(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
        """Return the bytes that a call reads of each argument, or writes of a state, by parameter name."""
        bound = self.bind(args, kwargs)
        whole = {name: 0 if name in self.states else bytes_of(value) for name, value in bound.items()}
        parts = self.traffic(*args, **kwargs) if self.traffic else {}
        return whole | {name: int(part) for name, part in parts.items()}


OPS: dict[str, Op] = {}


def bytes_of(*values: Any) -> int:
    """Return the bytes of all tensors in `values`. Other values count as 0."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))


def rows_bytes(indices: torch.Tensor, table: torch.Tensor) -> int:
    """Return the bytes that a lookup reads of a table: a row for each index."""
    return indices.numel() * bytes_of(table[:1])


def _each_row(reference: Function, rows: tuple[str, ...]) -> Function:
    """Return a function that computes an op one row at a time, so that a row's bits do not depend on other rows.

    It calls `reference` with one row of each parameter in `rows`, and concatenates the results.
    """
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
    """Return a function's signature in torch's schema language, such as "f(Tensor x, *, int n=1) -> Tensor".

    Raises InternalError if an annotation is missing or has no torch type.
    """
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
    """Return a decorator that makes an op from its reference function, which defines the op's results.

    The op gets the function's name, and its schema comes from the annotations. Constants are keyword-only parameters.
    `Op` explains the arguments of `define`. Each op must set `samples`, `placement` and `flops`. The placement
    `ingot.ir.placements.whole` means that every rank has all arguments and results whole.

    `rows` names the parameters whose first axis has independent rows. An op without `rows` must give bits that do not
    depend on the batch, or must set `rowwise`. `fake` defaults to the reference. `costliest` defaults to `in_place`, or
    else the reference. A default must run on meta tensors.

    An op with `states` returns their new versions as its last results, in that order. An op that only reads a state
    must say so in `effect`. Raises InternalError if the name is taken.
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
    """Return the Ingot op that a graph node with this target calls; None if it calls something else."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "ingot":
        return OPS.get(target._schema.name.partition("::")[2])
    return None


def own_row(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Return a copy [1, …] of row `index` of a tensor, so that its memory address does not depend on the index.

    Math libraries choose kernels by alignment. A row's bits would otherwise depend on its place in the batch. Seen with
    MKL 2024.2 on an AMD EPYC: one-row matmuls differ between addresses 4 and 16 bytes apart.
    """
    return tensor[index : index + 1].clone(memory_format=torch.contiguous_format)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to the dtype in which references compute: float64 stays float64, all else becomes float32."""
    return tensor.to(_wide_dtype(tensor))


def wide_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor in the dtype in which references compute: float64 for float64, else float32."""
    return tensor.to(_wide_dtype(tensor), copy=True)


def _wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
