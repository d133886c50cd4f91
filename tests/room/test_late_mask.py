"""A mask over the vocabulary that depends on the last token, made by the host while the model runs; a second output.

The mask is a late step input of a feature: the host fills it in once the step before has given its tokens, while the
forward segment of the next step runs. Where steps are captured, the ending is a graph of its own.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changed_definition import change_definition
from hidden_output import DecoderWithHidden
from recorded_steps import RecordedSteps
from tiny import TINY
from toy_ops import toy_ops

from ingot import LLM, SamplingParams, compile_model
from ingot.ir import ops
from ingot.ir.features import Feature, Fed, OpCall, StepInput, register_feature
from ingot.ir.features.feature import EndingUse
from ingot.ir.features.registry import forget_feature
from ingot.ir.ops import OPS, Op, Sample, define
from ingot.ir.placements import whole
from ingot.ir.types import TensorType
from ingot.models.architectures import Entry

pytestmark = pytest.mark.xdist_group("late-mask")
NAME = "llama-plain"
VOCAB = TINY[NAME].config["vocab_size"]
WORDS = -(-VOCAB // 32)
PROMPTS: list[Any] = [{"prompt_token_ids": TINY[NAME].prompts()[index]} for index in (1, 4, 5)]


def allowed(token: int) -> np.ndarray:
    """Behind a token only those of the other parity."""
    return np.arange(VOCAB) % 2 != token % 2


def mask_op() -> dict[str, Op]:
    @define(
        placement=whole,
        flops=1,
        samples=lambda g, dtype: [Sample((torch.randn(2, 40, generator=g), torch.full((2, 2), -2, dtype=torch.int32)))],
        fake=lambda logits, toy_allowed: torch.empty_like(logits),
        fusible=False,
        legal="cached",
        on_device=True,
    )
    def toy_mask(logits: torch.Tensor, toy_allowed: torch.Tensor) -> torch.Tensor:
        """Logits [L, V], -inf where bit v % 32 of word v // 32 of `toy_allowed` i32[L, words] is not set."""
        token = torch.arange(logits.shape[1], device=logits.device)
        bits = (toy_allowed[:, token // 32] >> (token % 32)) & 1
        return logits.masked_fill(bits == 0, float("-inf"))

    return {"toy_mask": toy_mask}


def fill(array: np.ndarray, fed: Fed) -> None:
    array[:] = -1
    for row, sequence in enumerate(fed.sampled):
        last = (sequence.output_ids or sequence.prompt_ids)[-1]
        bits = np.zeros(WORDS * 32, np.uint8)
        bits[:VOCAB] = allowed(last)
        array[row] = np.packbits(bits, bitorder="little").view(np.int32)


MASK = Feature(
    "toy-mask",
    inputs=(StepInput("toy_allowed", TensorType(torch.int32, ("L", WORDS)), -1, fill, late=True),),
    between=(OpCall("toy_mask", ("choices",), {"logits": "choices"}),),
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def folder(request: Any, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: Any) -> Iterator[Path]:
    ending = EndingUse("sample", (), ("toy-mask",))

    def entry(spec: Any, module: Any) -> dict[str, Entry]:
        return {"main": Entry(DecoderWithHidden(module), outputs=("logits", "hidden"), ending=ending)}

    change_definition(monkeypatch, "LlamaForCausalLM", more_entries=entry)
    options = {
        "target": request.param,
        "backend": "reference" if request.param == "cpu" else "triton",
        "dtype": "float32",
    }
    with toy_ops(mask_op):
        register_feature(MASK)
        try:
            compile_model(
                checkpoint(NAME), tmp_path / "masked.ingot", max_batch=4, max_tokens=128, max_seq_len=96, **options
            )
            yield tmp_path / "masked.ingot"
        finally:
            forget_feature(MASK.name)


def test_a_mask_follows_the_last_token(folder: Path) -> None:
    llm = LLM(folder, num_kv_pages=30, cuda_graphs="all")
    recorded = RecordedSteps(llm, keep=("hidden", "logits"))
    for params in (
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(seed=3, max_tokens=20),
    ):
        for prompt, out in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
            tokens = [prompt["prompt_token_ids"][-1], *out.outputs[0].token_ids]
            assert all(one % 2 != other % 2 for one, other in itertools.pairwise(tokens))
    llm.llm_engine.launch_through(recorded)
    llm.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    params = {name: value.cpu() for name, value in llm.loaded.executor.params.items()}
    for step in recorded.outputs:  # the second output is what the logits are made of
        normed = ops.rms_norm(step["hidden"], params["norm.weight"], eps=TINY[NAME].config["rms_norm_eps"])
        logits = ops.linear(normed, params["head.weight"])
        assert step["hidden"].shape[0] == 1 and torch.allclose(logits, step["logits"], rtol=1e-3, atol=1e-3)
    assert OPS["toy_mask"].on_device and len(recorded.outputs) == 5
