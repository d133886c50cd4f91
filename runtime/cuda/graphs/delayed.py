"""Endings of steps that run at the same time as forward passes of later steps, as pipeline stages need it."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ingot.backends.table import BACKENDS
from ingot.ir.artifact.plan import BucketPlan, Instruction, Plan, Ref
from ingot.ir.errors import InternalError
from ingot.ir.ops import OPS
from ingot.ir.parse import parse_type
from ingot.runtime.cuda.graphs.memory import GraphMemory
from ingot.runtime.steps.bucket import Bucket


@dataclass(frozen=True)
class DelayedEndings:
    """Runs the endings of steps on a CUDA stream of their own, so that none of them delays a forward pass.

    An ending on a stage but the last one begins with the tokens of the last stage. In the stream of the forward passes,
    it would wait for that of the next step, which sends to a stage that is busy.

    stream   the stream of the endings
    steps    the stream of the forward passes
    memory   the memory of the graphs of endings. They run at the same time as the graphs of forward passes
    place    the index of the stage
    most     how many steps may have begun whose ending has not run
    """

    stream: torch.cuda.Stream
    steps: torch.cuda.Stream
    memory: GraphMemory
    place: int
    most: int

    @staticmethod
    def next_to(steps: torch.cuda.Stream, device: torch.device, place: int, most: int) -> "DelayedEndings":
        """Return endings on a new stream next to the stream `steps`."""
        # Endings are short, and the tokens that they bring are waited for. The kernels of the stream with the higher
        # priority, a lower number, go first.
        return DelayedEndings(torch.cuda.Stream(device, priority=-1), steps, GraphMemory(0), place, most)

    def begun(self) -> torch.cuda.Event:
        """Return an event after the forward pass that was just launched on the current stream."""
        event = torch.cuda.Event()
        event.record(self.steps)
        return event

    @contextmanager
    def after(self, begun: torch.cuda.Event) -> Iterator[None]:
        """Launch the work inside the `with` block as the ending of the step whose forward pass is over with `begun`.

        All that is launched on the stream of the steps from then on comes after the ending: it may read what the ending
        has written, or use memory that the ending has freed.
        """
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(begun)
            yield
            ended = torch.cuda.Event()
            ended.record(self.stream)
        self.steps.wait_event(ended)


def check_delayed(plan: Plan) -> None:
    """Raise InternalError if an ending that runs next to forward passes has a collective.

    Ranks of a stage would then use one connection, and one shared memory of GPUs, from two streams in no fixed order.
    """
    for bucket in plan.buckets:
        for one in bucket.instructions[bucket.ending :]:
            op, entry = OPS.get(one.target.removeprefix("ingot.")), BACKENDS.get(one.backend)
            if (op is not None and op.across is not None) or (entry is not None and entry.joins_collectives):
                raise InternalError(
                    f"the ending of a pipeline stage calls {one.target} of the backend '{one.backend}'",
                    where=f"bucket class {bucket.bucket.name}",
                    expected="collectives in forward passes alone, on each stage but the last",
                )


def carried_values(plan: BucketPlan, outputs: Collection[str], place: int) -> tuple[str, ...]:
    """Return the names of the values that the forward pass computes or receives, and that the ending reads.

    `outputs` are the names of a step's outputs, and `place` is the index of the stage.
    """
    received = () if plan.transfers is None else plan.transfers.received
    sent = () if plan.transfers is None else plan.transfers.sent
    made = {one.name for one in received if one.stage < place}
    made |= {name for one in plan.instructions[: plan.ending] for name in one.results if name}
    read = {name for one in plan.instructions[plan.ending :] for name in _read_by(one)}
    read |= {*outputs, *(one.name for one in sent if one.stage < place)}
    return tuple(name for name in plan.values if name in made & read)


def _read_by(instruction: Instruction) -> Iterator[str]:
    for argument in (*instruction.args, *instruction.kwargs.values()):
        if isinstance(argument, Ref):
            yield argument.ref


class CarriedValues:
    """Memory for the values that the ending of one graph reads. Graphs of other steps may run before the ending, and
    they overwrite the memory that all graphs share.

    bucket    the bucket class (a range of step sizes with one compiled plan)
    names     the names of the values
    dims      the size of every symbolic dim, by name
    device    the GPU
    """

    def __init__(self, bucket: Bucket, names: Collection[str], dims: Mapping[str, int], device: torch.device) -> None:
        self._bucket = bucket
        self._kept: dict[str, torch.Tensor] = {}
        for name in names:
            value_type = parse_type(bucket.plan.values[name].type)
            shape = value_type.bind(dims)
            if value_type.strides is None:
                self._kept[name] = torch.empty(shape, dtype=value_type.dtype, device=device)
            else:
                self._kept[name] = torch.empty_strided(shape, value_type.strides, dtype=value_type.dtype, device=device)

    def keep(self) -> None:
        """Copy the values, on the current stream. The ending reads the copies."""
        for name, kept in self._kept.items():
            self._bucket.set_value(name, kept.copy_(self._bucket.value(name)))
