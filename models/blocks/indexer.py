"""The indexer of DeepSeek sparse attention (DeepSeek-V3.2): it chooses the positions that an attention reads."""

from dataclasses import dataclass, field, replace

import torch

from ingot.ir import ops
from ingot.models.blocks.block import Block
from ingot.models.blocks.linear import Linear
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.blocks.positions import Positions, RotarySpec
from ingot.models.params import Place

# DeepSeek's class LayerNorm (inference/model.py) has this epsilon, whatever the field `rms_norm_eps` is, and float32
# weights.
_K_NORM = NormSpec(1e-6, kind="layer", wide=True, bias=True, stored="k_norm")


@dataclass(frozen=True)
class IndexerNames:
    """The names of an indexer's tensors in the checkpoint.

    place     the indexer's prefix within the attention
    q         the linear from the latent of q to the indexer's queries
    k         the linear from hidden states to the indexer's key
    weights   the linear from hidden states to the weights of heads
    """

    place: str = "indexer"
    q: str = "wq_b"
    k: str = "wk"
    weights: str = "weights_proj"


@dataclass(frozen=True)
class IndexerSpec:
    """An indexer: the sizes, the norm and the rotation of its keys.

    heads    number of heads of its queries. All share one key.
    width    elements of a query and of the key
    top_k    number of positions that a token reads
    k_norm   norm of the key, before its rotation
    rotary   rotary embedding of queries and key, of their first elements
    names    names of the tensors in the checkpoint
    """

    heads: int
    width: int
    top_k: int
    k_norm: NormSpec = _K_NORM
    rotary: RotarySpec = field(default_factory=RotarySpec)
    names: IndexerNames = IndexerNames()

    def build(self, place: Place, hidden: int, q_rank: int, layer: int) -> "Indexer":
        return Indexer(self, place / self.names.place, hidden, q_rank, layer)


class Indexer(Block):
    """The choice of positions: (x [T, hidden], the latent of q [T, q_rank]) -> positions i32[T, top_k].

    `layer` is the layer's index, which is also the number of the cache of its keys. On a mesh every rank has all of it.
    The published code multiplies scores by a positive constant, and queries and keys by an orthogonal matrix. Neither
    changes the choice, so Ingot does not.
    """

    def __init__(self, spec: IndexerSpec, place: Place, hidden: int, q_rank: int, layer: int) -> None:
        super().__init__()
        self.spec, self.layer, names = spec, layer, spec.names
        self.q = Linear(place / names.q, q_rank, spec.heads * spec.width)
        self.k = Linear(place / names.k, hidden, spec.width)
        self.k_norm = Norm(spec.k_norm, place, spec.width)
        # In float32 whatever the model's dtype, as in DeepSeek's inference/model.py and in transformers.
        self.weights = Linear(replace(place / names.weights, dtype=torch.float32), hidden, spec.heads)

    def forward(self, x: torch.Tensor, q_latent: torch.Tensor, at: Positions) -> torch.Tensor:
        spec = self.spec
        q = spec.rotary.rotate(self.q(q_latent).view(-1, spec.heads, spec.width), at)
        k = spec.rotary.rotate(self.k_norm(self.k(x)).view(-1, 1, spec.width), at)
        weights = self.weights(ops.cast(x, dtype=torch.float32))
        rows = (at.positions, at.token_seqs)
        return ops.choose_positions(q, k, weights, *rows, top_k=spec.top_k, layer=self.layer)
