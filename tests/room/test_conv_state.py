"""A convolution beside attention: a state that stands once per sequence, beside pages, in captured steps too.

Embeddings go through a causal convolution of four tokens. Its state is the last three inputs of each sequence. Tokens
are compared with those of the traced program on whole sequences.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hidden_output import decode_embeddings
from tiny import TINY
from torch import nn
from toy_conv import conv_artifact, taps

from ingot import LLM, SamplingParams
from ingot.ir.numerics.harness import teacher_forced
from ingot.ir.ops import OPS
from ingot.models.blocks.decoder import Decoder

pytestmark = pytest.mark.xdist_group("conv-state")
NAME = "llama-plain"
PROMPTS = [prompt for prompt in TINY[NAME].prompts() if len(prompt) in (1, 17, 33)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


class Mixed(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder, self.conv = decoder, taps(decoder)

    def forward(self, tokens: Any, positions: Any, token_seqs: Any, logit_rows: Any) -> torch.Tensor:
        at = self.decoder.at(positions, token_seqs)
        h = OPS["toy_causal_conv"](self.decoder.embed(tokens, at), self.conv, positions)
        return decode_embeddings(self.decoder, h, at, logit_rows)[0]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def folder(request: Any, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
    with conv_artifact(tmp_path, checkpoint(NAME), monkeypatch, Mixed, request.param, max_tokens=128) as found:
        yield found


def test_a_convolution_has_its_state(folder: tuple[Path, Any]) -> None:
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    llm = LLM(folder[0], num_kv_pages=40, cuda_graphs="all")
    served = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, PARAMS)]
    sequences = [prompt + tokens[:-1] for prompt, tokens in zip(PROMPTS, served, strict=True)]
    whole = teacher_forced(folder[1].program.input_types(), folder[1], sequences)
    for prompt, tokens, logits in zip(PROMPTS, served, whole, strict=True):
        assert tokens == logits[len(prompt) - 1 :].argmax(-1).tolist()
    pieces = LLM(folder[0], num_kv_pages=6, max_num_batched_tokens=12)  # prompts in chunks, in few pages
    assert [list(out.outputs[0].token_ids) for out in pieces.generate(prompts, PARAMS)] == served
    assert llm.loaded.plan.states["conv"].unit == "sequence" and "state_read" in llm.loaded.plan.inputs


def served(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens that follow a prompt, and how many of the prompt's were found."""
    (out,) = llm.generate([{"prompt_token_ids": prompt}], PARAMS)
    return list(out.outputs[0].token_ids), out.num_cached_tokens or 0


def test_what_prompts_share_is_found(folder: tuple[Path, Any]) -> None:
    """Pages and the state at their end: of the turn before, of the same prompt, and of a common beginning."""
    shared = LLM(folder[0], num_kv_pages=60, max_num_batched_tokens=32, cuda_graphs="all")
    alone = LLM(folder[0], num_kv_pages=60, enable_prefix_caching=False)
    assert (shared.loaded.slots, alone.loaded.slots) == (3 * 4, 4)
    system = PROMPTS[-1]  # 33 tokens
    turn = served(alone, [*system, 1, 2, 3])[0]
    asked = [
        ([*system, 1, 2, 3], 0),
        ([*system, 1, 2, 3, *turn, 4, 5], 48),  # the 36th token and 15 more are there
        ([*system, 6, 7, 8], 32),  # a step of 32 tokens has ended there
        ([*system, 1, 2, 3], 32),
        ([*system[:17], 9, 9, 9], 0),  # its pages are there, and no slot
        ([*system[:16], 8, 8, 8, 8], 16),
        (system[:16], 0),
    ]
    for prompt, count in asked:
        tokens, found = served(shared, prompt)
        assert found == count and tokens == served(alone, prompt)[0]
        (logits,) = teacher_forced(folder[1].program.input_types(), folder[1], [prompt + tokens[:-1]])
        assert tokens == logits[len(prompt) - 1 :].argmax(-1).tolist()
    together: list[Any] = [{"prompt_token_ids": [*system, number]} for number in range(4)]
    assert [out.num_cached_tokens for out in shared.generate(together, PARAMS)] == [32] * 4
