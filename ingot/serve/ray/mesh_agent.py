"""The actor that Ray starts on each node of a mesh. Importing this imports neither Ray nor torch."""

import os
from collections.abc import Mapping
from typing import Any

from ingot.ir.machine.gpus import GPU_VARIABLE
from ingot.runtime.ranks.hosts.agent import run_agent


class MeshAgent:
    """Holds what Ray has reserved on a node, and runs Ingot's agent there."""

    def gpus(self) -> str:
        """Return the GPUs that Ray has given to this actor, as CUDA_VISIBLE_DEVICES takes them."""
        return os.environ.get(GPU_VARIABLE, "")

    def run(self, order: Mapping[str, Any]) -> None:
        """Run the agent until rank 0 closes its connection. `order` is an `AgentOrder` as JSON."""
        # Ray sets it to the CPUs that it has reserved. The order has rank 0's value, if there is one.
        os.environ.pop("OMP_NUM_THREADS", None)
        run_agent(dict(order))
