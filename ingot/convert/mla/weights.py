"""The tensors of a converted checkpoint, as recipes over the source's tensors and the matrices of the conversion."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ingot.convert.mla.rotation import Matrices
from ingot.convert.mla.sizes import Sizes
from ingot.convert.mla.source import FOLDED, Heads
from ingot.ir import recipe
from ingot.ir.recipe import Recipe
from ingot.models.blocks.latent_attention import LatentNames

# The matrices of a conversion are named "mla:LAYER.NAME", as tensors of a further checkpoint are.
ALIAS = "mla"


@dataclass(frozen=True)
class WeightMap:
    """How the converted tensors are made.

    - `recipes`: by name. They read tensors of the source, and the matrices.
    - `matrices`: float64, by name
    - `replaced`: names of the source's tensors that the converted checkpoint does not have
    """

    recipes: Mapping[str, Recipe]
    matrices: Mapping[str, torch.Tensor]
    replaced: frozenset[str]


def map_weights(
    heads: Heads, sizes: Sizes, found: Mapping[int, Matrices], hidden: int, prefix: str, dtype: torch.dtype
) -> WeightMap:
    """Return how the tensors of converted attentions are made.

    - `found`: the matrices by layer
    - `hidden`: elements of a hidden state
    - `prefix`: the prefix of a layer's tensors in the source, with `{}` for its index, such as "model.layers.{}"
    - `dtype`: of the converted tensors
    """
    recipes: dict[str, Recipe] = {}
    matrices: dict[str, torch.Tensor] = {}
    replaced: set[str] = set()
    for layer, one in found.items():
        place = f"{prefix.format(layer)}.{heads.spec.names.place}"
        made = _Layer(heads, sizes, one, place, f"{ALIAS}:{layer}", matrices)
        if heads.target == FOLDED:
            recipes |= made.folded(hidden)
            replaced |= {
                f"{place}.{part}.{kind}"
                for part in (heads.spec.names.k, heads.spec.names.v)
                for kind in ("weight", "bias")
            }
        else:
            recipes |= made.normed()
    return WeightMap({name: recipe.cast(one, dtype) for name, one in recipes.items()}, matrices, frozenset(replaced))


@dataclass(frozen=True)
class _Layer:
    """The converted tensors of a layer. `place` is the attention's prefix, `alias` that of its matrices."""

    heads: Heads
    sizes: Sizes
    found: Matrices
    place: str
    alias: str
    matrices: dict[str, torch.Tensor]

    def folded(self, hidden: int) -> dict[str, Recipe]:
        """Return the tensors of an attention without norms: each matrix is merged into the linear before it."""
        spec, names, sizes = self.heads.spec, LatentNames(), self.sizes
        of_heads = spec.heads // spec.kv_heads
        # Scores of latent attention are divided by the root of the larger width.
        factor = self.heads.scale * (sizes.width + sizes.rope_dim) ** 0.5
        eye = torch.eye(sizes.width, dtype=torch.float64)
        turns = [self._matrix(f"q.{kv}", factor * torch.cat([eye, self._of_head(kv)])) for kv in range(spec.kv_heads)]
        both = [self._matrix("keys", self._both[:, : sizes.keys]), self._matrix("values", self._both[:, sizes.keys :])]
        parts = {"weight": hidden, **({"bias": 1} if spec.bias else {})}
        found = {f"{names.kv_up}.weight": self._up()}
        for kind, columns in parts.items():
            q, k, v = (self._source(one, kind, columns) for one in (spec.names.q, spec.names.k, spec.names.v))
            turned = [
                recipe.matmul(turns[head // of_heads], self._rows(q, head, sizes.width)) for head in range(spec.heads)
            ]
            down = recipe.add(recipe.matmul(both[0], k), recipe.matmul(both[1], v))
            for name, made in ((names.q, recipe.concat(turned)), (names.kv_down, down)):
                flat = made if kind == "weight" else recipe.reshape(made, (self._outputs(name),))
                found[f"{name}.{kind}"] = flat
        return {f"{self.place}.{name}": made for name, made in found.items()}

    def normed(self) -> dict[str, Recipe]:
        """Return the further tensors of an attention with norms, whose linears stay as they are."""
        spec, names = self.heads.spec, LatentNames()
        of_heads = spec.heads // spec.kv_heads
        turns = torch.cat([self._of_head(head // of_heads) for head in range(spec.heads)])
        found = {
            names.q_rotated: self._matrix("q", turns),
            names.kv_down: self._matrix("down", self._both),
            names.kv_up: self._up(),
        }
        return {f"{self.place}.{name}.weight": made for name, made in found.items()}

    @property
    def _both(self) -> torch.Tensor:
        """The matrix from keys and values to the latent, and to the rotated key after it."""
        rotated = torch.cat([self.found.rotated, torch.zeros_like(self.found.rotated)], 1)
        return torch.cat([self.found.down, rotated])

    def _of_head(self, kv_head: int) -> torch.Tensor:
        """Return the matrix that makes the rotated part of a query of a query that reads this k/v head."""
        width = self.sizes.width
        return self.found.rotated[:, kv_head * width : (kv_head + 1) * width]

    def _up(self) -> Recipe:
        width, spec = self.sizes.width, self.heads.spec
        rows = []
        for head in range(spec.heads):
            begin = head // (spec.heads // spec.kv_heads) * width
            rows += [self.found.k_up[begin : begin + width], self.found.v_up[begin : begin + width]]
        return self._matrix("up", torch.cat(rows))

    def _matrix(self, name: str, value: torch.Tensor) -> Recipe:
        self.matrices[f"{self.alias}.{name}"] = value.contiguous()
        return recipe.source(f"{self.alias}.{name}")

    def _source(self, linear: str, kind: str, columns: int) -> Recipe:
        """Return a weight, or a bias as a matrix of one column."""
        found = recipe.source(f"{self.place}.{linear}.{kind}")
        return found if kind == "weight" else recipe.reshape(found, (-1, columns))

    @staticmethod
    def _rows(matrix: Recipe, head: int, width: int) -> Recipe:
        return recipe.take_slice(matrix, 0, head * width, (head + 1) * width)

    def _outputs(self, name: str) -> int:
        sizes = self.sizes
        if name == LatentNames().q:
            return self.heads.spec.heads * (sizes.width + sizes.rope_dim)
        return sizes.rank + sizes.rope_dim
