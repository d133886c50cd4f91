"""Tools that run an artifact of a mesh."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn

import ingot.cli.main as cli
from ingot.compile.golden import read_golden, replay
from ingot.ir.errors import InternalError
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.ranks.in_process import bind_ranks

pytestmark = pytest.mark.xdist_group("ranks")
MESHES = ("tp=2", "pp=2", "pp=3", "pp=2 tp=2")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_benchmarks_run_on_all_ranks(mesh: str, artifact: Callable[[str, str], Path], tmp_path: Path) -> None:
    path = artifact("llama", mesh)
    sizes = ["--input-len", "8", "--output-len", "6"]
    found = tmp_path / "found.json"
    assert (
        cli.run(cli.INGOT, ["bench", "latency", str(path), *sizes, "--batch-size", "3", "--json", str(found)])
        == cli.DONE
    )
    assert json.loads(found.read_text())["avg_latency"] > 0
    assert (
        cli.run(cli.INGOT, ["bench", "throughput", str(path), *sizes, "--num-prompts", "7", "--json", str(found)])
        == cli.DONE
    )
    result = json.loads(found.read_text())
    assert result["num_requests"] == 7 and result["total_num_tokens"] == 7 * 14


@pytest.mark.parametrize("mesh", drawn(1, MESHES))
def test_a_golden_run_of_all_ranks_is_verified(mesh: str, artifact: Callable[[str, str], Path]) -> None:
    """The compile runs all ranks in its process, and `verify` repeats that bit by bit."""
    path = artifact("llama", mesh)
    threads = torch.get_num_threads()
    run = read_golden(open_artifact(path))
    assert run.machine.threads == 1 and run.entries["main"].steps
    assert cli.run(cli.INGOT, ["verify", str(path)]) == cli.DONE
    assert torch.get_num_threads() == threads
    alone = read_golden(open_artifact(artifact("llama", "")))
    tokens, wanted = ([row.token for step in one.entries["main"].steps for row in step.rows] for one in (run, alone))
    assert tokens == wanted, "the tokens are those of one device"


def test_ranks_that_differ_are_named(artifact: Callable[[str, str], Path]) -> None:
    """A planted fault: one rank's head is changed after loading, so the logits of ranks of its stage differ."""
    loaded = bind_ranks(open_artifact(artifact("llama", "pp=2 tp=2")))
    run = read_golden(loaded.artifact)
    executor: Any = loaded.executor
    begin = executor._executors[3]._lanes[0][0].end

    def planted(*given: Any) -> Any:
        outputs = begin(*given)
        return {**outputs, "logits": outputs["logits"] + 1}

    executor._executors[3]._lanes[0][0].end = planted
    with pytest.raises(InternalError, match=r"rank 3 \(pp=1 tp=1\) returns other logits than rank 2 \(pp=1 tp=0\)"):
        list(replay(loaded, run.requests, run.schedule, run.seed))


def test_an_error_of_a_rank_ends_the_others(artifact: Callable[[str, str], Path]) -> None:
    loaded = bind_ranks(open_artifact(artifact("llama", "pp=2 tp=2")))
    run = read_golden(loaded.artifact)
    executor: Any = loaded.executor

    def planted(*given: Any) -> Any:
        raise ZeroDivisionError("planted")

    executor._executors[1]._lanes[0][0].begin = planted
    with pytest.raises(ZeroDivisionError, match="planted"):
        list(replay(loaded, run.requests, run.schedule, run.seed))
