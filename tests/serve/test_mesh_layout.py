"""On which nodes of a Ray cluster the ranks of a mesh run, and the option that asks for it. Needs no Ray."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ingot.ir.errors import OptionError, TargetError
from ingot.serve import executor_backend
from ingot.serve.async_llm import AsyncLLM
from ingot.serve.ray.mesh_layout import Node, lay_out

pytestmark = pytest.mark.xdist_group("serve")


def nodes(*free: int) -> list[Node]:
    return [Node(f"n{place}", f"10.0.0.{place}", count, count + 1) for place, count in enumerate(free)]


@pytest.mark.parametrize(
    ("mesh", "free", "expected"),
    [
        ({"tp": 2}, (1, 1), {"n0": (0,), "n1": (1,)}),
        ({"tp": 2}, (4, 4), {"n0": (0, 1)}),
        ({"pp": 2, "tp": 4}, (4, 8), {"n0": (0, 1, 2, 3), "n1": (4, 5, 6, 7)}),
        # Ranks that share layers stay together, though the first node has room for one more.
        ({"pp": 2, "tp": 2}, (3, 2), {"n0": (0, 1), "n1": (2, 3)}),
        # They cannot.
        ({"pp": 2, "tp": 2}, (3, 1), {"n0": (0, 1, 2), "n1": (3,)}),
        ({"pp": 3}, (1, 1, 9), {"n0": (0,), "n2": (1, 2)}),
        ({"tp": 16}, (8, 0, 8), {"n0": tuple(range(8)), "n2": tuple(range(8, 16))}),
    ],
)
def test_ranks_fill_nodes(mesh: dict[str, int], free: tuple[int, ...], expected: Mapping[str, tuple[int, ...]]) -> None:
    assert {node.id: ranks for node, ranks in lay_out(mesh, nodes(*free), "GPU")} == expected


def test_a_cluster_that_is_too_small() -> None:
    with pytest.raises(TargetError, match="the mesh pp=2 tp=4 needs 8 GPUs, and the Ray cluster has 5 free") as caught:
        lay_out({"pp": 2, "tp": 4}, nodes(1, 4), "GPU")
    assert caught.value.where == "GPUs of each node: 10.0.0.0 has 1 free of 2; 10.0.0.1 has 4 free of 5"
    assert "ray start" in caught.value.hint
    with pytest.raises(TargetError, match="the node of this process has no free CPU, and rank 0 of the mesh tp=2"):
        lay_out({"tp": 2}, nodes(0, 4), "CPU")


def test_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="distributed_executor_backend is 'rey'") as caught:
        executor_backend.begun_by("rey", tmp_path)
    assert caught.value.expected == "'mp' or 'ray'"
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(TargetError, match="a mesh on several hosts needs the package 'ray'") as missing:
        executor_backend.begun_by("ray", tmp_path)
    assert missing.value.hint == "pip install 'ingot[ray]'"


def test_an_artifact_for_one_process(chat_artifact: Path) -> None:
    from ingot.runtime.ranks.hosts.begin import begun_on_hosts

    def place(mesh: object, device: str) -> None:
        raise AssertionError("nothing is reserved")

    with pytest.raises(OptionError, match="the ranks of an artifact for one process on several hosts") as caught:
        begun_on_hosts(chat_artifact, place).__enter__()  # type: ignore[arg-type]
    assert "--mesh" in caught.value.hint


def test_replicas_are_on_this_host(chat_artifact: Path) -> None:
    with pytest.raises(OptionError, match="replicas is 2, and distributed_executor_backend is 'ray'"):
        AsyncLLM(chat_artifact, replicas=2, distributed_executor_backend="ray")
    with pytest.raises(OptionError, match="distributed_executor_backend is 'rey'"):
        AsyncLLM(chat_artifact, distributed_executor_backend="rey")
