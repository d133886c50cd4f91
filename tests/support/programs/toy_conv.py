"""A causal convolution as a model of a test has it: the op, its step with a state, and the pass that puts one for the
other. The state is the last inputs of each sequence, and stands once per sequence."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from changed_definition import change_definition
from staged import interpreted
from torch import nn
from toy_ops import toy_ops

from ingot import compile_model
from ingot.ir import ops, recipe
from ingot.ir.artifact.record import Numerics
from ingot.ir.numerics.harness import InterpreterRun
from ingot.ir.ops import OPS, Effect, Op, Sample, define
from ingot.ir.placements import whole
from ingot.ir.program import Stage, StateSpec, tensor_type
from ingot.ir.types import LOADED_DIMS, Dim, TensorType
from ingot.models.architectures import Entry
from ingot.models.params import parameter
from ingot.passes import pipeline
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter

WIDTH = 4  # tokens that a convolution sees


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

    @define(
        placement=whole,
        flops=1,
        samples=conv_samples,
        fake=lambda x, *_: torch.empty_like(x),
        fusible=False,
        legal="pure",
    )
    def toy_causal_conv(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A causal convolution of x [T, C] with weight [WIDTH, C] along each sequence, from its beginning."""
        return mixed(x, weight, positions.long(), x.new_zeros(x.shape[0], WIDTH - 1, x.shape[1]))

    def step_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
        ints = [torch.tensor([value], dtype=torch.int32) for value in (0, 0, 0, 1)]
        return [Sample((torch.ones(2, WIDTH - 1, 2), torch.ones(1, 2), torch.ones(WIDTH, 2), *ints))]

    def fake(state: Any, x: Any, weight: Any, token_seqs: Any, state_read: Any, *_: Any) -> tuple[torch.Tensor, ...]:
        return torch.empty_like(x), state.new_empty(state_read.shape[0], *state.shape[1:])

    reads = {"legal": "cached", "effect": Effect.READS_STATE, "fusible": False, "on_device": True}

    @define(placement=whole, flops=1, samples=step_samples, fake=fake, **reads)  # type: ignore[arg-type]
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
    """The convolution gets its state: `--passes default,toy-conv-state`."""

    name: ClassVar[str] = "toy-conv-state"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    joins: ClassVar[Stage] = Stage.CACHED

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        program.dims.setdefault("B", Dim("B", 1, context.max_batch))
        by_sequence = TensorType(torch.int32, ("B",))
        read, write, starts, lens = (
            program.find(name) if name in program.input_types() else program.add_input(name, by_sequence)
            for name in ("state_read", "state_write", "q_starts", "q_lens")
        )
        (node,) = program.calls(OPS["toy_causal_conv"].overload)
        rewriter.take(node)
        x, weight, _ = node.args
        program.dims["S"] = Dim("S", 1, LOADED_DIMS["S"])
        held = TensorType(tensor_type(x).dtype, ("S", WIDTH - 1, tensor_type(x).shape[1]))
        state = program.add_state("conv", StateSpec("conv", "conv", "sequence", held))
        seqs = program.find("token_seqs")
        both = rewriter.call(OPS["toy_causal_conv_step"], state, x, weight, seqs, read, starts, lens, before=node)
        out, after = (rewriter.call(operator.getitem, both, index, before=node) for index in (0, 1))
        written = rewriter.call(ops.write_rows, state, write, after, before=node)
        rewriter.replace(node, out)
        program.set_outputs({**program.output_nodes(), "conv": written})


def taps(decoder: Any) -> nn.Parameter:
    """The weight [WIDTH, C] of a convolution: rows of the decoder's embedding."""
    embedding = decoder.embed.weight
    rows = recipe.take_slice(recipe.source("model.embed_tokens.weight"), 0, 7, 7 + WIDTH)
    return parameter((WIDTH, embedding.shape[1]), rows, embedding.dtype)


@contextmanager
def conv_artifact(
    folder: Path,
    checkpoint: Path,
    patch: pytest.MonkeyPatch,
    module: Callable[[Any], nn.Module],
    target: str,
    *,
    max_tokens: int,
    **definition: Any,
) -> Iterator[tuple[Path, InterpreterRun]]:
    """A Llama whose entry `main` is `module` of the decoder: the artifact, and the traced program. `definition` are
    further fields of the definition."""

    def entries(spec: Any, decoder: Any) -> dict[str, Entry]:
        return {"main": Entry(module(decoder))}

    change_definition(patch, "LlamaForCausalLM", more_entries=entries, **definition)
    patch.setattr(pipeline, "load_user_pass", {InsertConvState.name: InsertConvState}.get)
    limits: dict[str, Any] = {"max_batch": 4, "max_tokens": max_tokens, "max_seq_len": 96}
    backend, passes = "reference" if target == "cpu" else "triton", f"default,{InsertConvState.name}"
    options = {"target": target, "backend": backend, "dtype": "float32", "passes": passes, **limits}
    with toy_ops(conv_ops):
        compile_model(checkpoint, folder / "conv.ingot", **options)
        yield folder / "conv.ingot", interpreted(checkpoint, **options)
