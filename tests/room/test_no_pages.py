"""A model without a paged KV cache: a convolution, whose state stands once per sequence, and nothing else.

Tokens are compared with those of the traced program on whole sequences.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY
from torch import nn
from toy_conv import conv_artifact, taps

from ingot import LLM, SamplingParams
from ingot.ir import ops
from ingot.ir.errors import OptionError
from ingot.ir.numerics.harness import teacher_forced
from ingot.ir.ops import OPS
from ingot.models.blocks.decoder import Decoder, DecoderSpec

pytestmark = pytest.mark.xdist_group("no-pages")
NAME = "llama-plain"
PROMPTS = [prompt for prompt in TINY[NAME].prompts() if len(prompt) in (1, 17, 33)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=16, ignore_eos=True)


class Convolution(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.embed, self.norm, self.head = decoder.embed, decoder.norm, decoder.head
        self.conv = taps(decoder)

    def forward(self, tokens: Any, positions: Any, token_seqs: Any, logit_rows: Any) -> torch.Tensor:
        h = OPS["toy_causal_conv"](ops.embedding(tokens, self.embed.weight), self.conv, positions)
        return self.head(self.norm(ops.select_rows(h, logit_rows)))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def folder(request: Any, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
    layers = lambda spec: (*DecoderSpec.ignored(spec), r"model\.layers\..*")  # noqa: E731
    made = conv_artifact(
        tmp_path, checkpoint(NAME), monkeypatch, Convolution, request.param, max_tokens=64, ignored=layers
    )
    with made as found:
        yield found


def test_a_model_without_pages_is_served(folder: tuple[Path, Any]) -> None:
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    llm = LLM(folder[0], cuda_graphs="all")
    assert llm.loaded.plan.memory.groups == {} and llm.loaded.pages == {}
    served = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, GREEDY)]
    sequences = [prompt + tokens[:-1] for prompt, tokens in zip(PROMPTS, served, strict=True)]
    whole = teacher_forced(folder[1].program.input_types(), folder[1], sequences)
    for prompt, tokens, logits in zip(PROMPTS, served, whole, strict=True):
        assert tokens == logits[len(prompt) - 1 :].argmax(-1).tolist()
    pieces = LLM(folder[0], max_num_batched_tokens=12, max_num_seqs=2)  # prompts in chunks, one after the other
    assert [list(out.outputs[0].token_ids) for out in pieces.generate(prompts, GREEDY)] == served
    sampled = [one.generate(prompts, SAMPLED) for one in (llm, pieces)]
    assert [out.outputs[0].token_ids for out in sampled[0]] == [out.outputs[0].token_ids for out in sampled[1]]
    for options in ({"num_kv_pages": 4}, {"enable_prefix_caching": True}):
        with pytest.raises(OptionError, match="without a paged KV cache"):
            LLM(folder[0], **options)
