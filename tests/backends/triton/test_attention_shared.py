"""Attention that reads prefixes which sequences share once for all of them, against references that ignore sharing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from call_oracle import scaled_form
from op_values import widened
from paged_steps import Heads, PagedStep, paged_step
from triton_attention import CORES, FACTOR, attention_dtypes, check, narrowed
from triton_schedules import run_lowering, some

from ingot.backends.triton.lower.attention.paged import LOWERINGS
from ingot.ir.features.sharing import COUNT, LEADER, OWN
from ingot.ir.ops import OPS
from ingot.ir.tables import make_table
from ingot.runtime.pages.shared_prefixes import sharing_of

PAGE = 16
# Of each sequence the positions cached before, and the sequences that share their first so many positions.
Mix = tuple[list[int], list[tuple[list[int], int]]]
MIXES: dict[str, Mix] = {
    "a pair": ([300, 40, 200], [([0, 2], 160)]),
    "all of it": ([256, 256, 300], [([0, 1, 2], 256)]),  # two feed the first token of a page
    "two groups": ([200, 500, 210, 144, 530], [([0, 2, 3], 144), ([1, 4], 496)]),
    "more rows than a tile": ([130 + place for place in range(18)], [(list(range(18)), 128)]),
}


def shared(
    mix: Mix, dtype: torch.dtype, heads: Heads, behind: int = 0, scales: dict[str, Any] | None = None
) -> tuple[PagedStep, torch.Tensor]:
    """A step of such sequences, and its table of shared prefixes. The last page is NaN. With `scales` the cache is of
    eight bits."""
    lengths, groups = mix
    g = torch.Generator().manual_seed(len(lengths))
    step = paged_step(g, dtype, heads, [(1, length) for length in lengths], behind=behind)
    if scales is not None:
        step = narrowed(step, scales)
    kv = torch.cat([step.kv, torch.full_like(step.kv[:1], float("nan"))])
    table = step.page_table.clone()
    for members, positions in groups:
        for member in members[1:]:
            table[member, : positions // PAGE] = table[members[0], : positions // PAGE]
    held = np.array([-(-(length + 1) // PAGE) for length in lengths] + [0] * behind, np.int32)
    found = sharing_of(table.numpy(), held, np.arange(len(lengths), dtype=np.int32), PAGE, 1)
    assert found is not None
    rows = torch.zeros(len(lengths) + behind, found.shape[1], dtype=torch.int32)
    rows[: len(lengths)] = torch.from_numpy(found)
    return replace(step, page_table=table, kv=kv), rows


def agree(name: str, by_name: dict[str, Any], options: dict[str, Any], most: int) -> None:
    """The lowering errs as the reference in the dtype does. It reads the prefix of a group by the pages of its leader:
    by the page table of the others it is NaN."""
    op, q, sharing = OPS[name], by_name["q"], by_name["sharing"]
    hidden = by_name["page_table"].clone()
    for member, row in enumerate(sharing.tolist()):
        if row[OWN] and member not in sharing[:, LEADER][sharing[:, COUNT] > 0]:
            hidden[member, : row[OWN] // PAGE] = len(by_name["kv"]) - 1
    given = tuple({**by_name, "page_table": hidden}.values())
    found = run_lowering(op, LOWERINGS[name], given, options, tokens=(1, most), dims={"G": len(q)}, cores=CORES)
    args = tuple(by_name.values())
    reference, exact = (op.reference(*given, **options) for given in (args, widened(args)))
    if isinstance(reference, torch.Tensor):
        reference, exact = (reference,), (exact,)
    check(found, reference, exact, FACTOR[q.dtype], scaled_form(name, args, options))


@attention_dtypes
@pytest.mark.parametrize(
    ("mix", "heads", "options", "scales"),
    some(
        1,
        [
            (*case, scales)
            for case in (
                ("a pair", Heads(4, 2, 64), {}),
                ("all of it", Heads(4, 1, 64), {"soft_cap": 2.0}),
                ("two groups", Heads(6, 2, 32), {}),
                ("more rows than a tile", Heads(4, 1, 128), {}),
                ("two groups", Heads(3, 1, 64), {"slopes": True}),
            )
            for scales in (None, {}, {"k_scale": 0.3, "v_scale": 1.7}, {"per_token": True})
        ],
    ),
)
def test_a_prefix_is_read_once(
    mix: str, heads: Heads, options: dict[str, Any], scales: dict[str, Any] | None, dtype: torch.dtype
) -> None:
    step, sharing = shared(MIXES[mix], dtype, heads, behind=3, scales=scales)
    options = dict(options)
    slopes = torch.linspace(0.3, 0.004, heads.q) if options.pop("slopes", False) else None
    sinks = torch.linspace(-1.0, 3.0, heads.q).to(dtype) if options else None
    table = make_table(
        {"kind": "rope", "rope_type": "default", "positions": 1024, "theta": 1e4, "rotary_dim": heads.dim}
    )
    lens = dict(zip(("page_table", "q_starts", "q_lens", "kv_lens"), step.lens, strict=True))
    last = {"sinks": sinks, "sharing": sharing, "slopes": slopes}
    first = {"kv": step.kv, "q": step.q, "k": step.k, "v": step.v, "positions": step.positions, "table": table}
    args = {**first, "slots": step.slots, **lens, "q_weight": None, "k_weight": None, **last}
    given = {"scale": heads.dim**-0.5, **options, **(scales or {})}
    agree("append_attention", args, {"eps": 1e-5, **given}, 32)
    kv = OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots, **(scales or {}))
    agree(
        "paged_attention",
        {"q": step.q, "kv": kv, **lens, "sinks": sinks, "ancestors": None, "sharing": sharing, "slopes": slopes},
        given,
        64,
    )
