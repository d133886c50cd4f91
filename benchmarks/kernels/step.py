"""Measure the small kernels of a step on this GPU: embedding, norms, gates, sampling with penalties, log-probabilities.

    python benchmarks/kernels/step.py [--shape 8b] [--seconds 30] [--only sample,feed] [--json FILE]

A CUDA graph holds a sequence of calls, each of which may begin before the previous one has ended, as in a captured
step. Each has its own random numbers, up to four times the last-level cache or 400 calls. Smaller data stays in the
cache, as in a step, where the previous kernel has just written it. Then the results of one more call, into buffers
filled with NaN, are compared with the op's reference. Bytes are those of the op's own count, plus what a call with more
options reads and writes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import benchmarks_path  # noqa: F401
import torch
from copy_bandwidth import copy_bandwidth
from device_times import Recorded, take_turns, this_machine
from kernel_figures import Call, Peak, Times, finish, kernel_parser, measure_figures, slug
from random_checkpoint import SHAPES
from step_cases import Case, Sizes, cases

from ingot.backends.triton.lower import elementwise, gate, norm, step
from ingot.backends.triton.lower.call import Call as LoweredCall
from ingot.backends.triton.lower.call import Lowering
from ingot.backends.triton.lower.sampling import logprobs, penalties
from ingot.backends.triton.lower.sampling import sample as sampling
from ingot.backends.triton.schedule import Schedule, Value
from ingot.backends.triton.tune.device import Launcher, Machine, captured
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS
from ingot.ir.ops.registry import Op
from ingot.ir.types import TensorType

ROWS = (1, 32)
CALLS = (50, 400)  # minimum and maximum calls of a graph: some hundred microseconds, against a few for its launch
CACHES = 4  # multiple of the last-level cache that the calls of a graph read
LOWERINGS: Mapping[str, Lowering] = {
    name: lowering
    for module in (elementwise, gate, logprobs, norm, penalties, sampling, step)
    for name, lowering in module.LOWERINGS.items()
}


@dataclass(frozen=True)
class Lowered:
    """A call of an op, compiled to kernel launches (`schedule`).

    `outputs` are its results. `states` are the indices of the inputs that it changes, such as token counts.
    """

    op: Op
    schedule: Schedule
    outputs: tuple[Value, ...]
    states: tuple[int, ...]


def lower(case: Case, args: Sequence[torch.Tensor], machine: Machine) -> Lowered:
    """Compile a case, a call of one op, to kernel launches for the tensors `args`.

    The step has a token for each row of the case.
    """
    op = OPS[case.op]
    tensors = {name: one for name, one in op.bind(args, dict(case.kwargs)).items() if isinstance(one, torch.Tensor)}
    values: dict[str, Value | None] = {
        name: Value(type_of(tensor), input=place) for place, (name, tensor) in enumerate(tensors.items())
    }
    with torch.device("meta"):
        made = op.fake(*(one.to("meta") for one in args), **case.kwargs)
    results = [made] if isinstance(made, torch.Tensor) else list(made)
    types = tuple(type_of(result) for result in results[: len(results) - len(op.states)])
    tokens = next(tokens for tokens in ((1, 1), (2, 16), (17, 32), (33, 64)) if case.rows <= tokens[1])
    bucket = BucketClass(name="bench", tokens=tokens)
    schedule = Schedule(machine.sm, machine.cores, bucket, dependent=machine.dependent)
    outputs = LOWERINGS[case.op](LoweredCall(op.name, values, case.kwargs, types), schedule)
    return Lowered(op, schedule, outputs, tuple(list(tensors).index(name) for name in op.states))


def type_of(tensor: torch.Tensor) -> TensorType:
    return TensorType(tensor.dtype, tuple(tensor.shape), None if tensor.is_contiguous() else tuple(tensor.stride()))


def measure(case: Case, machine: Machine, cache: int) -> dict[str, list[float]]:
    """Return the seconds of a call in each round of measurement, as {"triton": […]}.

    `cache` is the size of the GPU's last-level cache in bytes. Raises RuntimeError for wrong results.
    """
    first = case.draw()
    lowered = lower(case, first, machine)
    launcher = Launcher(lowered.schedule, lowered.outputs[0] if lowered.outputs else None, {})
    least, most = CALLS
    draws = [first, *(case.draw() for _ in range(min(most, CACHES * cache // bytes_of(case, first))))]
    states = {place: first[place].clone() for place in lowered.states}  # one copy for all calls
    inputs = [[states.get(place, one) for place, one in enumerate(draw)] for draw in draws]
    launcher(inputs[0])  # compile
    row = [inputs[number % len(inputs)] for number in range(max(least, len(inputs)))]
    recorded = Recorded(captured(partial(launcher, given) for given in row), len(row), (launcher, inputs))
    times = take_turns({"triton": recorded})
    check_once(case, lowered, launcher, inputs[-1], draws[-1])
    return times


def check_once(
    case: Case, lowered: Lowered, launcher: Launcher, inputs: Sequence[torch.Tensor], args: Sequence[torch.Tensor]
) -> None:
    """Run a call once and compare its results with the reference. Raises RuntimeError if they differ.

    `inputs` are the tensors to run on. `args` are these tensors as they were before any call. Earlier calls have
    changed the states in `inputs`, so they are first copied from `args`.
    """
    outputs = [launcher.buffers[str(value.buffer)] for value in lowered.outputs]
    for one in outputs:
        one.fill_(float("nan") if one.is_floating_point() else torch.iinfo(one.dtype).min)
    for place in lowered.states:
        inputs[place].copy_(args[place])
    launcher(inputs)
    expected = lowered.op.reference(*args, **case.kwargs)
    wanted = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    found = [*outputs, *(inputs[place] for place in lowered.states)]
    for one, other in zip(found, wanted, strict=True):
        if problem := compare(one, other, other.dtype):
            raise RuntimeError(f"the result is wrong: {problem}")


def bytes_of(case: Case, args: Sequence[torch.Tensor]) -> int:
    return OPS[case.op].cost(*args, **case.kwargs).bytes + case.asked


def calls(shape: str, machine: Machine, only: set[str], cache: int) -> Iterator[tuple[Call, Callable[[], Times]]]:
    """Yield each call to measure for a model shape, such as "8b", with the function that measures it.

    `only` has the names of the ops to measure. If it is empty, all ops are measured. `cache` is the size of the GPU's
    last-level cache in bytes.
    """
    for rows in ROWS:
        for case in cases(Sizes.of(SHAPES[shape]), rows, "cuda"):
            if not only or case.op in only:
                yield (
                    Call(slug(case.name), case.name, bytes_of(case, case.draw())),
                    partial(measure, case, machine, cache),
                )


def main() -> None:
    parser = kernel_parser(__doc__ or "", 30.0)
    parser.add_argument("--only", default="", help="ops, separated by commas")
    options = parser.parse_args()
    machine, only = this_machine(), set(filter(None, options.only.split(",")))
    peak = Peak(copy_bandwidth("cuda"))
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    work = calls(options.shape, machine, only, cache)
    figures, missing = measure_figures("step", work, peak, options.seconds)
    finish(__file__, options, figures, missing)


if __name__ == "__main__":
    main()
