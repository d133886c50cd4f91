"""Trees of drafts, node by node, against plain Python over drawn trees."""

import itertools
import random

import pytest
import torch

from ingot.ir.errors import VerifyError
from ingot.ir.ops import OPS
from ingot.ir.ops.tree import MAX_NODES

VOCAB = 3  # so few that drafts are often right, and siblings alike


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Tree:
    """A sequence's part of a step: a tree of `drafts`, or that many tokens of a prompt where `plain`."""

    def __init__(self, draw: random.Random, drafts: int, *, plain: bool = False) -> None:
        self.plain = plain
        self.parents = [None, *(draw.randint(0, node) for node in range(drafts))]
        self.tokens = [draw.randrange(VOCAB) for _ in self.parents]
        self.sampled = [draw.randrange(VOCAB) for _ in self.parents]

    def ancestors(self, node: int | None) -> list[int]:
        return [] if node is None else [*self.ancestors(self.parents[node]), node]

    def kept(self, node: int) -> bool:
        path = self.ancestors(node)
        return all(self.tokens[b] == self.sampled[a] for a, b in itertools.pairwise(path))

    def path(self) -> list[int]:
        nodes = [node for node in range(len(self.parents)) if self.kept(node)]
        return self.ancestors(max(nodes, key=lambda node: (len(self.ancestors(node)), -node)))


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_right_path_is_kept(seed: int) -> None:
    draw, most = random.Random(seed), random.Random(seed).choice([1, 3, 9, MAX_NODES - 1])
    trees = [Tree(draw, draw.randint(0, most), plain=draw.random() < 0.2) for _ in range(5)]
    lens = [len(tree.tokens) for tree in trees]
    starts = [sum(lens[:b]) for b in range(5)]
    seqs = [b for b in range(5) for _ in range(lens[b])] + [-1, -1]
    codes = [
        code for tree in trees for code in (tree.tokens if tree.plain else [-1 - n for n in range(len(tree.tokens))])
    ]
    parents = ints([(trees[b].parents[1:] + [99] * most)[:most] for b in range(5)])
    ancestors = OPS["tree_ancestors"].reference(ints([*codes, 0, 0]), ints(seqs), ints([*range(5), -1]), parents)
    for b, tree in enumerate(trees):
        own = ancestors[starts[b] : starts[b] + lens[b]].tolist()
        bits = [sum(1 << node for node in tree.ancestors(node)) for node in range(lens[b])]
        assert own == ([0] * lens[b] if tree.plain else [bit - (1 << 64) if bit >> 63 else bit for bit in bits])
    # Rows of logits of every node, of a prompt the last token alone; then rows that score a prompt.
    rows = [
        range(starts[b] + lens[b] - 1 if tree.plain else starts[b], starts[b] + lens[b]) for b, tree in enumerate(trees)
    ]
    logit_rows = [row for own in rows for row in own] + [starts[2]]
    index = [sum(map(len, rows[: b + 1])) - 1 for b in range(5)] + [-1]
    tokens = ints([token for tree in trees for token in tree.tokens] + [0, 0])
    sampled = ints([tree.sampled[row - starts[b]] for b, tree in enumerate(trees) for row in rows[b]] + [1])
    places = (ints(logit_rows), ints(seqs), ints([*starts, 0]), ints([*lens, 0]), ints(index))
    order, rejected, taken, source = OPS["accept_tree"].reference(tokens, sampled, *places, ancestors, drafted=most)
    assert (order[-1], rejected[-1], taken[-1], source[-2:].tolist()) == (
        len(order) - 1,
        0,
        -1,
        [len(seqs) - 2, len(seqs) - 1],
    )
    for b, tree in enumerate(trees):
        first = index[b] - len(rows[b]) + 1
        path = [0] if tree.plain else tree.path()
        kept = len(path)
        assert (rejected[b], taken[b]) == ((0, index[b]) if tree.plain else (lens[b] - kept, first + path[-1]))
        assert order[first : first + kept].tolist() == [first + node for node in path]
        assert tree.plain or source[starts[b] : starts[b] + kept].tolist() == [starts[b] + node for node in path]
        assert sorted(source[starts[b] + kept : starts[b] + lens[b]].tolist()) == list(
            range(starts[b] + kept, starts[b] + lens[b])
        )
    standing = ints([50 + token for token in range(len(seqs))])
    found = OPS["tree_positions"].reference(standing, ints(seqs), ints(starts), ancestors)
    depths = [
        token if tree.plain else len(tree.ancestors(token)) - 1 for tree in trees for token in range(len(tree.tokens))
    ]
    begins = [50 + starts[b] for b in seqs[:-2]]
    assert found[:-2].tolist() == [begin + depth for begin, depth in zip(begins, depths, strict=True)]


@pytest.mark.parametrize("form", ["reference", "rowwise"])
@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("drafts", [0, 6, MAX_NODES - 1])
def test_a_node_attends_as_the_end_of_its_path(drafts: int, options: dict, form: str) -> None:
    """As the last token of a sequence that has fed what is cached and the path to the node, and nothing else."""
    g, draw, page, cached = torch.Generator().manual_seed(drafts), random.Random(drafts), 4, 7
    tree, count = Tree(draw, drafts), drafts + 1
    pages = -(-(cached + count) // page)
    kv = torch.randn(pages + 3, 2, page, 2, 8, generator=g, dtype=torch.float64)
    q = torch.randn(count + 3, 4, 8, generator=g, dtype=torch.float64)
    table = ints([*draw.sample(range(pages), pages), pages]).view(1, -1)
    bits = [sum(1 << node for node in tree.ancestors(node)) for node in range(count)]
    ancestors = torch.tensor([bit - (1 << 64) if bit >> 63 else bit for bit in bits] + [0, 0, 0])
    sinks = torch.randn(4, generator=g, dtype=torch.float64) if options.get("sinks") else None
    asked = {"scale": 0.3, **{name: value for name, value in options.items() if name != "sinks"}}
    # After it a prompt of two tokens, and padding.
    tables = torch.cat([table, torch.full_like(table, pages + 1)])
    lens = (tables, ints([0, count]), ints([count, 2]), ints([cached + count, 3]))
    attend = getattr(OPS["paged_attention"], form)
    found = attend(q, kv, *lens, sinks, ancestors, mask="tree", **asked)
    flat = kv.transpose(1, 2).flatten(0, 1)
    slots = [int(table[0, place // page]) * page + place % page for place in range(cached + count)]
    for node in range(count):
        path = slots[:cached] + [slots[cached + one] for one in tree.ancestors(node)]
        alone = flat[path][None].transpose(1, 2)  # a cache of one long page
        one = (ints([0]).view(1, 1), ints([0]), ints([1]), ints([len(path)]))
        expected = OPS["paged_attention"].reference(q[node : node + 1], alone, *one, sinks, **asked)
        assert torch.allclose(found[node : node + 1], expected, rtol=1e-12, atol=1e-12)
    plain = OPS["paged_attention"].reference(q, kv, *lens, sinks, **asked)
    assert torch.allclose(found[count:], plain[count:], rtol=1e-12, atol=1e-12), "what is no node sees all before it"


def test_what_is_kept_moves_to_the_front() -> None:
    kv = torch.arange(4 * 2 * 2 * 3, dtype=torch.float32).view(4, 2, 2, 3, 1)
    slots = torch.tensor([7, 2, 3, 0, -1])
    moved = OPS["move_slots"].reference(kv, slots, ints([0, 2, 3, 3, 4]))
    flat, before = moved.transpose(1, 2).flatten(0, 1), kv.transpose(1, 2).flatten(0, 1)
    for slot in range(8):
        assert torch.equal(flat[slot], before[{2: 3, 3: 0}.get(slot, slot)])


def test_trees_are_bounded_and_have_their_mask() -> None:
    tokens = torch.empty(4, dtype=torch.int32, device="meta")
    with pytest.raises(VerifyError, match="a tree of 64 drafts"):
        OPS["tree_ancestors"](tokens, tokens, tokens, torch.empty(4, 64, dtype=torch.int32, device="meta"))
    q, kv = torch.empty(4, 2, 8, device="meta"), torch.empty(3, 2, 4, 2, 8, device="meta")
    places = (tokens.view(4, 1), tokens, tokens, tokens)
    with pytest.raises(VerifyError, match="the mask 'tree' without the ancestors"):
        OPS["paged_attention"](q, kv, *places, scale=1.0, mask="tree")
    with pytest.raises(VerifyError, match="ancestors for the mask 'causal'"):
        OPS["paged_attention"](q, kv, *places, None, tokens.long(), scale=1.0)
    with pytest.raises(VerifyError, match="the mask 'tree' without the ancestors"):
        OPS["attention"](q, q, q, tokens, tokens, scale=1.0, layer=0, mask="tree")
