"""A convolution beside attention: a state that stands once per sequence, beside pages, in captured steps too.

Embeddings go through a causal convolution of four tokens. Its state is the last three inputs of each sequence. Tokens
are compared with those of the traced program on whole sequences.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from changed_definition import change_definition
from hidden_output import decode_embeddings
from staged import interpreted
from tiny import TINY
from torch import nn
from toy_ops import toy_ops

from ingot import LLM, SamplingParams, compile_model
from ingot.ir import ops, recipe
from ingot.ir.harness import teacher_forced
from ingot.ir.ops import OPS, Effect, Op, Sample, define
from ingot.ir.program import Stage, StateSpec, tensor_type
from ingot.ir.record import Numerics
from ingot.ir.types import TensorType
from ingot.models.architectures import Entry
from ingot.models.dense import DenseDecoder, expected_matches
from ingot.passes import pipeline
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter

pytestmark = pytest.mark.xdist_group("conv-state")
NAME, WIDTH = "llama-plain", 4
PROMPTS = [prompt for prompt in TINY[NAME].prompts() if len(prompt) in (1, 17, 33)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def conv_ops() -> dict[str, Op]:
    def mixed(x: Any, weight: Any, places: Any, before: Any) -> torch.Tensor:
        """Taps at tokens of the same step where `places` allow it, else at the rows of `before` [T, WIDTH - 1, C]."""
        index, out = torch.arange(x.shape[0], device=x.device), torch.zeros_like(x)
        for tap in range(WIDTH):
            at = (WIDTH - 1 + places - tap).clamp(0, WIDTH - 2)
            inside = (places >= tap)[:, None]
            out = out + torch.where(inside, x[(index - tap).clamp(min=0)], before[index, at]) * weight[tap]
        return out

    def conv_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
        return [Sample((torch.ones(3, 2), torch.ones(WIDTH, 2), torch.zeros(3).int()))]

    @define(samples=conv_samples, fake=lambda x, *_: torch.empty_like(x), fusible=False, legal="pure")
    def toy_causal_conv(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A causal convolution of x [T, C] with weight [WIDTH, C] along each sequence, from its beginning."""
        return mixed(x, weight, positions.long(), x.new_zeros(x.shape[0], WIDTH - 1, x.shape[1]))

    def step_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
        ints = [torch.tensor([value], dtype=torch.int32) for value in (0, 0, 0, 1)]
        return [Sample((torch.ones(2, WIDTH - 1, 2), torch.ones(1, 2), torch.ones(WIDTH, 2), *ints))]

    def fake(state: Any, x: Any, weight: Any, token_seqs: Any, state_read: Any, *_: Any) -> tuple[torch.Tensor, ...]:
        return torch.empty_like(x), state.new_empty(state_read.shape[0], *state.shape[1:])

    reads = {"legal": "cached", "effect": Effect.READS_STATE, "fusible": False, "on_device": True}

    @define(samples=step_samples, fake=fake, **reads)  # type: ignore[arg-type]
    def toy_causal_conv_step(
        state: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        token_seqs: torch.Tensor,
        state_read: torch.Tensor,
        q_starts: torch.Tensor,
        q_lens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(`toy_causal_conv` of x, from slots `state_read` on; the last inputs of each sequence [B, WIDTH - 1, C])."""
        kept = torch.where((state_read >= 0)[:, None, None], state[state_read.clamp(min=0).long()], 0)
        seqs = token_seqs.clamp(min=0).long()
        places = torch.arange(x.shape[0], device=x.device) - q_starts[seqs]
        last = q_lens[:, None].long() - WIDTH + 1 + torch.arange(WIDTH - 1, device=x.device)  # [B, WIDTH - 1]
        fed = x[(q_starts[:, None] + last).clamp(0, x.shape[0] - 1)]
        rows = torch.arange(last.shape[0], device=x.device)[:, None]
        after = torch.where((last >= 0)[:, :, None], fed, kept[rows, (last + WIDTH - 1).clamp(0, WIDTH - 2)])
        return mixed(x, weight, places, kept[seqs]), after

    return {"toy_causal_conv": toy_causal_conv, "toy_causal_conv_step": toy_causal_conv_step}


@dataclass(frozen=True)
class InsertConvState(Pass):
    name: ClassVar[str] = "toy-conv-state"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    joins: ClassVar[Stage] = Stage.CACHED

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        slots = TensorType(torch.int32, ("B",))
        read, write = (program.add_input(name, slots) for name in ("state_read", "state_write"))
        (node,) = program.calls(OPS["toy_causal_conv"].overload)
        rewriter.take(node)
        x, weight, _ = node.args
        held = TensorType(tensor_type(x).dtype, ("S", WIDTH - 1, tensor_type(x).shape[1]))
        state = program.add_state("conv", StateSpec("conv", "conv", "sequence", held))
        fed = [program.find(name) for name in ("token_seqs", "q_starts", "q_lens")]
        both = rewriter.call(OPS["toy_causal_conv_step"], state, x, weight, fed[0], read, *fed[1:], before=node)
        out, after = (rewriter.call(operator.getitem, both, index, before=node) for index in (0, 1))
        written = rewriter.call(ops.write_rows, state, write, after, before=node)
        rewriter.replace(node, out)
        program.set_outputs({**program.output_nodes(), "conv": written})


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
