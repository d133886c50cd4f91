"""A call of an op as a program of its own, as the pipeline makes it for backends that compile calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from op_values import widened
from torch import fx

from ingot.backends.triton.emit import Triton
from ingot.compile.buckets import bucket_classes
from ingot.ir import build
from ingot.ir.machine.target import Target
from ingot.ir.ops import OPS
from ingot.ir.ops.aten import ATEN
from ingot.ir.program import Program, Stage, StateSpec
from ingot.ir.types import Dim, TensorType
from ingot.passes.call_bodies import call_body

TARGET = Target.detect("cuda") if torch.cuda.is_available() else Target.named("sm_90")
MAX_TOKENS, MAX_SEQUENCES = 8192, 512
_CLASSES = bucket_classes(TARGET, [Triton()], MAX_TOKENS, MAX_TOKENS, deterministic=False)

# What programs know of the sizes of arguments: the symbols of their leading axes, and the second of page tables.
_QUERIES = {"q": "T", "k": "T", "v": "T", "positions": "T", "slots": "T"}
_LENS = {"page_table": "BP", "q_starts": "B", "q_lens": "B", "kv_lens": "B"}
SYMBOLS: Mapping[str, Mapping[str, str]] = {
    "append_attention": {**_QUERIES, **_LENS},
    "paged_attention": {"q": "T", "ancestors": "T", **_LENS},
    "partial_attention": {"q": "T", **_LENS},
    "paged_choose_positions": {"q": "T", "weights": "T", **_LENS},
    "sparse_attention": {"q": "T", "chosen": "T", **_LENS},
    "pool": {"x": "T", "q_starts": "B", "q_lens": "B", "dimensions": "B", "normalize": "B"},
    "step_latent_attention": {
        **dict.fromkeys(("q", "q_rotated", "k", "k_rotated", "v", "before", "before_lse"), "T"),
        "q_starts": "B",
        "q_lens": "B",
    },
    "step_attention": {"q": "T", "k": "T", "v": "T", "q_starts": "B", "q_lens": "B"},
    "qk_norm_rope_append": _QUERIES,
    "kv_append": {"k": "T", "v": "T", "slots": "T"},
    "rope": {"x": "T", "positions": "T"},
    "scale_by_position": {"x": "T", "positions": "T"},
    "soft_cap": {"x": "T"},
    "clamp": {"x": "T"},
    "cast": {"x": "T"},
    "silu_mul": {"gate": "T", "up": "T"},
    "gelu_mul": {"gate": "T", "up": "T"},
    "activate": {"x": "T"},
    "mix": {"x": "T", "weights": "T"},
    "concat": {"x": "T", "y": "T"},
    "match_rms": {"x": "T", "like": "T"},
    "gaussian_top_k": {"x": "T"},
    "linear": {"x": "T"},
    "head_linear": {"x": "T"},
    "quant_linear": {"x": "T"},
    "dequantize": {},
    "round_rows": {"x": "T"},
    "experts": {"x": "T", "weights": "T", "chosen": "T"},
    "route": {"router_logits": "T"},
    "sparse_mixer": {"router_logits": "T"},
    "lora_shrink": {"x": "T", "slots": "T"},
    "lora_expand": {"y": "T", "shrunk": "T", "slots": "T"},
    "rms_norm": {"x": "T"},
    "layer_norm": {"x": "T"},
    "add_rms_norm": {"x": "T", "residual": "T"},
    "embedding": {"tokens": "T"},
    "select_rows": {"x": "T", "rows": "L"},
    "aten.add.Tensor": {"x": "T", "other": "T"},
    "aten.mul.Tensor": {"x": "T"},
    "page_slots": {"positions": "T", "token_seqs": "T", "page_table": "B"},
    "feed": {"tokens": "T", "token_seqs": "T", "rows": "B", "starts": "B", **_LENS},
    "advance": {"rows": "B", "kv_lens": "B", "sampled": "L", "sample_index": "B", "rejected": "B"},
    "count_tokens": {"ids": "T", "positions": "T", "token_seqs": "T", "rows": "B", "prompt_ends": "B"},
    "sample": dict.fromkeys(OPS["sample"].parameters.names, "L"),
    "top_logprobs": dict.fromkeys(OPS["top_logprobs"].parameters.names, "L"),
}
# Arguments that live from step to step: kind, and the symbol of their leading axis.
_STATES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "kv": ("paged_kv", ("pages",)),
    "keys": ("paged_kv", ("pages",)),
    "token_counts": ("row", ("R",)),
    "last_token": ("row", ("R",)),
    "position": ("row", ("R",)),
    "a": ("lora", ()),
    "b": ("lora", ()),
}


@dataclass(frozen=True)
class OneCall:
    """A call of `op` (by its printed name without a dialect) on tensors of the host."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        if self.op in OPS:
            return OPS[self.op].parameters.names
        return ATEN[self.op].parameters.names

    @property
    def written(self) -> tuple[int, ...]:
        """The places, among the tensors, of the states that the call writes."""
        states = OPS[self.op].states if self.op in OPS else ()
        given = [name for name, value in zip(self.names, self.args, strict=False) if isinstance(value, torch.Tensor)]
        return tuple(given.index(name) for name in states)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [value for value in self.args if isinstance(value, torch.Tensor)]

    def reference(self, *, exact: bool = False) -> list[torch.Tensor]:
        """The results, written states last; `exact`: in float64."""
        args = widened(self.args) if exact else self.args
        found = (OPS[self.op].reference if self.op in OPS else ATEN[self.op].overload)(*args, **self.kwargs)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    def body(self) -> Program:
        """For the bucket class of its tokens; of an op that knows none, of its sequences or rows of logits."""
        program = Program("main", Stage.LOWERED, {})
        symbols = SYMBOLS[self.op]
        sizes: dict[str, int] = {}
        args: list[Any] = []
        for name, value in zip(self.names, self.args, strict=False):
            if not isinstance(value, torch.Tensor):
                args.append(value)
                continue
            kind, axes = _STATES.get(name, ("", tuple(symbols.get(name, ""))))
            shape = (*axes, *value.shape[len(axes) :])
            sizes |= dict(zip(axes, value.shape, strict=False))
            # Of one row too: what it is a part of has strides.
            dense = value.stride() == torch.empty(value.shape, device="meta").stride()
            value_type = TensorType(value.dtype, shape, None if dense else value.stride())
            if kind:
                unit = {"paged_kv": "token", "lora": "adapter"}.get(kind, "sequence")
                args.append(program.add_state(name, StateSpec(kind, kind, unit, value_type)))
            else:
                args.append(program.add_input(name, value_type))
        program.dims = {name: Dim(name, 1, MAX_SEQUENCES if name == "B" else MAX_TOKENS) for name in sizes}
        tokens = sizes.get("T", max(sizes.get("B", 1), sizes.get("L", 1)))
        program.bucket = next(one for one in _CLASSES if one.holds(tokens, tokens))
        target = OPS[self.op].overload if self.op in OPS else ATEN[self.op].overload
        return call_body(program, build.call(program, target, args, dict(self.kwargs)), "call")

    def call_of(self, body: Program) -> fx.Node:
        return next(iter(body.calls()))


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on `device` that lies there as it does here: strides, offset and what is around it."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    whole = tensor.as_strided([size], [1], 0).to(device, copy=True)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
