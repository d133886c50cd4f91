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
    """Unpack the bit masks `ancestors` i64[…] to bool[…, nodes].

    The result says whether each token sees each node of its tree of drafts.
    """
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

    Bit j is set if the token sees node j. A node sees itself and its ancestors. The mask is 0 for a token outside a
    tree.

    Node 0 is the root, and node 1 + i is draft i. In `tokens` i32[T], -1 is the root and -2 - i is draft i.
    `token_seqs` [T] holds the sequence b of each token. The parent of its draft i is node `parents[rows[b], i]`, in the
    state `parents` i32[R, K]. If that node does not come before the draft, the node just before the draft is the
    parent.
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
    """Return the positions i32[T] of a step's tokens, corrected for tokens that are nodes of a draft tree.

    The position of a node is the root's position plus the node's depth in the tree. `positions` are consecutive within
    each sequence. Tokens outside a tree keep theirs. `token_seqs` [T] holds the sequence of each token. `q_starts` [B]
    holds the first token of each sequence. `ancestors` i64[T] are bit masks of the nodes that each token sees; 0
    outside a tree.
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
    """Find the drafts to keep in trees of up to `drafted` drafts. Each tree keeps one path from its root.

    Returns (order i32[L], rejected i32[B], taken i32[B], source i32[T]):

    order     indices such that `x[order]` has the path's rows first in each tree, for x with a value per row of logits
    rejected  the number of nodes that are not on the path; 0 without a tree
    taken     the row of logits of the path's last node; without a tree it is `sample_index[b]`
    source    indices such that `x[source]` has the path's tokens first in each tree, for x with a value per token

    A node is right if its token equals the token `sampled` from its parent's row of logits. After the root, the path
    has only right nodes. It ends in the deepest node that can be reached, the first among equals. After the path, and
    outside trees, `order` and `source` leave rows and tokens in place.

    Tokens `q_starts[b]` to `q_starts[b] + q_lens[b]` belong to sequence b. `token_seqs` [T] holds b for each token.
    `logit_rows` i32[L] holds the token index of each row of logits. The last row of a sequence is `sample_index[b]`.
    `ancestors` i64[T] are bit masks of the nodes that each token sees. A sequence counts as a tree only if each of its
    nodes has a row of logits.
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
        """Return the indices `places`, reordered in each tree so that the kept path comes first.

        The indices of sequence b start at `begin[b]`. `seqs` holds the sequence of each index.
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
    traffic=lambda kv, slots, source: {"kv": 2 * slots.shape[0] * bytes_of(kv[:1, :, :1])},
    fusible=False,
    on_device=True,
    placement=_slots_placement,
)
def move_slots(kv: torch.Tensor, slots: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Move keys and values in the KV cache `kv` between the slots of a step's tokens, and return the cache.

    A slot (page * page size + offset) is the place of a token in the cache. The slot of token t gets the contents of
    the slot of token `source[t]`. `slots` i64[T] holds the slot of each token, and `source` is i32[T]. A negative slot
    is padding. No real token may have padding as its source.
    """
    result = kv.clone()
    _move(result, slots, source)
    return result
