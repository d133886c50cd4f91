"""Several hosts of a mesh on this machine: each agent is a process, connected over the loopback address."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ingot.ir.machine.meeting import LOOPBACK
from ingot.ir.mesh import Mesh, world_size
from ingot.runtime.ranks.host import Host
from ingot.runtime.ranks.hosts.agent import run_agent


class LocalHosts:
    """Places `counts[i]` ranks on host i. It has what `Placement` needs.

    agents     (attribute) the process of each agent, by the index of its host
    released   (attribute) how often the room was given back
    change     changes the order of an agent, as another host would see it
    """

    def __init__(self, *counts: int, change: Callable[[dict[str, Any]], Mapping[str, Any]] = dict) -> None:
        self._counts, self._change = counts, change
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.hosts: Sequence[Host] = ()
        self.released = 0

    def __call__(self, mesh: Mesh, device: str) -> "LocalHosts":
        assert sum(self._counts) == world_size(mesh) and device == "cpu"
        ends = [sum(self._counts[: place + 1]) for place in range(len(self._counts))]
        self.hosts = [
            Host(LOOPBACK, tuple(range(end - count, end))) for end, count in zip(ends, self._counts, strict=True)
        ]
        return self

    def start(self, index: int, order: Mapping[str, Any]) -> Callable[[], str | None]:
        command = [sys.executable, "-m", "ingot.runtime.ranks.hosts.agent"]
        agent = self.agents[index] = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert agent.stdin is not None
        agent.stdin.write(json.dumps(self._change(dict(order))).encode() + b"\n")
        agent.stdin.close()
        return lambda: None if agent.poll() is None else f"it exited with status {agent.poll()}"

    def release(self) -> None:
        """Note the call, and wait for the end of the agents."""
        self.released += 1
        for agent in self.agents.values():
            agent.wait(10)


class ThreadHosts(LocalHosts):
    """The same with agents in threads of this process, which goes on after them, as that of Ray's actor does."""

    def start(self, index: int, order: Mapping[str, Any]) -> Callable[[], str | None]:
        threading.Thread(target=run_agent, args=(dict(order),), daemon=True).start()
        return lambda: None
