"""Random steps over a paged cache, for attention and what leads to it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Heads:
    """Heads of q, of k and v, and their size."""

    q: int
    kv: int
    dim: int


@dataclass(frozen=True)
class PagedStep:
    """What a step feeds: (tokens fed, positions cached before) of each sequence, `gap` tokens of padding in between.

    Sequences own pages in a random order. Cached positions that nobody wrote hold NaN, as do pages of nobody.
    """

    kv: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
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
    kv = torch.full((pages, 2, page, heads.kv, heads.dim), float("nan"))
    table = torch.zeros(len(sequences) + behind, width, dtype=torch.int32)
    starts, positions, slots = [], [], []
    for b, (fed, before) in enumerate(sequences):
        own = [order.pop() for _ in range(needed[b])]
        table[b, : len(own)] = torch.tensor(own, dtype=torch.int32)
        places = range(before + fed)
        where = [own[place // page] * page + place % page for place in places]
        for slot in where[:before]:
            kv[slot // page, :, slot % page] = torch.randn(2, heads.kv, heads.dim, generator=g)
        starts.append(len(positions))
        positions += [*places[before:], *[0] * gap]
        slots += [*where[before:], *[-1] * gap]
    positions += [0] * behind
    slots += [-1] * behind
    tokens = len(positions)
    sizes = [heads.q * heads.dim, heads.kv * heads.dim, heads.kv * heads.dim]
    parts = torch.randn(tokens, sum(sizes), generator=g).to(dtype).split(sizes, 1)
    q, k, v = (part.view(tokens, -1, heads.dim) for part in parts)

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    none = [0] * behind
    lens = [fed + before for fed, before in sequences]
    return PagedStep(
        kv.to(dtype), q, k, v, ints(positions), torch.tensor(slots), table,
        ints([*starts, *none]), ints([*counts, *none]), ints([*lens, *none]),
    )  # fmt: skip
