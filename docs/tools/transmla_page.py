"""The part of docs/benchmarks.md on converted attention: the tables of benchmarks/transmla.py."""

import re
from collections.abc import Iterator

from markdown_table import table
from natural_order import natural_order
from results import Result

TITLE = "Perplexity of models with converted attention"
HEAD = """\
`python benchmarks/transmla.py`: {model} after each step of [`ingot convert --to mla`](convert.md), on the held-out half
of the text `{text}`. One rotated key of {rope_dim} elements is kept. *Rotation* keeps all rotated elements, and *rope
cut* the whole rank. The cache is that of the rank, relative to the source's. The source's perplexity is {source:.3f}.
"""
_RANK = re.compile(r"fold_(\d+)\.rank_(\d+)\.perplexity")


def transmla_section(result: Result) -> Iterator[str]:
    """Yield the table of a result of transmla.py: a row for each number of folded frequencies and each rank."""
    figures = result.figures
    yield HEAD.format(**result.settings, source=figures["source.perplexity"].value)
    rows = []
    for name in natural_order(figures):
        if (found := _RANK.fullmatch(name)) is not None:
            fold, rank = found.groups()
            parts = (f"fold_{fold}.rotation", f"fold_{fold}.rope_cut", f"fold_{fold}.rank_{rank}")
            rotation, rope, cut = (f"{figures[f'{part}.perplexity'].value:.3f}" for part in parts)
            cache = figures[f"{parts[-1]}.cache"].value
            rows.append((fold, rotation, rope, rank, cut, f"{100 * cache:.0f} %"))
    yield from table(("freqfold", "after rotation", "after rope cut", "rank", "after rank cut", "cache"), rows)
