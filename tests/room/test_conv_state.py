"""A convolution beside attention: a state that stands once per sequence, beside pages, in captured steps too.

Embeddings go through a causal convolution of four tokens. Its state is the last three inputs of each sequence. Tokens
are compared with those of the traced program on whole sequences.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_definition import change_definition
from hidden_output import decode_embeddings
from staged import interpreted
from tiny import TINY
from torch import nn
from toy_conv import WIDTH, InsertConvState, conv_ops
from toy_ops import toy_ops

from ingot import LLM, SamplingParams, compile_model
from ingot.ir import ops, recipe
from ingot.ir.harness import teacher_forced
from ingot.ir.ops import OPS
from ingot.models.architectures import Entry
from ingot.models.dense import DenseDecoder, expected_matches
from ingot.passes import pipeline

pytestmark = pytest.mark.xdist_group("conv-state")
NAME = "llama-plain"
PROMPTS = [prompt for prompt in TINY[NAME].prompts() if len(prompt) in (1, 17, 33)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


class Mixed(nn.Module):
    def __init__(self, decoder: DenseDecoder) -> None:
        super().__init__()
        self.decoder, embedding = decoder, decoder.embed.weight
        self.conv = nn.Parameter(torch.empty(WIDTH, embedding.shape[1], dtype=embedding.dtype))

    def forward(self, tokens: Any, positions: Any, token_seqs: Any, logit_rows: Any) -> torch.Tensor:
        h = OPS["toy_causal_conv"](ops.embedding(tokens, self.decoder.embed.weight), self.conv, positions)
        logits, _ = decode_embeddings(self.decoder, h, positions, token_seqs, logit_rows)
        return logits


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def folder(request: Any, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
    taps = recipe.take_slice(recipe.source("model.embed_tokens.weight"), 0, 7, 7 + WIDTH)
    entry = lambda spec, module: {"main": Entry(Mixed(module), expected_matches(spec), weights={"conv": taps})}  # noqa: E731
    change_definition(monkeypatch, "LlamaForCausalLM", more_entries=entry)
    monkeypatch.setattr(pipeline, "load_user_pass", {InsertConvState.name: InsertConvState}.get)
    limits = {"max_batch": 4, "max_tokens": 128, "max_seq_len": 96}
    backend, passes = "reference" if request.param == "cpu" else "triton", f"default,{InsertConvState.name}"
    options = {"target": request.param, "backend": backend, "dtype": "float32", "passes": passes, **limits}
    with toy_ops(conv_ops):
        compile_model(checkpoint(NAME), tmp_path / "conv.ingot", **options)
        yield tmp_path / "conv.ingot", interpreted(checkpoint(NAME), **options)


def test_a_convolution_has_its_state(folder: tuple[Path, Any]) -> None:
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    llm = LLM(folder[0], num_kv_pages=40, cuda_graphs="all")
    served = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, PARAMS)]
    sequences = [prompt + tokens[:-1] for prompt, tokens in zip(PROMPTS, served, strict=True)]
    whole = teacher_forced(folder[1].program.input_types(), folder[1], sequences)
    for prompt, tokens, logits in zip(PROMPTS, served, whole, strict=True):
        assert tokens == logits[len(prompt) - 1 :].argmax(-1).tolist()
    pieces = LLM(folder[0], num_kv_pages=6, max_num_batched_tokens=12)  # prompts in chunks, and preempted
    assert [list(out.outputs[0].token_ids) for out in pieces.generate(prompts, PARAMS)] == served
    assert llm.loaded.plan.states["conv"].unit == "sequence" and "state_read" in llm.loaded.plan.inputs
