"""The steps that rank 0 posts to the other ranks of a mesh, and the loop in which a rank runs them."""

import os
from collections.abc import Mapping

from ingot.runtime.executor import StepLauncher
from ingot.runtime.ranks.shared_area import SLOTS, SharedArea
from ingot.runtime.ranks.step_slots import StepSlots
from ingot.runtime.step import StepInputs

# Orders, one byte each: run the next step; run the ending of the step before, whose late inputs are there now. Closing
# the pipe ends a rank.
STEP, ENDING = b"S", b"E"


class PostedSteps:
    """Posts steps from rank 0.

    area    the shared memory
    slots   how steps are written to it
    pipes   the end of the pipe to each other rank, by its index
    """

    def __init__(self, area: SharedArea, slots: StepSlots, pipes: Mapping[int, int]) -> None:
        self._area, self._slots, self._pipes = area, slots, pipes
        self._posted = 0

    def has_room(self) -> bool:
        """Return whether all ranks have ended the step that used the next slot before."""
        return bool((self._area.done[1:] > self._posted - SLOTS).all())

    def post(self, inputs: StepInputs) -> None:
        """Write a step to its slot, and order the other ranks to run it. Raises BrokenPipeError if one is gone."""
        self._slots.write(self._area.slot(self._posted), inputs)
        self._posted += 1
        self._order(STEP)

    def post_late(self, inputs: StepInputs) -> None:
        """Write the late inputs of the last step, and order its ending. Raises BrokenPipeError if a rank is gone."""
        self._slots.write_late(self._area.slot(self._posted - 1), inputs)
        self._order(ENDING)

    def _order(self, order: bytes) -> None:
        for pipe in self._pipes.values():
            os.write(pipe, order)


def run_posted(steps: StepLauncher, area: SharedArea, slots: StepSlots, rank: int, orders: int) -> None:
    """Run the steps that rank 0 posts, until it closes the pipe `orders`. `steps` runs this rank's part of each."""
    done = 0
    order = os.read(orders, 1)
    while order:
        inputs = slots.read(area.slot(done))
        handle = steps.launch(inputs)
        if inputs.ends_late:
            order = os.read(orders, 1)
            if order == ENDING:
                slots.read_late(area.slot(done), inputs)
                handle.finish()
        done += 1
        area.done[rank] = done
        if not inputs.ends_late or order == ENDING:  # otherwise rank 0 gave the step up, and has posted another one
            order = os.read(orders, 1)
