"""A tree of drafts: several continuations of a sequence, fed in one step, of which the longest right one is kept.

Node 0 is the last token of the sequence, the root; node 1 + i is draft i. A node stands after its parent, and may be
any of the tokens after it. What a node sees of its step is told by bits: bit j of a token's `ancestors` says that it
sees node j, itself among them. 0 is no node: such a token sees all that is fed before it.
"""

import torch

from ingot.ir.errors import VerifyError
from ingot.ir.ops.registry import Effect, Sample, bytes_of, define
from ingot.ir.placements import Call, Fit, by_heads, whole

MAX_NODES = 64  # bits of an i64


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bits_of(ancestors: torch.Tensor, nodes: int = MAX_NODES) -> torch.Tensor:
    """bool[…, nodes]: which nodes each token sees."""
    return ((ancestors[..., None] >> torch.arange(nodes, device=ancestors.device)) & 1) > 0


def _ancestor_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    parents = torch.tensor([[0, 0, 2, 1], [0, 1, 2, 3], [9, -1, 0, 7]], dtype=torch.int32)
    # Two trees, a prompt, and padding.
    tokens, seqs = _ints(-1, -2, -3, -4, -5, -1, -2, -3, 7, 8, 0), _ints(0, 0, 0, 0, 0, 1, 1, 1, 2, 2, -1)
    return [Sample((tokens, seqs, _ints(0, 1, 2, -1), parents))]


def _ancestor_fake(
    tokens: torch.Tensor, token_seqs: torch.Tensor, rows: torch.Tensor, parents: torch.Tensor
) -> torch.Tensor:
    if parents.shape[1] >= MAX_NODES:
        raise VerifyError(f"a tree of {parents.shape[1]} drafts", expected=f"at most {MAX_NODES - 1}")
    return torch.empty_like(tokens, dtype=torch.int64)


@define(
    samples=_ancestor_samples,
    fake=_ancestor_fake,
    fusible=False,
    legal="cached",
    effect=Effect.READS_STATE,
    on_device=True,
    flops=1,
    placement=whole,
)
def tree_ancestors(
    tokens: torch.Tensor, token_seqs: torch.Tensor, rows: torch.Tensor, parents: torch.Tensor
) -> torch.Tensor:
    """The `ancestors` i64[T] of the tokens of a step, before drafts are put into `tokens` i32[T].

    A token of -1 is the root; -2 - i is draft i, whose parent is node `parents[rows[b], i]` of the state i32[R, K]; any
    other token is no node.

    A parent that does not come before its draft stands for the nearest one that does.
    """
    nodes = parents.shape[1] + 1
    place = torch.arange(nodes, device=tokens.device)
    before = parents[rows.clamp(min=0).long()].long().clamp(min=0).minimum(place[:-1])
    reach = torch.eye(nodes, device=tokens.device).repeat(rows.shape[0], 1, 1)
    reach[:, 1:] += (before[:, :, None] == place).float()
    for _ in range((nodes - 1).bit_length()):  # the longest path has as many steps as there are drafts
        reach = ((reach @ reach) > 0).float()
    bits = (reach.long() << place).sum(-1)
    node = (-1 - tokens).clamp(min=0, max=nodes - 1).long()
    return torch.where((tokens < 0) & (token_seqs >= 0), bits[token_seqs.clamp(min=0).long(), node], 0)


def _position_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    step = (_ints(7, 8, 9, 10, 3, 4, 0), _ints(0, 0, 0, 0, 1, 1, -1), _ints(0, 4, 0))
    return [Sample((*step, torch.tensor([1, 3, 5, 13, 0, 0, 0])))]


@define(
    samples=_position_samples,
    fake=lambda positions, *_: torch.empty_like(positions),
    fusible=False,
    legal="cached",
    on_device=True,
    flops=1,
    placement=whole,
)
def tree_positions(
    positions: torch.Tensor, token_seqs: torch.Tensor, q_starts: torch.Tensor, ancestors: torch.Tensor
) -> torch.Tensor:
    """`positions` i32[T], where a sequence's tokens stand one after the other, as those of nodes: the root's, and one
    more for each ancestor."""
    token = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
    index = token - q_starts[token_seqs.clamp(min=0).long()]
    depth = bits_of(ancestors).sum(-1) - 1
    return torch.where(ancestors != 0, positions - index + depth, positions).int()


def _accept_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    # Node 1 and 2 are drafts after the root, 3 stands after 2; a prompt; a root alone; and padding.
    ancestors = torch.tensor([1, 3, 5, 13, 0, 0, 1, 0])
    step = (_ints(0, 1, 2, 3, 5, 6), _ints(0, 0, 0, 0, 1, 1, 2, -1), _ints(0, 4, 6, 0), _ints(4, 2, 1, 0))
    tokens, index = _ints(10, 11, 12, 13, 5, 6, 9, 0), _ints(3, 4, 5, -1)
    return [
        Sample((tokens, sampled, *step, index, ancestors), {"drafted": 3})
        for sampled in (_ints(12, 90, 13, 91, 92, 93), _ints(11, 90, 13, 91, 92, 93), _ints(1, 90, 13, -1, 92, 93))
    ]


def _accept_fake(
    tokens: torch.Tensor,
    sampled: torch.Tensor,
    logit_rows: torch.Tensor,
    token_seqs: torch.Tensor,
    q_starts: torch.Tensor,
    *_: torch.Tensor,
    drafted: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rejected, taken = torch.empty_like(q_starts), torch.empty_like(q_starts)
    return torch.empty_like(logit_rows), rejected, taken, torch.empty_like(token_seqs)


@define(
    samples=_accept_samples, fake=_accept_fake, fusible=False, legal="cached", on_device=True, flops=1, placement=whole
)
def accept_tree(
    tokens: torch.Tensor,
    sampled: torch.Tensor,
    logit_rows: torch.Tensor,
    token_seqs: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    sample_index: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    drafted: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(order i32[L], rejected i32[B], taken i32[B], source i32[T]) after a step that feeds trees of up to `drafted`
    drafts.

    A sequence that gets a row of logits for each node, the last of them `sample_index[b]`, keeps a node as long as its
    parent is kept, and the parent's row has `sampled` it. The kept path is that of the deepest node, and of several the
    first. `rejected[b]` nodes are not on it, and `taken[b]` is the row of its last node.

    `order` are the rows of a sequence with those of the path in front, and `source` its tokens likewise: row i of a
    sequence that kept n nodes is then that of the path's node i, for i < n. Rows and tokens of no tree stay in place,
    and `taken` is `sample_index`.
    """
    device = tokens.device
    nodes = torch.arange(drafted + 1, device=device)
    first = sample_index - q_lens + 1  # the root's row
    row_of_root = logit_rows[first.clamp(min=0).long()]
    inside = ancestors[q_starts.clamp(max=tokens.shape[0] - 1).long()] != 0
    tree = (sample_index >= 0) & (first >= 0) & (row_of_root == q_starts) & (q_lens <= drafted + 1) & inside
    valid = nodes < q_lens[:, None]
    token = (q_starts[:, None] + nodes).clamp(max=tokens.shape[0] - 1).long()
    row = (first[:, None] + nodes).clamp(min=0, max=logit_rows.shape[0] - 1).long()
    bits = bits_of(ancestors[token], drafted + 1)  # [B, node, ancestor]
    earlier = bits & (nodes[None, :] < nodes[:, None])
    parent = torch.where(earlier, nodes, 0).amax(-1)
    right = (tokens[token] == sampled[row].gather(1, parent)) | (nodes == 0)
    kept = valid & (~bits | right[:, None, :]).all(-1)
    depth = bits.sum(-1) - 1
    # The deepest one, and of several the first: no two have one score.
    last = torch.where(kept, (depth + 1) * (drafted + 1) - nodes, -1).argmax(-1)
    path = bits.gather(1, last[:, None, None].expand(-1, 1, drafted + 1))[:, 0]  # [B, node]
    length = path.sum(-1)
    rank = path.cumsum(-1) - 1
    at = (path[:, None, :] & (rank[:, None, :] == nodes[:, None])).int().argmax(-1)  # [B, place on the path]
    at = torch.where(nodes < length[:, None], at, nodes)

    def moved(places: torch.Tensor, begin: torch.Tensor, seqs: torch.Tensor) -> torch.Tensor:
        """`places` with those of trees in the order of `at`, where the tree of a sequence begins at `begin`."""
        seq = seqs.clamp(min=0).long()
        index = places - begin[seq]
        own = tree[seq] & (seqs >= 0) & (index >= 0) & (index < q_lens[seq])
        return torch.where(own, begin[seq] + at[seq, index.clamp(min=0, max=drafted).long()], places).int()

    rows = torch.arange(logit_rows.shape[0], dtype=torch.int32, device=device)
    order = moved(rows, first, token_seqs[logit_rows.long()])
    source = moved(torch.arange(tokens.shape[0], dtype=torch.int32, device=device), q_starts, token_seqs)
    rejected = torch.where(tree, q_lens - length, 0).int()
    return order, rejected, torch.where(tree, first + last, sample_index).int(), source


def _move_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    kv = torch.randn(4, 2, 16, 2, 8, generator=g).to(dtype)
    slots = torch.tensor([17, 18, 19, 20, 63, -1, -1])
    return [Sample((kv, slots, _ints(0, 2, 3, 3, 4, 5, 6))), Sample((kv, slots[5:], _ints(0, 1)))]


def _move(kv: torch.Tensor, slots: torch.Tensor, source: torch.Tensor) -> None:
    page_size = kv.shape[2]
    real = slots >= 0
    # Padding moves what the first token moves, to the same place.
    target = torch.where(real, slots, slots[:1]).clamp(min=0)
    origin = torch.where(real, slots[source.long()], slots[source[:1].long()]).clamp(min=0)
    kv[target // page_size, :, target % page_size] = kv[origin // page_size, :, origin % page_size]


def _slots_placement(call: Call) -> Fit:
    return by_heads(call, {"kv": 3}, call.shard(3))


@define(
    samples=_move_samples,
    fake=lambda kv, *_: torch.empty_like(kv),
    states=("kv",),
    in_place=_move,
    flops=0,
    traffic=lambda kv, slots, source: bytes_of(slots, source) + 2 * slots.shape[0] * bytes_of(kv[:1, :, :1]),
    fusible=False,
    on_device=True,
    placement=_slots_placement,
)
def move_slots(kv: torch.Tensor, slots: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The cache where the slot of token t, `slots[t]` i64[T], holds what the slot of token `source[t]` i32[T] held. A
    negative slot is padding; no token comes to lie where padding was."""
    result = kv.clone()
    _move(result, slots, source)
    return result
