"""The triton backend at compile time: claims calls and regions that have kernels, and compiles the kernels."""

import json
import operator
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import fx

from ingot.backends.ptxas import ptxas_version
from ingot.backends.table import claim_cost
from ingot.backends.triton.compile import Cubin, compile_kernel, file_of, is_aligned, launch_key
from ingot.backends.triton.launches import LAUNCHES, Buffer, Launch, Launches, Number, Pointer, evaluate
from ingot.backends.triton.lower.attention.problem import DECODE_ATTENTION
from ingot.backends.triton.lower.call import Call, Lowering, call_of
from ingot.backends.triton.lower.experts.problem import EXPERTS
from ingot.backends.triton.lower.linear.problem import LINEAR, LinearProblem
from ingot.backends.triton.lower.linear.weight import PLAIN
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.schedule import KernelLaunch, Schedule, Value
from ingot.backends.triton.tiles import check_tiles
from ingot.ir.artifact.plan import GPU_FEW_TOKENS, BucketClass, Executable
from ingot.ir.artifact.tuning import Choice
from ingot.ir.backend import No, Yes
from ingot.ir.errors import BackendError
from ingot.ir.layout import Layout
from ingot.ir.machine import device_clock
from ingot.ir.machine.target import Target
from ingot.ir.ops import add_rms_norm, linear, op_of
from ingot.ir.program import Program, held_type, target_name
from ingot.ir.types import DTYPES, TensorType


class Triton:
    """The triton backend. It has kernels for every op of a decoder's step, and claims (offers to compute) their calls.

    It claims matmuls in steps of few tokens, fused with the ops around them. In batch-invariant bucket classes (ranges
    of step sizes) it claims matmuls for any number of tokens. `choices` are entries of a tuning log: tile sizes of a
    kernel for calls of certain sizes. Raises OptionError for tile sizes that no kernel supports.
    """

    name = "triton"
    compiles_calls = True

    def __init__(self, choices: Sequence[Choice] = ()) -> None:
        check_tiles(choices)
        self._given = {choice.key: choice for choice in choices}

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cuda" or target.sm is None:
            return No(f"not for device '{target.device}'")
        if target.sm < 80:
            return No(f"kernels need compute capability 8.0, and this is {target.sm // 10}.{target.sm % 10}")
        layouts: dict[str, Layout] = {}
        for node in nodes:
            lowering = _lowering_of(node)
            if lowering is None:
                return No(f"no kernel for {target_name(node.target)}")
            try:
                lowering(_call_of_node(node), self._schedule(target, bucket))
            except Refused as refusal:
                return No(str(refusal))
            if op_of(node.target) is linear:
                layouts["weight"] = Layout.ROW_MAJOR
        return Yes(claim_cost(self.name) * len(nodes), layouts, bucket.batch_invariant)

    def cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
        from ingot.backends.triton.lower.regions import groups

        return groups(nodes)

    def takes_apart(self, node: fx.Node, target: Target, bucket: BucketClass) -> bool:
        return (
            target.device == "cuda"
            and (bucket.tokens[1] <= GPU_FEW_TOKENS or bucket.batch_invariant)
            and op_of(node.target) is add_rms_norm
            and isinstance(self.claim([node], target, bucket), Yes)
        )

    def warm_up(self) -> None:
        import triton.compiler  # noqa: F401

        import ingot.backends.triton.lower.table  # noqa: F401

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        launches = Launches.model_validate_json((directory / LAUNCHES).read_text(encoding="utf-8"))
        return sum(_bytes(buffer, sizes) for buffer in launches.buffers.values())

    def sources(self) -> Sequence[Path]:
        folder = Path(__file__).parent
        run_side = ("load.py", "prepared_launch.py")
        sources = (path for path in folder.rglob("*.py") if path.name not in run_side)
        return sorted(path for path in sources if path.parent != folder / "tune")

    def toolchain(self) -> dict[str, str]:
        return {"triton": version("triton"), "ptxas": ptxas_version()}

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        """Compile the kernels for the program `body`, and write the cubins and launches.json into `directory`.

        The returned Executable describes them; `key` is its id. Raises BackendError if a kernel does not compile.
        """
        assert target.sm is not None
        schedule, outputs = self._lowered(body, target)
        wanted = [node.meta["type"] for node in body.output_nodes().values()]
        types = tuple(value_type for value_type in wanted if isinstance(value_type, TensorType))
        if tuple(output.type for output in outputs) != types:
            raise BackendError(
                f"the lowering of '{body.name}' returns ({', '.join(str(output.type) for output in outputs)})",
                expected=f"({', '.join(map(str, types))})",
            )
        files = _write(schedule, outputs, [held_type(node) for node in body.placeholders()], target.sm, directory)
        return Executable(
            id=key,
            backend=self.name,
            inputs=tuple(str(held_type(node)) for node in body.placeholders()),
            outputs=tuple(map(str, types)),
            files=files,
        )

    def choices(self, body: Program, target: Target) -> tuple[Choice, ...]:
        return tuple(self._lowered(body, target)[0].choices)

    def with_choices(self, choices: Sequence[Choice]) -> "Triton":
        return Triton((*self._given.values(), *choices))

    def measures(self, choice: Choice) -> bool:
        if choice.kernel == LINEAR:
            return LinearProblem.of(choice).packing == PLAIN  # the benchmark makes only plain weights
        return choice.kernel in (DECODE_ATTENTION, EXPERTS)

    def measure(self, choice: Choice, target: Target, seconds: float) -> Choice:
        from ingot.backends.triton.tune.search import measure

        return measure(choice, target, seconds)

    def tuning_sources(self) -> Sequence[Path]:
        return [*sorted((Path(__file__).parent / "tune").rglob("*.py")), Path(device_clock.__file__)]

    def _schedule(self, target: Target, bucket: BucketClass, sequences: int | None = None) -> Schedule:
        assert target.sm is not None
        dependent = "dependent_launch" in target.features
        return Schedule(target.sm, target.cores, bucket, sequences, dependent=dependent, given=self._given)

    def _lowered(self, body: Program, target: Target) -> tuple[Schedule, tuple[Value, ...]]:
        """Return the kernel launches of the program `body`, and its result tensors.

        The program holds one call, or a region (such as a matmul with the ops that are fused with it).
        """
        assert body.bucket is not None
        sequences = body.dims.get("B")
        schedule = self._schedule(target, body.bucket, None if sequences is None else sequences.hi)
        values: dict[fx.Node, Value] = {}
        for place, node in enumerate(body.placeholders()):
            values[node] = Value(held_type(node), input=place)
        calls = list(node for node in body.calls() if node.target is not operator.getitem)
        lowering = _lowering_of(calls[0]) if len(calls) == 1 else None
        if lowering is not None:
            return schedule, lowering(call_of(calls[0], values), schedule)
        from ingot.backends.triton.lower.regions import lower_region

        return schedule, lower_region(body, schedule)


def _lowering_of(node: fx.Node) -> Lowering | None:
    """Return the lowering of a call's op, or None if the op has none.

    A lowering is a function that translates a call into kernel launches. Importing it imports the kernels, which need
    Triton.
    """
    from ingot.backends.triton.lower.table import LOWERINGS

    op = op_of(node.target)
    return LOWERINGS.get(op.name if op is not None else target_name(node.target))


def _call_of_node(node: fx.Node) -> Call:
    """Return a graph node as a Call, for the function that translates it into launches (its lowering).

    The tensor arguments of the node become inputs 0, 1, …
    """
    values: dict[fx.Node, Value] = {}
    for place, source in enumerate(node.all_input_nodes):
        values[source] = Value(held_type(source), input=place)
    return call_of(node, values)


def _bytes(buffer: Buffer, sizes: Mapping[str, int]) -> int:
    count = DTYPES[buffer.dtype].itemsize
    for size in buffer.shape:
        count *= evaluate(size, sizes)
    return count


def _write(
    schedule: Schedule, outputs: Sequence[Value], inputs: Sequence[TensorType], sm: int, directory: Path
) -> tuple[str, ...]:
    """Compile the kernels of a schedule (the launches of an executable), and write the cubins and launches.json.

    `inputs` are the types of the executable's inputs. `outputs` are the tensors that it returns. Returns the names of
    the files.
    """
    compiled: dict[Any, Cubin] = {}
    launches: list[Launch] = []
    files: dict[str, None] = {LAUNCHES: None}
    for launch in schedule.launches:
        key = launch_key(launch)
        if key not in compiled:
            compiled[key] = compile_kernel(launch, sm)
        cubin = compiled[key]
        file = file_of(cubin)
        if file not in files:
            (directory / file).write_bytes(cubin.code)
            files[file] = None
        launches.append(_described(launch, cubin, file))
    document = Launches(
        inputs=tuple(map(str, inputs)),
        aligned=_aligned(schedule),
        buffers=schedule.buffers,
        outputs=tuple(str(value.buffer) for value in outputs),
        launches=tuple(launches),
    )
    (directory / LAUNCHES).write_text(json.dumps(document.to_json(), indent=1) + "\n", encoding="utf-8")
    return tuple(files)


def _aligned(schedule: Schedule) -> tuple[int, ...]:
    """Return the indices of the inputs whose addresses the kernels assume to be multiples of 16 bytes."""
    given = (value for launch in schedule.launches for value in launch.values)
    return tuple(sorted({value.input for value in given if value.input is not None and is_aligned(value)}))


def _described(launch: KernelLaunch, cubin: Cubin, file: str) -> Launch:
    arguments: list[Pointer | Number] = []
    for name in launch.kernel.arg_names:
        value = launch.arguments.get(name)
        if isinstance(value, Value):
            arguments.append(_described_pointer(value))
        elif isinstance(value, tuple):
            arguments.extend(map(_described_pointer, value))
        elif value is not None:
            arguments.append(Number(value=value))
    grid = (*launch.grid, 1, 1, 1)[:3]
    return Launch(
        kernel=file,
        entry=cubin.entry,
        grid=(grid[0], grid[1], grid[2]),
        arguments=tuple(arguments),
        warps=cubin.warps,
        shared=cubin.shared,
        dependent=launch.dependent,
    )


def _described_pointer(value: Value) -> Pointer:
    return Pointer(input=value.input, buffer=value.buffer)
