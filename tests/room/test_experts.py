"""A decoder with experts from the checkpoint to served tokens, and checkpoints that lack experts or have others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TINY

from ingot import LLM, SamplingParams, compile_model
from ingot.compile.request import Request
from ingot.ir import ops
from ingot.ir.errors import CheckpointError
from ingot.ir.numerics.harness import teacher_forced
from ingot.ir.parse import parse_program
from ingot.runtime.loading.loader import load_artifact

# One worker, for the artifact that the tests share.
pytestmark = pytest.mark.xdist_group("experts")

NAME = "qwen2_moe-shared"
LIMITS = {"max_seq_len": 128, "max_batch": 4, "max_tokens": 128}
PROMPTS = [[7], list(range(3, 20)), [(i * 37) % 211 for i in range(41)]]


@pytest.fixture(scope="module")
def deterministic(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "moe.ingot"
    compile_model(checkpoint(NAME), folder, backend="reference", deterministic=True, **LIMITS)
    return folder


def test_results_do_not_depend_on_who_else_an_expert_serves(deterministic: Path) -> None:
    loaded = load_artifact(deterministic, num_pages=32)

    def run(inputs: Any) -> dict[str, torch.Tensor]:
        return loaded.executor.launch(inputs).outputs

    found = [teacher_forced(loaded.executor.inputs, run, PROMPTS, chunk=chunk, pages=32, seed=2) for chunk in (None, 7)]
    assert all(map(torch.equal, *found))


def test_logits_of_a_router_stay_float32(deterministic: Path) -> None:
    final = parse_program((deterministic / "program.ir").read_text())
    calls = list(final.calls(ops.route.overload))
    assert len(calls) == 2, "the second layer is dense"
    assert all(call.args[0].target is ops.cast.overload for call in calls)  # type: ignore[union-attr]


def test_it_generates(deterministic: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    together = LLM(deterministic, num_kv_pages=32).generate([{"prompt_token_ids": one} for one in PROMPTS], params)
    alone = LLM(deterministic, num_kv_pages=32).generate([{"prompt_token_ids": PROMPTS[1]}], params)
    assert together[1].outputs[0].token_ids == alone[0].outputs[0].token_ids


def _changed(folder: Path, into: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    into.mkdir()
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    (into / "config.json").write_bytes((folder / "config.json").read_bytes())
    return into


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".experts." in name and int(name.split(".experts.")[1][0]) >= 5]:
        del tensors[name]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    for expert in (7, 8, 9):
        tensors[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"] = torch.zeros(31, 66)


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.experts.3.down_proj.weight"] = torch.zeros(66, 30)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            _drop,
            r"12 missing from the checkpoint:\n    model\.layers\.\{0,2\}\.mlp\.experts\.\{5-6\}\.down_proj\.weight",
        ),
        (_add, r"3 extra, .*\n    model\.layers\.0\.mlp\.experts\.\{7-9\}\.up_proj\.weight \[31, 66\]"),
        (_reshape, r"experts\.3\.down_proj\.weight: expected \[66, 31\], found \[66, 30\]"),
    ],
)
def test_experts_that_do_not_fit_are_named_as_ranges(
    change: Callable[[dict[str, torch.Tensor]], None], line: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    assert TINY[NAME].config["num_experts"] == 7
    folder = _changed(checkpoint(NAME), tmp_path / "checkpoint", change)
    with pytest.raises(CheckpointError, match=line):
        Request.read(folder, backend="reference").trace()
