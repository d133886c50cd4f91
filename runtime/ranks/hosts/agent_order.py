"""The order of rank 0 for the agent of another host, and the check that the host can follow it. Imports no torch."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.ir.artifact.manifest_file import MANIFEST
from ingot.ir.errors import ArtifactError, TargetError
from ingot.ir.machine.extras import installed_version
from ingot.ir.mesh import Mesh
from ingot.runtime.ranks.host import Host, hosts_json, read_hosts

# All hosts need one version of these packages: their processes exchange values, and use one artifact.
_PACKAGES = ("ingot", "torch")
# How variables begin that must be equal on all ranks, or that the user sets for all. NCCL_NVLS_ENABLE is one of them.
# Others may be secrets, as INGOT_API_KEY.
_PASSED_ON = ("NCCL_", "TORCH_SYMM_MEM_", "OMP_NUM_THREADS", "INGOT_DEBUG")
# The names of a host's network interfaces, which differ between hosts.
_KEPT = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")


@dataclass(frozen=True)
class AgentOrder:
    """The order that an agent gets when it is started. JSON can hold its fields.

    address     where rank 0 waits for the agent, and `port`
    token       the token of the mesh, in hex. It is a secret
    index       which of `hosts` is the agent's
    hosts       the hosts of the mesh, as `hosts_json` returns them
    artifact    the absolute path of the artifact, and `build`, the SHA-256 of its manifest
    mesh        the mesh, and `device`, on which its ranks compute
    packages    package -> the version that all hosts need
    variables   environment variables of the ranks
    """

    address: str
    port: int
    token: str
    index: int
    hosts: Sequence[Any]
    artifact: str
    build: str
    mesh: Mapping[str, int]
    device: str
    packages: Mapping[str, str]
    variables: Mapping[str, str]

    def json(self) -> dict[str, Any]:
        return asdict(self)

    def read_hosts(self) -> tuple[Host, ...]:
        return read_hosts(self.hosts)


def make_order(
    hosts: Sequence[Host], index: int, port: int, token: bytes, artifact: Path, mesh: Mesh, device: str
) -> AgentOrder:
    """Return the order for the agent of `hosts[index]`, which reaches rank 0 at `port`. Raises ArtifactError if the
    manifest cannot be read."""
    return AgentOrder(
        address=hosts[0].address,
        port=port,
        token=token.hex(),
        index=index,
        hosts=hosts_json(hosts),
        artifact=str(artifact.absolute()),
        build=_build(artifact.absolute(), ""),
        mesh=dict(mesh),
        device=device,
        packages={name: installed_version(name) for name in _PACKAGES},
        variables={
            name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON) and name not in _KEPT
        },
    )


def check_order(order: AgentOrder) -> None:
    """Raise TargetError if this host has other versions of packages than rank 0's, or ArtifactError if it has not the
    same artifact."""
    address = order.read_hosts()[order.index].address
    where = f"host {address}"
    for name, wanted in order.packages.items():
        if (found := installed_version(name)) != wanted:
            raise TargetError(
                f"hosts of the mesh differ: rank 0 has {name} {wanted or '(not installed)'}, and the host {address} "
                f"has {found or 'none'}",
                where=where,
                expected="equal versions on all hosts",
                hint=f"pip install '{name}=={wanted}' on that host" if wanted else f"install {name} on rank 0's host",
            )
    if (found := _build(Path(order.artifact), where)) != order.build:
        raise ArtifactError(
            f"the artifact on the host {address} differs from that of rank 0",
            where=f"{where}, {order.artifact}/{MANIFEST}",
            expected=f"the build {order.build[:12]}, and it has the build {found[:12]}",
            hint="copy the artifact to that host again, or use a file system that all hosts share",
        )


def _build(artifact: Path, where: str) -> str:
    try:
        return hashlib.sha256((artifact / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise ArtifactError(
            f"the artifact {artifact} cannot be read{' on another host' if where else ''}: {error.strerror}",
            where=where,
            expected="the same artifact under the same path on each host",
            hint="copy the artifact to that host, or use a file system that all hosts share" if where else "",
        ) from None
