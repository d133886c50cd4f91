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
    """How a call of an op uses state and random numbers. Passes join and remove calls by this.

    PURE: equal arguments return equal bits. READS_STATE: as PURE, but an argument is a state, such as a KV cache.
    WRITES_STATE: the call returns the next version of a state. RANDOM: each call draws new random numbers. (`sample` is
    not RANDOM: its arguments determine its draws.)
    """

    PURE = "pure"
    READS_STATE = "reads state"
    WRITES_STATE = "writes state"
    RANDOM = "random"

    @property
    def joinable(self) -> bool:
        """Return whether a pass may replace two equal calls by one."""
        return self in (Effect.PURE, Effect.READS_STATE)

    @property
    def droppable(self) -> bool:
        """Return whether a pass may remove a call that nothing uses."""
        return self is not Effect.WRITES_STATE


@dataclass(frozen=True)
class Cost:
    """The least cost of a call: its floating-point operations, and the bytes of memory that it reads and writes."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Sample:
    """The arguments of one call of an op, with which tests run it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


Samples = Callable[[torch.Generator, torch.dtype], list[Sample]]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Op:
    """One op that programs may call.

    - `schema`: its signature in torch's schema language.
    - `reference`: the function that defines the results.
    - `placement`: the rule for a mesh axis: how arguments must be distributed, and how results are then.
    - `flops`: operations per element of the results (0 for pure data movement), or a function of the arguments.
    - `traffic`: a function that returns the bytes that a call moves; by default those of all arguments and results but
      written states. `flops` and `traffic` look at shapes only.
    - `multiplies`: the call multiplies rows by its weights.
    - `fake`: the shape function: returns results of the right shape for meta tensors.
    - `rowwise`: computes the same with each token independent of the others in the step (bitwise batch-invariant), one
      row of the parameters `rows` at a time.
    - `samples`: returns sample calls for tests.
    - `states`: the parameters that are states that the op writes. `in_place` updates them and returns only the other
      results; lowered programs call it.
    - `costliest`: allocates as much memory as a call (in place, if it has states) can, without reading data. The memory
      planner measures its peak.
    - `decompose`: computes a fused op by calls of the ops that it fuses; None for other ops.
    - `fusible`: a region compiler may put the op into a region.
    - `legal`: "any" stage, "pure" before states exist, "cached" once they do, or "open" until insert-collectives.
    - `effect`: whether passes may join or remove calls.
    - `across`: for a collective, computes the results of all ranks of its axis. It takes a list per tensor argument,
      with a tensor per rank, and returns a list of results.
    - `on_device`: a CUDA graph can capture the functions that compute the op: they use tensors alone and copy nothing
      from the host.
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
        """Return the torch op that graph nodes have as the target of their calls."""
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
        """Return a call's arguments by parameter name, with defaults filled in. Raises TypeError if they do not fit."""
        return self.parameters.bind(args, kwargs)

    def changed(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[str, Any], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call, each replaced by `change(parameter name, value)`, as (args, kwargs)."""
        names = self.parameters.names
        return (
            tuple(change(names[place], value) for place, value in enumerate(args)),
            {name: change(name, value) for name, value in kwargs.items()},
        )

    def cost(self, *args: Any, **kwargs: Any) -> Cost:
        """Return the flops and bytes of a call with these arguments, whose tensors may be meta tensors.

        Assumes that no request uses penalties, log-probabilities or other extras.
        """
        with torch.device("meta"):
            result = self.fake(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
        return self.count(args, kwargs, [result] if isinstance(result, torch.Tensor) else list(result))

    def count(self, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[torch.Tensor]) -> Cost:
        """Return the flops and bytes of a call from the shapes of its arguments and results. Computes nothing.

        `results` include the new versions of written states, last.
        """
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
    """Return the bytes of the tensors among `values`; other values count as 0."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))


def lookup_traffic(indices: torch.Tensor, table: torch.Tensor, **_: object) -> int:
    """Return the bytes that a lookup of table rows moves: the indices, and the selected rows, read and written."""
    return bytes_of(indices) + 2 * indices.numel() * bytes_of(table[:1])


def _each_row(reference: Function, rows: tuple[str, ...]) -> Function:
    """Return a function that computes an op one row at a time, so that no row's bits depend on the other rows.

    It calls `reference` with one row of each of the parameters `rows`, and concatenates the results.
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
    """Return a function's signature in torch's schema language: "f(Tensor x, *, int n=1) -> Tensor".

    Raises InternalError if its annotations do not declare all types.
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
    """Return a decorator that defines an op from its reference function, which defines the op's results.

    The op has the function's name, and its schema comes from the annotations; attributes are keyword-only. The
    arguments are fields of `Op`. Every op must set `samples` (how tests call it), `placement`
    (`ingot.ir.placements.whole` if every rank takes and returns whole values) and `flops`. `rows` names the parameters
    with independent rows along their first axis. An op without `rows` must not depend on the batch, or must set
    `rowwise`.

    `fake` defaults to the reference, `costliest` to `in_place` or the reference; the default must then run on meta
    tensors. New versions of states are the last results, in the order of `states`. An op with `states` writes state;
    one that only reads a state declares it in `effect`. The decorator raises InternalError if the name is taken.
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
    """Return the op that a graph node with this target calls; None if it is not an op of Ingot."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "ingot":
        return OPS.get(target._schema.name.partition("::")[2])
    return None


def own_row(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Return a copy of row `index` of a tensor, [1, …], whose memory address does not depend on the index.

    Math libraries choose kernels by alignment, so the address of a row in its batch would change its bits (seen with
    MKL 2024.2 on an AMD EPYC: one-row matmuls differ between addresses 4 and 16 bytes apart).
    """
    return tensor[index : index + 1].clone(memory_format=torch.contiguous_format)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype that reference functions compute in: float64 for float64, else float32."""
    return tensor.to(_wide_dtype(tensor))


def wide_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in the dtype that reference functions compute in: float64 for float64, else float32."""
    return tensor.to(_wide_dtype(tensor), copy=True)


def _wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
