"""Random steps over a paged cache, for attention and what leads to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ingot.ir.cache.form import CacheForm


@dataclass(frozen=True)
class Heads:
    """Heads of q, of k and v, and their size; `value`: that of v where it is another one. `shared`: values are the
    first numbers of keys."""

    q: int
    kv: int
    dim: int
    value: int = 0
    shared: bool = False

    @property
    def form(self) -> CacheForm:
        return CacheForm(self.dim, self.value or self.dim, self.shared)

    @property
    def options(self) -> dict[str, Any]:
        """Attributes of attention over such a cache."""
        return {"scale": self.dim**-0.5, **({"value_width": self.form.value_width} if self.shared else {})}


@dataclass(frozen=True)
class PagedStep:
    """What a step feeds: (tokens fed, positions cached before) of each sequence, `gap` tokens of padding in between.

    Sequences own pages in a random order. Cached positions that were never written hold NaN, as do unowned pages.
    """

    kv: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    q_starts: torch.Tensor
    q_lens: torch.Tensor
    kv_lens: torch.Tensor

    @property
    def lens(self) -> tuple[torch.Tensor, ...]:
        """What attention is told of the sequences."""
        return self.page_table, self.q_starts, self.q_lens, self.kv_lens

    @property
    def dims(self) -> dict[str, int]:
        return {"T": len(self.q), "B": len(self.q_starts)}


def paged_step(
    g: torch.Generator,
    dtype: torch.dtype,
    heads: Heads,
    sequences: Sequence[tuple[int, int]],
    *,
    page: int = 16,
    gap: int = 0,
    behind: int = 0,
    runs: bool = False,
) -> PagedStep:
    """A step with `behind` tokens and sequences of padding at its end. q, k and v are parts of one product. Pages are
    in a random order, or with `runs` those of a sequence lie behind each other."""
    counts = [fed for fed, _ in sequences]
    needed = [-(-(fed + before) // page) for fed, before in sequences]
    width = max(needed, default=1) + 1
    pages = sum(needed) + 2
    order = list(reversed(range(pages))) if runs else torch.randperm(pages, generator=g).tolist()
    form = heads.form
    kv = torch.full((pages, *form.shape(page, heads.kv)[1:]), float("nan"))
    table = torch.zeros(len(sequences) + behind, width, dtype=torch.int32)
    starts, positions, slots = [], [], []
    for b, (fed, before) in enumerate(sequences):
        own = [order.pop() for _ in range(needed[b])]
        table[b, : len(own)] = torch.tensor(own, dtype=torch.int32)
        places = range(before + fed)
        where = [own[place // page] * page + place % page for place in places]
        for slot in where[:before]:
            kv[slot // page, :, slot % page] = torch.randn(form.parts, heads.kv, form.row, generator=g)
        starts.append(len(positions))
        positions += [*places[before:], *[0] * gap]
        slots += [*where[before:], *[-1] * gap]
    positions += [0] * behind
    slots += [-1] * behind
    tokens = len(positions)
    sizes = [heads.q * heads.dim, heads.kv * heads.dim, 0 if heads.shared else heads.kv * form.value_width]
    parts = torch.randn(tokens, sum(sizes), generator=g).to(dtype).split(sizes, 1)
    q, k = (part.view(tokens, -1, heads.dim) for part in parts[:2])
    v = None if heads.shared else parts[2].view(tokens, heads.kv, -1)

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    none = [0] * behind
    lens = [fed + before for fed, before in sequences]
    return PagedStep(
        kv.to(dtype), q, k, v, ints(positions), torch.tensor(slots), table,
        ints([*starts, *none]), ints([*counts, *none]), ints([*lens, *none]),
    )  # fmt: skip
