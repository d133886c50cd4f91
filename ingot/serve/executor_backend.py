"""The option `distributed_executor_backend`: what starts the ranks of a mesh. Importing this imports no torch."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.ir.errors import OptionError
from ingot.ir.machine.extras import require
from ingot.runtime.ranks.processes import RankProcesses, begun_ranks

if TYPE_CHECKING:
    from ingot.runtime.ranks.hosts.begin import PlaceRanks

# "mp": processes of this host. "ray": processes of the hosts of a Ray cluster. The names are vLLM's.
EXECUTOR_BACKENDS = ("mp", "ray")
ON_THIS_HOST = "mp"


def begun_by(backend: str, artifact: Path) -> AbstractContextManager[RankProcesses | None]:
    """Start the processes of the other ranks of an artifact; see `begun_ranks` and `begun_on_hosts`. Raises IngotError
    if the backend is unknown, or if it cannot start them."""
    place = place_of(backend)
    if place is None:
        return begun_ranks(artifact)
    from ingot.runtime.ranks.hosts.begin import begun_on_hosts  # imports numpy, for which no other start waits

    return begun_on_hosts(artifact, place)


def place_of(backend: str) -> "PlaceRanks | None":
    """Return what finds hosts for the ranks; None: this host alone has them. Raises OptionError for an unknown backend,
    and TargetError if Ray is not installed."""
    check_executor_backend(backend)
    if backend == ON_THIS_HOST:
        return None
    require("ray", "ray", "a mesh on several hosts", extra="ray")
    from ingot.serve.ray.mesh_placement import place_by_ray

    return place_by_ray


def check_executor_backend(backend: str) -> None:
    """Raise OptionError if no such backend starts ranks."""
    if backend not in EXECUTOR_BACKENDS:
        raise OptionError(
            f"distributed_executor_backend is {backend!r:.80}",
            expected=" or ".join(f"'{one}'" for one in EXECUTOR_BACKENDS),
        )
