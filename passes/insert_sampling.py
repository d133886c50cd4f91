"""insert-sampling: the program takes its positions from device rows, samples, and moves the rows on."""

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.errors import PassError
from ingot.ir.program import StateSpec, tensor_type
from ingot.ir.record import Numerics
from ingot.ir.types import Dim, Size, StateType, TensorType
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter

_HOST_INPUTS: dict[str, tuple[torch.dtype, Size]] = {
    "rows": (torch.int32, "B"),
    "starts": (torch.int32, "B"),
    "sample_index": (torch.int32, "B"),
    "temperature": (torch.float32, "L"),
    "top_k": (torch.int32, "L"),
    "top_p": (torch.float32, "L"),
    "min_p": (torch.float32, "L"),
    "seeds": (torch.int64, "L"),
}
# What `feed` computes on the device in place of the host.
_FED = ("tokens", "positions", "slots", "kv_lens")


@dataclass(frozen=True)
class InsertSampling(Pass):
    """`feed` in front, `sample` and `advance` at the end, over the row states `last_token` and `position`."""

    name: ClassVar[str] = "insert-sampling"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        caches = [spec for spec in program.states.values() if spec.kind == "paged_kv"]
        if not caches or "logits" not in program.outputs:
            raise PassError(
                "there are no caches or no logits to sample from", where=self.name, expected="insert-paged-kv before it"
            )
        page_size = caches[0].type.shape[2]
        program.dims["S"] = Dim("S", 1, context.max_batch)
        row = StateSpec("row", "rows", "sequence", TensorType(torch.int32, ("S",)))
        last_token, position = program.add_state("last_token", row), program.add_state("position", row)
        host = {
            name: program.add_input(name, TensorType(dtype, (size,))) for name, (dtype, size) in _HOST_INPUTS.items()
        }
        fed = {name: program.find(name) for name in _FED}
        first = next(program.calls())
        results = rewriter.call(
            ops.feed,
            fed["tokens"],
            program.find("token_seqs"),
            program.find("q_starts"),
            program.find("q_lens"),
            host["rows"],
            host["starts"],
            program.find("page_table"),
            last_token,
            position,
            before=first,
            origin=self.name,
            page_size=page_size,
        )
        computed: dict[str, fx.Node] = {}
        for index, name in enumerate(_FED):
            computed[name] = rewriter.call(operator.getitem, results, index, before=first, origin=self.name)
            fed[name].replace_all_uses_with(computed[name], delete_user_cb=lambda user: user is not results)
            if name != "tokens":  # the host still gives the tokens that it knows
                program.graph.erase_node(fed[name])
        end = program.graph.output_node()
        outputs = program.output_nodes()
        rows_of_logits = program.find("logit_rows")
        at = rewriter.call(ops.select_rows, computed["positions"], rows_of_logits, before=end, origin=self.name)
        parameters = [host[name] for name in ("temperature", "top_k", "top_p", "min_p", "seeds")]
        sampled = rewriter.call(ops.sample, outputs["logits"], *parameters, at, before=end, origin=self.name)
        moved = rewriter.call(
            ops.advance,
            last_token,
            position,
            host["rows"],
            computed["kv_lens"],
            sampled,
            host["sample_index"],
            before=end,
            origin=self.name,
        )
        states = {
            name: rewriter.call(operator.getitem, moved, index, before=end, origin=self.name)
            for index, name in enumerate(("last_token", "position"))
        }
        assert all(isinstance(node.meta["type"], StateType) for node in states.values())
        assert tensor_type(sampled).dtype == torch.int32
        program.set_outputs({"tokens": sampled, **outputs, **states})
        rewriter.matched()
