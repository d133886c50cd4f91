"""Checkpoints in bfloat16 on a GPU: logits err no more than the reference's in bfloat16, and the most likely token is
that of float32 wherever such errors leave no doubt. `-rP` shows the figures."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import disagreement
from safetensors.torch import load_file, save_file
from serve_artifact import teacher_forced_artifact
from tiny import CHECKPOINTS

from ingot import LLM, SamplingParams, compile_model

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("bf16_agreement")]
PICO = Path(__file__).parents[2] / "models" / "pico"
LIMITS: dict[str, Any] = {"max_batch": 8, "max_tokens": 512, "max_seq_len": 160}
# All tokens of a sequence at once, a few of each a step, one by one: steps of all bucket classes.
CHUNKS = (None, 15, 5, 1)
NEW_TOKENS = 100
# Of the positions so many are beyond doubt; the others say nothing of the most likely token.
LEAST_SHARE = 0.9
CODE = (
    'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a file."""\n    with open(path',
    "import unittest\n\n\nclass TestQueue(unittest.TestCase):\n    def setUp(self):\n        self.queue =",
    "class Node:\n    def __init__(self, value, left=None, right=None):\n        self.value = value\n",
)


@dataclass(frozen=True)
class Expected:
    """Sequences that the model made by itself, and their logits by the references: in float32, and in bfloat16."""

    checkpoint: Path
    sequences: list[list[int]]
    logits: torch.Tensor
    rounded: torch.Tensor


def in_bf16(source: Path, target: Path) -> Path:
    """A copy of a checkpoint whose weights are bfloat16."""
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return target


def expected(checkpoint: Path, prompts: list[Any], folder: Path) -> Expected:
    artifacts = {dtype: str(folder / f"{dtype}.ingot") for dtype in ("float32", "bfloat16")}
    for dtype, artifact in artifacts.items():
        compile_model(checkpoint, artifact, target="cpu", backend="reference", dtype=dtype, jobs=1, **LIMITS)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = LLM(artifacts["float32"]).generate(prompts, params)
    sequences = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    logits = [torch.cat(teacher_forced_artifact(artifact, sequences, None)) for artifact in artifacts.values()]
    return Expected(checkpoint, sequences, *logits)


@pytest.fixture(scope="module", params=["pico", "gemma2-capped", "gemma3_text-old"])
def model(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Expected:
    folder = tmp_path_factory.mktemp("bf16")
    if request.param == "pico":
        return expected(in_bf16(PICO, folder / "checkpoint"), list(CODE), folder)
    prompts = CHECKPOINTS[request.param].prompts()
    chosen = [{"prompt_token_ids": prompt[:16]} for prompt in (prompts[-1], prompts[3], prompts[4])]
    return expected(in_bf16(checkpoint(request.param), folder / "checkpoint"), chosen, folder)


def check(model: Expected, found: torch.Tensor) -> None:
    problem = disagreement(found, model.logits, model.rounded, torch.bfloat16)
    assert problem is None, problem
    largest = float((model.rounded - model.logits).abs().max())
    top = model.logits.topk(2, -1)
    sure = top.values[:, 0] - top.values[:, 1] > 2 * largest
    same = found.argmax(-1) == top.indices[:, 0]
    print(
        f"{len(same)} positions, the reference's error {largest:.3g} at most, ours "
        f"{float((found - model.logits).abs().max()):.3g}; beyond doubt {float(sure.float().mean()):.1%}, "
        f"the same token at {float(same.float().mean()):.1%}"
    )
    wrong = (sure & ~same).nonzero().flatten().tolist()
    assert not wrong, f"another token than that of float32 at {wrong}"
    assert float(sure.float().mean()) >= LEAST_SHARE


def test_top_tokens_and_logits_are_those_of_float32(model: Expected, tmp_path: Path) -> None:
    artifact = tmp_path / "a.ingot"
    report = compile_model(model.checkpoint, artifact, target="cuda", dtype="bfloat16", **LIMITS)
    assert report.nodes_per_backend["triton"] > 0
    for chunk in CHUNKS:
        print(f"{chunk or 'all'} tokens of a sequence a step")
        check(model, torch.cat(teacher_forced_artifact(str(artifact), model.sequences, chunk)))
