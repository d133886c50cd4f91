"""The steps that rank 0 posts to the other ranks of a mesh, and the loop in which a rank runs them."""

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ingot.runtime.ranks.host import OtherHost
from ingot.runtime.ranks.shared_area import SharedArea
from ingot.runtime.ranks.step_slots import SteppedInputs, StepSlots
from ingot.runtime.steps.executor import SampledStep, StepLauncher
from ingot.runtime.steps.step import StepInputs

# Orders, one byte each: run the next step; run the ending of the oldest step that has not run it, whose late inputs are
# there now. Closing the pipe ends a rank.
STEP, ENDING = b"S", b"E"


class PostedSteps:
    """Posts steps from rank 0.

    area     the shared memory
    slots    how steps are written to it
    pipes    the end of the pipe to each other rank of this host, by its index
    others   the other hosts, to which the words that were written are sent
    """

    def __init__(
        self, area: SharedArea, slots: StepSlots, pipes: Mapping[int, int], others: Sequence[OtherHost] = ()
    ) -> None:
        self._area, self._slots, self._pipes, self._others = area, slots, pipes, others
        self._posted = 0

    def has_room(self) -> bool:
        """Return whether all ranks have ended the step that used the next slot before."""
        return bool((self._area.done[1:] > self._posted - self._area.slots).all())

    def post(self, inputs: StepInputs) -> None:
        """Write a step to its slot, and order the other ranks to run it. Raises ConnectionError if one is gone."""
        slot = self._area.slot(self._posted)
        written = [self._slots.write(slot, inputs)]
        if inputs.prepared:
            written += self._slots.write_late(slot, inputs)
        self._posted += 1
        self._order(STEP, written)

    def post_late(self, inputs: StepInputs) -> None:
        """Write the late inputs of the last step, and order its ending. Raises ConnectionError if a rank is gone."""
        self._order(ENDING, self._slots.write_late(self._area.slot(self._posted - 1), inputs))

    def post_ending(self) -> None:
        """Order the ending of the oldest step that has not run it. Raises ConnectionError if a rank is gone."""
        self._order(ENDING, ())

    def _order(self, order: bytes, written: Sequence[slice]) -> None:
        """Give an order. `written` are the words of the last step's slot that were written for it."""
        if self._others:
            step = self._posted - 1
            words = self._area.slot(step).numpy().view("u1").data
            pieces = [(one.start, words[4 * one.start : 4 * one.stop]) for one in written]
            for other in self._others:
                other.order(order, step % self._area.slots, pieces)
        for pipe in self._pipes.values():
            os.write(pipe, order)


def run_posted(
    steps: StepLauncher,
    area: SharedArea,
    slots: StepSlots,
    rank: int,
    orders: int,
    busy: Callable[[], int] = lambda: 0,
) -> None:
    """Run the steps that rank 0 posts, until it closes the pipe `orders`.

    steps   runs this rank's part of each step
    rank    the index of this rank
    busy    returns the nanoseconds that this rank has computed
    """
    begun = 0
    not_ended: deque[tuple[int, SteppedInputs, SampledStep]] = deque()  # (number of the step, its inputs, its handle)
    while order := os.read(orders, 1):
        if order == STEP:
            if not_ended and not_ended[0][1].ends_late:
                not_ended.clear()  # rank 0 gave that step up before its ending
            inputs = slots.read(area.slot(begun))
            if not inputs.ends_late:
                slots.read_late(area.slot(begun), inputs)
            handle = steps.launch(inputs)
            if inputs.ends_late or area.stages > 1:
                not_ended.append((begun, inputs, handle))
            begun += 1
        else:
            number, inputs, handle = not_ended.popleft()
            if inputs.ends_late:
                slots.read_late(area.slot(number), inputs)
            handle.finish()
        area.done[rank], area.busy[rank] = begun - len(not_ended), busy()
