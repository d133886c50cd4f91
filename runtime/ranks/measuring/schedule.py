"""Which steps a mesh runs to be measured: rank 0 posts equal steps, and each rank knows what to do by their number."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum


class StepKind(Enum):
    """The kinds of steps.

    PLAIN      the ranks run it as in serving
    RECORDED   they run it call by call, and record when each call begins and ends
    TRACED     they run it call by call, and a profiler records it
    """

    PLAIN = "plain"
    RECORDED = "recorded"
    TRACED = "traced"


@dataclass(frozen=True)
class MeasuringSchedule:
    """The number of steps of each kind, in the order in which they run.

    plain      the first steps
    recorded   the steps after them
    traced     the last steps. In a plain step before them, the profilers of all ranks prepare, which takes long
    """

    plain: int
    recorded: int
    traced: int = 0

    @property
    def steps(self) -> int:
        """The number of all steps."""
        return self._first_traced + self.traced if self.traced else self.plain + self.recorded

    @property
    def preparing(self) -> int | None:
        """The number of the step in which profilers prepare; None without traced steps."""
        return self._first_traced - 1 if self.traced else None

    @property
    def _first_traced(self) -> int:
        return self.plain + self.recorded + 1

    def kind(self, step: int) -> StepKind:
        """Return the kind of a step, by its number from 0."""
        if self.plain <= step < self.plain + self.recorded:
            return StepKind.RECORDED
        return StepKind.TRACED if step >= self._first_traced else StepKind.PLAIN

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @staticmethod
    def read(given: Mapping[str, int]) -> "MeasuringSchedule":
        """Return the schedule that `to_json` has written."""
        return MeasuringSchedule(**given)
