"""The ops of trees of drafts: several continuations of a sequence run in one step, and the longest correct one is kept.

Node 0 is the root, the sequence's last token; node 1 + i is draft i. A node comes after its parent. `ancestors` of a
token is a bit mask: bit j is set if the token sees node j, itself included. 0 marks a token outside a tree, which sees
all tokens before it.
"""

import torch

from ingot.ir.errors import VerifyError
from ingot.ir.ops.registry import Effect, Sample, bytes_of, define
from ingot.ir.placements import Call, Fit, by_heads, whole

MAX_NODES = 64  # bits of an i64


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bits_of(ancestors: torch.Tensor, nodes: int = MAX_NODES) -> torch.Tensor:
    """Return the bit masks `ancestors` i64[…] as bool[…, nodes]: whether each token sees each node of its tree."""
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
    """Return i64[T]: for each token of a step, a bit mask of the nodes that it sees in its tree of drafts.

    Bit j is set if the token sees node j; a node sees itself. 0 marks a token outside a tree. In `tokens` i32[T], -1 is
    the root (node 0), and -2 - i is draft i (node 1 + i), whose id the op `take_drafts` fills in later. The parent of
    draft i of sequence b = `token_seqs[t]` is the node `parents[rows[b], i]` of the state `parents` i32[R, K]. A parent
    that does not come before its draft is clamped to the node just before it.
    """
    nodes = parents.shape[1] + 1
    place = torch.arange(nodes, device=tokens.device)
    before = parents[rows.clamp(min=0).long()].long().clamp(min=0).minimum(place[:-1])
    reach = torch.eye(nodes, device=tokens.device).repeat(rows.shape[0], 1, 1)
    reach[:, 1:] += (before[:, :, None] == place).float()
    for _ in range((nodes - 1).bit_length()):  # the longest path has as many edges as there are drafts
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
    """Return i32[T]: the positions of a step's tokens, with those of tree nodes corrected.

    A node's position is the root's plus one per ancestor. `positions` are consecutive in each sequence; tokens outside
    a tree keep them. `token_seqs` [T] holds each token's sequence, `q_starts` [B] its first token, and `ancestors`
    i64[T] the nodes that each token sees, as a bit mask; 0 outside a tree.
    """
    token = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
    index = token - q_starts[token_seqs.clamp(min=0).long()]
    depth = bits_of(ancestors).sum(-1) - 1
    return torch.where(ancestors != 0, positions - index + depth, positions).int()


def _accept_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    # Nodes 1 and 2 follow the root, 3 follows 2; then a prompt, a root alone, and padding.
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
    """Find the drafts to keep in trees of up to `drafted` drafts: (order, rejected i32[B], taken i32[B], source).

    A tree is checked if its sequence has a row of logits for each node; the last row is `sample_index[b]`. A node is
    kept if its parent is kept and the token `sampled` from the parent's row is the node's. The kept path ends in the
    deepest kept node, the first among equals. `rejected[b]` is the number of nodes that are not on the path, and
    `taken[b]` the row of logits of the path's last node; without a tree it is `sample_index[b]`.

    `order` i32[L] and `source` i32[T] say how to put the path first: entry i of a sequence's rows of logits (`order`),
    or of its tokens (`source`), is the index of the path's node i. Entries after the path, and those outside trees,
    hold their own index.

    `logit_rows` i32[L] holds the token of each row, `token_seqs` the sequence of each token. Sequence b has `q_lens[b]`
    tokens, from `q_starts[b]` on. `ancestors` i64[T] are bit masks of the nodes that each token sees.
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
    # The deepest node, the first among equals: all scores differ.
    last = torch.where(kept, (depth + 1) * (drafted + 1) - nodes, -1).argmax(-1)
    path = bits.gather(1, last[:, None, None].expand(-1, 1, drafted + 1))[:, 0]  # [B, node]
    length = path.sum(-1)
    rank = path.cumsum(-1) - 1
    at = (path[:, None, :] & (rank[:, None, :] == nodes[:, None])).int().argmax(-1)  # [B, place on the path]
    at = torch.where(nodes < length[:, None], at, nodes)

    def moved(places: torch.Tensor, begin: torch.Tensor, seqs: torch.Tensor) -> torch.Tensor:
        """Return the indices `places`, with those of each tree reordered so that the kept path comes first.

        The indices of sequence b's tree start at `begin[b]`. `seqs` holds the sequence of each index.
        """
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
    # Padding repeats the first token's move.
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
    """Return the KV cache `kv` with keys and values moved between the slots of a step's tokens.

    The slot `slots[t]` gets the contents of the slot of token `source[t]`; `slots` is i64[T], `source` i32[T]. A
    negative slot is padding, which no real token may have as its source.
    """
    result = kv.clone()
    _move(result, slots, source)
    return result
