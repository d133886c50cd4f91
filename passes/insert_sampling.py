"""insert-sampling: the program takes its positions from device rows, samples, and moves the rows on."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.errors import PassError
from ingot.ir.ops.penalties import MAX_BANNED
from ingot.ir.program import StateSpec, tensor_type
from ingot.ir.record import Numerics
from ingot.ir.types import Dim, Size, StateType, TensorType
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter

_HOST_INPUTS: dict[str, tuple[torch.dtype, tuple[Size, ...]]] = {
    "rows": (torch.int32, ("B",)),
    "starts": (torch.int32, ("B",)),
    "sample_index": (torch.int32, ("B",)),
    "prompt_ends": (torch.int32, ("B",)),
    "count_rows": (torch.int32, ("L",)),
    "repetition": (torch.float32, ("L",)),
    "frequency": (torch.float32, ("L",)),
    "presence": (torch.float32, ("L",)),
    "banned": (torch.int32, ("L", MAX_BANNED)),
    "temperature": (torch.float32, ("L",)),
    "top_k": (torch.int32, ("L",)),
    "top_p": (torch.float32, ("L",)),
    "min_p": (torch.float32, ("L",)),
    "seeds": (torch.int64, ("L",)),
    "targets": (torch.int32, ("L",)),
    "num_logprobs": (torch.int32, ("L",)),
}
# What `feed` computes on the device in place of the host.
_FED = ("tokens", "positions", "slots", "kv_lens")
# What `top_logprobs` gives.
_SCORES = ("logprob_ids", "logprobs", "ranks")


@dataclass(frozen=True)
class InsertSampling(Pass):
    """`feed` and `count_tokens` in front; `sample`, `top_logprobs` and `advance` at the end; over the row states
    `last_token`, `position` and `token_counts`."""

    name: ClassVar[str] = "insert-sampling"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        caches = [spec for spec in program.states.values() if spec.kind == "paged_kv"]
        if not caches or "logits" not in program.outputs:
            raise PassError(
                "there are no caches or no logits to sample from", where=self.name, expected="insert-paged-kv before it"
            )
        if not rewriter.take(program.output_nodes()["logits"]):
            return
        program.dims["S"] = Dim("S", 1, context.max_batch)
        vocab = tensor_type(program.output_nodes()["logits"]).shape[-1]
        rows = {
            name: program.add_state(name, StateSpec("row", "rows", "sequence", TensorType(torch.int32, shape)))
            for name, shape in (("last_token", ("S",)), ("position", ("S",)), ("token_counts", ("S", vocab)))
        }
        host = {
            name: program.add_input(name, TensorType(dtype, shape)) for name, (dtype, shape) in _HOST_INPUTS.items()
        }
        fed = _in_front(rewriter, rows, host, caches[0].type.shape[2])
        _at_the_end(rewriter, rows, host, fed)


def _in_front(
    rewriter: Rewriter, rows: Mapping[str, fx.Node], host: Mapping[str, fx.Node], page_size: Size
) -> dict[str, fx.Node]:
    """`feed` computes what the host gave, and `count_tokens` counts it: what was fed by name, and the counts."""
    program = rewriter.program
    given = {name: program.find(name) for name in _FED}
    token_seqs = program.find("token_seqs")
    first = next(program.calls())

    def in_front(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return rewriter.call(target, *args, before=first, origin=InsertSampling.name, **kwargs)

    results = in_front(
        ops.feed,
        given["tokens"],
        token_seqs,
        program.find("q_starts"),
        program.find("q_lens"),
        host["rows"],
        host["starts"],
        program.find("page_table"),
        rows["last_token"],
        rows["position"],
        page_size=page_size,
    )
    fed: dict[str, fx.Node] = {}
    for index, name in enumerate(_FED):
        fed[name] = in_front(operator.getitem, results, index)
        given[name].replace_all_uses_with(fed[name], delete_user_cb=lambda user: user is not results)
        if name != "tokens":  # the host still gives the tokens that it knows
            program.graph.erase_node(given[name])
    counting = (rows["token_counts"], fed["tokens"], fed["positions"], token_seqs, host["rows"], host["prompt_ends"])
    return {**fed, "token_counts": in_front(ops.count_tokens, *counting)}


def _at_the_end(
    rewriter: Rewriter, rows: Mapping[str, fx.Node], host: Mapping[str, fx.Node], fed: Mapping[str, fx.Node]
) -> None:
    """Sampling, log-probabilities, and the move to the next token; the rows become outputs."""
    program = rewriter.program
    end = program.graph.output_node()
    outputs = program.output_nodes()
    logits = outputs["logits"]

    def at_end(target: Any, *args: Any) -> fx.Node:
        return rewriter.call(target, *args, before=end, origin=InsertSampling.name)

    def given(*names: str) -> list[fx.Node]:
        return [host[name] for name in names]

    at = at_end(ops.select_rows, fed["positions"], program.find("logit_rows"))
    drawn = (*given("temperature", "top_k", "top_p", "min_p", "seeds"), at)
    penalties = (fed["token_counts"], *given("count_rows", "repetition", "frequency", "presence", "banned"))
    sampled = at_end(ops.sample, logits, *drawn, *penalties)
    scored = at_end(ops.top_logprobs, logits, sampled, *given("targets", "num_logprobs"))
    scores = {name: at_end(operator.getitem, scored, index) for index, name in enumerate(_SCORES)}
    moved = at_end(
        ops.advance, rows["last_token"], rows["position"], host["rows"], fed["kv_lens"], sampled, host["sample_index"]
    )
    states = {name: at_end(operator.getitem, moved, index) for index, name in enumerate(("last_token", "position"))}
    states["token_counts"] = fed["token_counts"]
    assert all(isinstance(node.meta["type"], StateType) for node in states.values())
    assert tensor_type(sampled).dtype == torch.int32
    program.set_outputs({"tokens": sampled, **scores, **outputs, **states})
