"""Records when the calls of a rank, and its transfers to other pipeline stages, begin and end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

from ingot.ir.machine.load_context import Communicator
from ingot.ir.mesh import STAGES
from ingot.runtime.ranks.measuring.clock import CallClock, HostClock, Reader
from ingot.runtime.ranks.measuring.schedule import StepKind
from ingot.runtime.steps.bucket import Call

T = TypeVar("T")
# The kinds of spans.
CALL, RECEIVE, SEND = "call", "receive", "send"


@dataclass(frozen=True)
class CallSpan:
    """One call of a rank in a step, or one transfer.

    kind     "call", or "receive" or "send" for a transfer
    number   the index of the instruction in the plan of the rank, or the stage at the other end of a transfer
    begin    when it began, in nanoseconds of the monotonic clock of the host, and `end`
    size     the bytes of a transfer
    """

    kind: str
    number: int
    begin: int
    end: int
    size: int = 0

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) * 1e-9


class SpanRecorder:
    """Records the spans of the steps of a rank.

    kind    (attribute) what to do with the calls of the running step
    clock   (attribute) stamps their begins and ends
    """

    def __init__(self) -> None:
        self.kind = StepKind.PLAIN
        self.clock: CallClock = HostClock()
        self._steps: list[tuple[Reader, list[tuple[str, int, Any, Any, int]]]] = []

    def begin(self, kind: StepKind) -> None:
        """Begin a step."""
        self.kind = kind
        if kind is StepKind.RECORDED:
            self._steps.append((self.clock.begin(), []))

    def watch(self, call: Call) -> Any:
        """Run a call, and record it."""
        target = call.instruction.target
        return self.record(CALL, call.number, 0, f"{call.number} {target}", call)

    def record(self, kind: str, number: int, size: int, name: str, run: Callable[[], T]) -> T:
        """Call `run`, and record it as a span. A profiler sees it as `name`. `CallSpan` describes the others."""
        if self.kind is StepKind.TRACED:
            with record_function(name):
                return run()
        if self.kind is StepKind.PLAIN:
            return run()
        begin = self.clock.now()
        result = run()
        self._steps[-1][1].append((kind, number, begin, self.clock.now(), size))
        return result

    def spans(self) -> list[list[CallSpan]]:
        """Return the spans of each recorded step, in the order in which they ended."""
        self.clock.end()
        return [
            [CallSpan(kind, number, read(begin), read(end), size) for kind, number, begin, end, size in step]
            for read, step in self._steps
        ]

    def connections(self, found: Mapping[str, Communicator]) -> dict[str, Communicator]:
        """Return the connections of the rank. Transfers between pipeline stages are recorded."""
        made = dict(found)
        if STAGES in made:
            made[STAGES] = _RecordedConnection(made[STAGES], self)
        return made


class _RecordedConnection(Communicator):
    """Records the transfers of a connection between pipeline stages."""

    def __init__(self, connection: Communicator, recorder: SpanRecorder) -> None:
        self.place, self.size = connection.place, connection.size
        self._connection, self._recorder = connection, recorder

    @property
    def alive(self) -> bool:
        return self._connection.alive

    def check(self) -> None:
        self._connection.check()

    def abort(self) -> None:
        self._connection.abort()

    def second(self, device: torch.device) -> Communicator:
        return _RecordedConnection(self._connection.second(device), self._recorder)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self._connection.gather(x)

    def exchange(self, parts: torch.Tensor) -> list[torch.Tensor]:
        return self._connection.exchange(parts)

    def send(self, x: torch.Tensor, place: int) -> None:
        name = f"send to stage {place}"
        self._recorder.record(SEND, place, x.nbytes, name, lambda: self._connection.send(x, place))

    def receive(self, into: torch.Tensor, place: int) -> None:
        name = f"receive from stage {place}"
        self._recorder.record(RECEIVE, place, into.nbytes, name, lambda: self._connection.receive(into, place))


def spans_json(steps: Sequence[Sequence[CallSpan]]) -> list[Any]:
    """Return the spans of steps as what JSON can hold; `read_spans` reads it."""
    return [[astuple(span) for span in step] for step in steps]


def read_spans(given: Sequence[Any]) -> list[list[CallSpan]]:
    """Return the spans that `spans_json` has written."""
    return [[CallSpan(*span) for span in step] for step in given]
