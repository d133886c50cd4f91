"""How the ranks of a group meet: the first one leaves an identity, with what must be equal."""

import json
from collections.abc import Mapping

from ingot.ir.errors import BackendError, TargetError
from ingot.ir.machine.meeting import MeetingPlace

# Far longer than loading libraries takes. Rank 0 watches the processes, and ends those that wait for a dead one.
_SECONDS = 600.0


def leave(meeting: MeetingPlace, name: str, identity: bytes, facts: Mapping[str, str]) -> None:
    """Leave the identity of the group `name` and the facts of its first rank."""
    meeting.leave(_file(name), json.dumps({"identity": identity.hex(), "facts": dict(facts)}).encode())


def find(meeting: MeetingPlace, name: str, facts: Mapping[str, str], seconds: float = _SECONDS) -> bytes:
    """Wait for the first rank of the group `name`, and return the group's identity.

    facts     what must be equal on all ranks, such as versions, as this rank has it
    seconds   how long to wait

    Raises TargetError if a fact differs, and BackendError if the first rank does not come.
    """

    def late() -> None:
        raise BackendError(f"the first rank of {name} does not come in {seconds:.0f} seconds", where="NCCL")

    found = json.loads(meeting.find(_file(name), late, seconds))
    check_facts(found["facts"], facts)
    return bytes.fromhex(found["identity"])


def _file(name: str) -> str:
    return f"{name.replace('/', '-')}.nccl"


def check_facts(theirs: Mapping[str, str], mine: Mapping[str, str]) -> None:
    """Raise TargetError if this rank and the first of its group differ in a fact."""
    for name, value in theirs.items():
        if (own := mine.get(name)) != value:
            raise TargetError(
                f"ranks of the mesh differ: {name} is {value} on one, and {own} on another",
                expected="equal GPUs, drivers and packages on all ranks",
                hint="let CUDA_VISIBLE_DEVICES name equal GPUs, and start all ranks from one environment",
            )
