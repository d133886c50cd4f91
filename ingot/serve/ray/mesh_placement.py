"""Places the ranks of a mesh on the nodes of a Ray cluster. Ray reserves room and starts agents; no step uses it."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ingot.ir.errors import OptionError, RankError, TargetError
from ingot.ir.machine.gpus import GPU_VARIABLE
from ingot.ir.mesh import Mesh
from ingot.runtime.ranks.host import Host
from ingot.serve.ray.mesh_agent import MeshAgent
from ingot.serve.ray.mesh_layout import Node, lay_out

# Room that was free a moment ago is reserved at once, unless another job has taken it.
_RESERVE_SECONDS = 30.0
# In which Ray starts the process of an actor, and imports Ingot.
_START_SECONDS = 60.0
# The label by which a bundle is put on a node: its id in Ray.
_NODE_LABEL = "ray.io/node-id"


def place_by_ray(mesh: Mesh, device: str) -> "RayPlacement":
    """Reserve room for the ranks of a mesh: of one placement group, with a bundle for each node.

    It joins the Ray cluster that runs on this host, unless this process has joined one. `device` is "cpu" or "cuda".
    Raises TargetError if no cluster runs or it is too small, and RankError if Ray reserves no room in 30 seconds.
    """
    joined = not ray.is_initialized()
    if joined:
        try:
            _join()
        except ConnectionError as error:
            raise TargetError(
                f"no Ray cluster runs on this host: {str(error).splitlines()[0]}",
                expected="a Ray cluster to which this host belongs",
                hint="`ray start --head` on this host, and `ray start --address=HOST:6379` on the others",
            ) from error
    resource = "GPU" if device == "cuda" else "CPU"
    try:
        return RayPlacement(lay_out(mesh, _nodes(resource), resource), resource, joined=joined)
    except BaseException:
        if joined:
            ray.shutdown()
        raise


def _join() -> None:
    """Join the cluster. Ray would let SIGTERM end this process, and the process of an engine ignores it."""
    before = signal.getsignal(signal.SIGTERM)
    ray.init(address="auto", logging_level="WARNING")
    if threading.current_thread() is threading.main_thread():  # Ray sets it there alone
        signal.signal(signal.SIGTERM, before)


def _nodes(resource: str) -> list[Node]:
    """Return the living nodes of the cluster, that of this process first."""
    from ray._private import state  # has the only function for what is free on each node; vLLM uses it too

    free = state.available_resources_per_node()
    own = ray.get_runtime_context().get_node_id()
    found = [
        Node(
            one["NodeID"],
            one["NodeManagerAddress"],
            int(free.get(one["NodeID"], {}).get(resource, 0)),
            int(one["Resources"].get(resource, 0)),
        )
        for one in ray.nodes()
        if one["Alive"]
    ]
    return sorted(found, key=lambda node: node.id != own)


class RayPlacement:
    """Room for the ranks of a mesh on the nodes of a cluster. `begin.Placement` describes what it does.

    layout     the nodes, that of this process first, and the ranks of each
    resource   "GPU" or "CPU", one for each rank
    joined     leave the cluster at the end
    """

    def __init__(self, layout: Sequence[tuple[Node, tuple[int, ...]]], resource: str, *, joined: bool) -> None:
        self.hosts = [Host(node.address, ranks) for node, ranks in layout]
        self._joined, self._resource = joined, resource
        self._group: PlacementGroup | None = None
        self._agents: list[Any] = []
        self._before: tuple[str | None] | None = None  # the GPUs of this process, if they were changed
        try:
            self._reserve(layout)
            if resource == "GPU":
                self._take_gpus()
        except BaseException:
            self._free()
            raise

    def start(self, index: int, order: Mapping[str, Any]) -> Callable[[], str | None]:
        running = self._agent(index).run.remote(dict(order))

        def failed() -> str | None:
            done, _ = ray.wait([running], timeout=0)
            if not done:
                return None
            try:
                ray.get(running)
            except RayError as error:
                return str(error).strip().splitlines()[-1]
            return "it has ended"

        return failed

    def release(self) -> None:
        self._free()
        if self._joined and ray.is_initialized():
            ray.shutdown()

    def _reserve(self, layout: Sequence[tuple[Node, tuple[int, ...]]]) -> None:
        bundles = [{self._resource: len(ranks)} for _, ranks in layout]
        labels = [{_NODE_LABEL: node.id} for node, _ in layout]
        self._group = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
        if not self._group.wait(_RESERVE_SECONDS):
            text = ", ".join(f"{len(ranks)} on {node.address}" for node, ranks in layout)
            raise RankError(
                f"Ray does not reserve {self._resource}s for the mesh in {_RESERVE_SECONDS:.0f} seconds: {text}",
                expected="what was free when the mesh began",
                hint="`ray status` shows what other jobs have reserved; start again when it is free",
            )

    def _agent(self, index: int) -> Any:
        """Start the actor of a node, in whose bundle it takes all."""
        count = len(self.hosts[index].ranks)
        agent = (
            ray.remote(MeshAgent)
            .options(
                num_cpus=count if self._resource == "CPU" else 0,
                num_gpus=count if self._resource == "GPU" else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            )
            .remote()
        )
        self._agents.append(agent)
        return agent

    def _take_gpus(self) -> None:
        """Let this process use the GPUs that Ray has reserved on its node: an actor there holds them."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            raise OptionError(
                "this process uses a GPU already, and Ray may have reserved another one for rank 0",
                expected="a process that has not used CUDA",
                hint="make the LLM before anything that uses CUDA",
            )
        gpus = ray.get(self._agent(0).gpus.remote(), timeout=_START_SECONDS)
        self._before = (os.environ.get(GPU_VARIABLE),)
        os.environ[GPU_VARIABLE] = gpus

    def _free(self) -> None:
        """End the actors and give the room back, once."""
        if self._before is not None:
            (before,), self._before = self._before, None
            if before is None:
                os.environ.pop(GPU_VARIABLE, None)
            else:
                os.environ[GPU_VARIABLE] = before
        if not ray.is_initialized():
            return  # it has ended what belongs to this process
        for agent in self._agents:
            ray.kill(agent)
        self._agents.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
