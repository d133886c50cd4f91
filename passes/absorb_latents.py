"""absorb-latents: attention reads latents, and not the keys and values of each head that are made of them."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.cache.dtype import CacheScales
from ingot.ir.masks import CAUSAL
from ingot.ir.program import named_arguments, tensor_type
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter, trimmed


@dataclass(frozen=True)
class AbsorbLatents(Pass):
    """Replaces `latent_attention` by `attention` with one key for all heads: a latent and the rotated key.

    The matrix of a head's keys multiplies q, and the matrix of its values multiplies the weighted sum of latents. So
    insert-paged-kv makes a cache that holds one row per token, and not keys and values of each head (arXiv 2405.04434,
    section 2.1.2).
    """

    name: ClassVar[str] = "absorb-latents"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING  # (q k_up) latent and q (k_up latent) are rounded differently

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        for node in list(rewriter.program.calls(ops.latent_attention.overload)):
            if not rewriter.take(node):
                break
            bound = named_arguments(node)
            rank = tensor_type(bound["latents"]).shape[2]
            turned = rewriter.call(torch.ops.aten.permute.default, bound["k_up"], [0, 2, 1], before=node)
            by_latent = rewriter.call(ops.head_linear, bound["q"], turned, before=node)
            q = rewriter.call(ops.concat, by_latent, bound["q_rotated"], before=node, dim=2)
            k = rewriter.call(ops.concat, bound["latents"], bound["k_rotated"], before=node, dim=2)
            options: dict[str, Any] = {name: bound[name] for name in ("scale", "layer")}
            options |= {} if bound["mask"] == CAUSAL.name else {"mask": bound["mask"]}
            options |= CacheScales.of(bound).options()
            rows = (bound["positions"], bound["token_seqs"], *trimmed([None, None, bound["chosen"]]))
            mixed = rewriter.call(ops.attention, q, k, None, *rows, before=node, value_width=rank, **options)
            rewriter.replace(node, rewriter.call(ops.head_linear, mixed, bound["v_up"], before=node))
