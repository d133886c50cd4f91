"""A round: the entries of a model that run in each step, one behind the other, on the same inputs and states."""

from collections.abc import Sequence
from typing import Protocol

from ingot.ir.features import EndingUse, find_ending
from ingot.ir.plan import Plans
from ingot.runtime.engine import Executor, StepHandle
from ingot.runtime.step import StepInputs


class Launcher(Protocol):
    """What a round needs of the executor of an entry."""

    def launch(self, inputs: StepInputs) -> StepHandle: ...


class Round:
    """Launches several entries for each step. They share a stream, so each finds in the states what those in front of it
    have left there; the first one's outputs are the step's."""

    def __init__(self, entries: Sequence[Launcher]) -> None:
        self._first, *self._others = entries

    def launch(self, inputs: StepInputs) -> StepHandle:
        """Start a step of every entry, in order, and return without waiting for it. Raises as an executor does."""
        handle = self._first.launch(inputs)
        for entry in self._others:
            entry.launch(inputs)
        return handle


def make_round(entries: Sequence[Launcher]) -> Executor:
    """What runs a step: the executor of the only entry itself, where there is no other."""
    return entries[0] if len(entries) == 1 else Round(entries)


def max_drafts(plans: Plans) -> int:
    """Tokens that a sequence may feed behind its last one, as the ending of `main` says."""
    use = EndingUse.parse(plans.plans["main"].ending)
    return find_ending(use.name).fed(use) - 1
