"""Tools that run an artifact of a mesh."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import ingot.cli.main as cli

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_benchmarks_run_on_all_ranks(
    mesh: str, artifact: Callable[[str, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
