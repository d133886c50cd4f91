"""Group the choices of a step by expert, so that programs read an expert's rows once for several tokens.

Choice i of token t has the number t * top_k + i. `group_choices` sorts these numbers by expert. A block is up to TOKENS
successive choices of one expert. Programs of matmuls find their block by the counts alone (`find_block`), so the host
needs no counts: a grid has as many blocks as any routing can need, and programs of absent blocks end at once.
`list_blocks` lists the blocks for a kernel whose programs take several.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def group_choices(
    chosen,
    order,
    counts,
    choices,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sort the numbers of choices by expert into `order` i32[choices], and write how many each expert has in `counts`.

    Grid: experts. Program e goes through `chosen` i32[choices] twice: it counts the choices of earlier experts and its
    own, then lists its own, in token order, after those of earlier experts. Programs need nothing from each other.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    earlier = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, choices, BLOCK):
        found = tl.load(chosen + start + place, mask=start + place < choices, other=0x7FFFFFFF)
        earlier += (found < expert).to(tl.int32)
        own += (found == expert).to(tl.int32)
    count = tl.sum(own, 0)
    tl.store(counts + expert, count)
    if count > 0:
        listed = tl.sum(earlier, 0)
        for start in range(0, choices, BLOCK):
            found = tl.load(chosen + start + place, mask=start + place < choices, other=0x7FFFFFFF)
            mine = (found == expert).to(tl.int32)
            tl.store(order + listed + tl.cumsum(mine, 0) - 1, start + place, mask=mine > 0)
            listed += tl.sum(mine, 0)


@triton.jit
def find_block(counts, block, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Return (expert, begin, size) of block number `block`: the expert, and its choices' places in the order.

    Its choices are `size` numbers of the order, from place `begin` on. Experts have their blocks one after the other.
    `size` is 0 if there is no such block.
    """
    number = tl.arange(0, BLOCK_EXPERTS)
    count = tl.load(counts + number, mask=number < EXPERTS, other=0)
    blocks = (count + TOKENS - 1) // TOKENS
    expert = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
    before = number < expert
    first = (block - tl.sum(tl.where(before, blocks, 0), 0)) * TOKENS
    begin = tl.sum(tl.where(before, count, 0), 0) + first
    size = tl.sum(tl.where(number == expert, count, 0), 0) - first
    return expert, begin, tl.maximum(tl.minimum(size, TOKENS), 0)


# A row of `list_blocks`: the expert, the place of its first choice in the order, and how many choices there are.
EXPERT, BEGIN, SIZE, LISTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
# The fields of `work`: how many blocks there are, and counters of the items that programs of two launches have taken.
BLOCKS, TAKEN, WORK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(3)


@triton.jit
def list_blocks(
    counts,
    listed,
    work,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """List the blocks of a step: `listed` i32[blocks, LISTED], and `work` i32[WORK], whose counters are 0.

    Grid: experts. Program e lists the blocks of expert e. Experts have their blocks one after the other.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    number = tl.arange(0, BLOCK_EXPERTS)
    count = tl.load(counts + number, mask=number < EXPERTS, other=0)
    blocks = (count + TOKENS - 1) // TOKENS
    before = number < expert
    first = tl.sum(tl.where(before, blocks, 0), 0)
    begin = tl.sum(tl.where(before, count, 0), 0)
    own = tl.sum(tl.where(number == expert, count, 0), 0)
    for done in range(0, own, TOKENS):
        row = listed + (first + done // TOKENS) * LISTED
        tl.store(row + EXPERT, expert)
        tl.store(row + BEGIN, begin + done)
        tl.store(row + SIZE, tl.minimum(own - done, TOKENS))
    if expert == 0:
        tl.store(work + BLOCKS, tl.sum(blocks, 0))
        tl.store(work + TAKEN, 0)
        tl.store(work + TAKEN + 1, 0)


@triton.jit
def add_choices(
    made,
    weights,
    residual,
    y,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    WEIGH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Add the results of each token's choices in order: y [rows, WIDTH] from `made` [rows * TOP_K, WIDTH].

    Grid: rows, cdiv(WIDTH, BLOCK). With WEIGH, `weights` f32[rows, TOP_K] multiply the results. `residual` [rows,
    WIDTH] is added last, or is None. Its rows are RESIDUAL_STRIDE elements apart. The sum is float32, and rounded once,
    also with a residual, as in `linear_tile`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for nth in tl.static_range(TOP_K):
        choice = row * TOP_K + nth
        value = tl.load(made + choice * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGH:
            value *= tl.load(weights + choice)
        total += value
    if residual is not None:
        total += tl.load(residual + row * RESIDUAL_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + column, total.to(y.dtype.element_ty), mask=inside)
