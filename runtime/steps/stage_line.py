"""Receives and sends the values that pipeline stages share in a step."""

from collections.abc import Mapping

import torch

from ingot.ir.errors import InternalError
from ingot.ir.machine.load_context import Communicator, LoadContext
from ingot.ir.mesh import ONE_DEVICE, STAGES, Mesh, with_rank_rows
from ingot.ir.parse import parse_type
from ingot.runtime.steps.bucket import Bucket


class StageLine:
    """Moves values between this rank and the same rank of other stages.

    ranks    connects them, in the order of stages
    device   the device of the values
    back     connects them for the values of endings, which come back to earlier stages; None: `ranks` does. On a GPU,
             endings run next to forward passes, in no fixed order. Each connection needs one order
    mesh     all ranks: those of a stage may split the rows of a value
    """

    def __init__(
        self, ranks: Communicator, device: torch.device, back: Communicator | None = None, mesh: Mesh = ONE_DEVICE
    ) -> None:
        self._ranks, self._device, self._mesh = ranks, device, mesh
        self._back = ranks if back is None else back

    @staticmethod
    def of(context: LoadContext) -> "StageLine | None":
        """Return the line of a loaded rank; None on a mesh without stages. All ranks must call it."""
        found = context.communicators.get(STAGES)
        if found is None:
            return None
        return StageLine(found, context.device, found.second(context.device), context.mesh)

    def without_ranks(self) -> "StageLine":
        """Return a line that receives zeros, and sends nothing."""
        return StageLine(_Nobody(self.place, self._ranks.size), self._device, mesh=self._mesh)

    @property
    def place(self) -> int:
        """The index of this stage."""
        return self._ranks.place

    @property
    def most_begun(self) -> int:
        """How many steps may have begun here whose ending has not run. The last stage runs an ending at once; on each
        other stage, it waits for the tokens of the last one."""
        return 1 if self.place == self._ranks.size - 1 else self._ranks.size

    def receive(self, bucket: Bucket, sizes: Mapping[str, int], *, late: bool) -> None:
        """Receive the values of earlier stages before the model, or with `late` those of later ones before the ending.

        `sizes` has the size of every symbolic dim, by name.
        """
        ranks, sizes = self._back if late else self._ranks, with_rank_rows(sizes, self._mesh)
        for one in bucket.plan.transfers.received if bucket.plan.transfers is not None else ():
            if (one.stage > self.place) is late:
                value_type = parse_type(bucket.plan.values[one.name].type)
                shape = value_type.bind(sizes)
                value = torch.empty(shape, dtype=value_type.dtype, device=self._device)
                ranks.receive(value, one.stage)
                if value_type.strides is not None:  # a view of something larger, on the stage that sent it
                    laid_out = torch.empty_strided(shape, value_type.strides, dtype=value.dtype, device=self._device)
                    value = laid_out.copy_(value)
                bucket.set_value(one.name, value)

    def send(self, bucket: Bucket, *, late: bool) -> None:
        """Send the values that later stages need after the model, or with `late` those of earlier ones after the
        ending."""
        ranks = self._back if late else self._ranks
        for one in bucket.plan.transfers.sent if bucket.plan.transfers is not None else ():
            if (one.stage < self.place) is late:
                ranks.send(bucket.value(one.name), one.stage)


class _Nobody(Communicator):
    """In place of the other stages: sends zeros, and takes what it is sent."""

    def __init__(self, place: int, size: int) -> None:
        self.place, self.size = place, size

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x] + [torch.zeros_like(x) for _ in range(1, self.size)]

    def exchange(self, parts: torch.Tensor) -> list[torch.Tensor]:
        return [parts[self.place]] + [torch.zeros_like(parts[0]) for _ in range(1, self.size)]

    def send(self, x: torch.Tensor, place: int) -> None:
        return

    def receive(self, into: torch.Tensor, place: int) -> None:
        into.zero_()


def check_line(line: StageLine | None, staged: bool) -> None:
    """Raise InternalError if the plan of a pipeline stage is run without the other stages."""
    if staged and line is None:
        raise InternalError("the plan of a pipeline stage runs alone", expected="the ranks of all stages, connected")
