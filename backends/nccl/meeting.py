"""How the ranks of a group meet: the first one leaves an identity in a private folder, with what must be equal."""

import json
import time
from collections.abc import Mapping
from pathlib import Path

from ingot.ir.errors import BackendError, TargetError

_POLL_SECONDS = 0.01
# Far longer than loading libraries takes. Rank 0 watches the processes, and ends those that wait for a dead one.
_SECONDS = 600.0


def leave(file: Path, identity: bytes, facts: Mapping[str, str]) -> None:
    """Write the identity of a group and the facts of its first rank, all at once."""
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps({"identity": identity.hex(), "facts": dict(facts)}))
    beside.rename(file)


def find(file: Path, facts: Mapping[str, str], seconds: float = _SECONDS) -> bytes:
    """Wait for the first rank of a group, and return the group's identity.

    facts     what must be equal on all ranks, such as versions, as this rank has it
    seconds   how long to wait

    Raises TargetError if a fact differs, and BackendError if the first rank does not come.
    """
    end = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > end:
            raise BackendError(f"the first rank of {file.stem} does not come in {seconds:.0f} seconds", where="NCCL")
        time.sleep(_POLL_SECONDS)
    found = json.loads(file.read_text())
    check_facts(found["facts"], facts)
    return bytes.fromhex(found["identity"])


def check_facts(theirs: Mapping[str, str], mine: Mapping[str, str]) -> None:
    """Raise TargetError if this rank and the first of its group differ in a fact."""
    for name, value in theirs.items():
        if (own := mine.get(name)) != value:
            raise TargetError(
                f"ranks of the mesh differ: {name} is {value} on one, and {own} on another",
                expected="equal GPUs, drivers and packages on all ranks",
                hint="let CUDA_VISIBLE_DEVICES name equal GPUs, and start all ranks from one environment",
            )
