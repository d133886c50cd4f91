"""The memory that the processes of a mesh share on a host: what each rank reports, and the inputs of steps.

The memory has no name in the file system. Rank 0 makes it and hands its file descriptor to the other processes. It is
freed when the last process ends. Ranks report before rank 0 knows the sizes of a step, so slots are added later.
"""

import torch

from ingot.runtime.ranks.report_layout import map_slots, slot_count
from ingot.runtime.ranks.reports import Reports


class SharedArea(Reports):
    """The shared memory of a mesh. First it has what ranks report; `add_slots` adds the slots of steps.

    ranks        the number of ranks
    fd           the file descriptor of the memory, which has `report_bytes` bytes or more. None: make new memory. The
                 caller closes it, in the attribute `fd`
    stages       (attribute) the number of pipeline stages
    slots        (attribute) the number of slots; 0 before they are added
    """

    def __init__(self, ranks: int, fd: int | None = None) -> None:
        super().__init__(ranks, fd)
        self.stages, self.slots = 1, 0
        self._count = ranks

    def add_slots(self, words: int, stages: int) -> None:
        """Add the slots, each of so many 4-byte words. It holds the inputs of one step. All processes must call it with
        equal numbers, rank 0's first."""
        self.stages, self.slots = stages, slot_count(stages)
        memory = map_slots(self.fd, self._count, self.slots, words)
        self._slots = torch.frombuffer(memory, dtype=torch.int32).view(self.slots, words)

    def slot(self, step: int) -> torch.Tensor:
        """Return the slot of the step with this number, i32[slot_words]. Step n + slots uses it again."""
        return self._slots[step % self.slots]
