"""Every op's reference against the functions of torch and transformers, and what is promised of all ops alike."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from ingot.ir.errors import ConfigError, InternalError
from ingot.ir.ops import OPS, Op, Sample, define, op_of
from ingot.ir.ops.sampling import keep_mask, philox, uniform
from ingot.ir.schemes import SCHEMES, quantize
from ingot.ir.tables import ROPE_TYPES, make_table
from ingot.ir.tolerances import TOLERANCES, compare

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
FLOATS = tuple(TOLERANCES)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(g: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=g).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    assert found.dtype == dtype
    problem = compare(found, expected, dtype, factor=factor)
    assert problem is None, problem


# --- dense ops -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_embedding_is_torchs(dtype: torch.dtype) -> None:
    g = generator()
    weight, ids = randn(g, dtype, 41, 13), torch.randint(0, 41, (29,), generator=g, dtype=torch.int32)
    assert torch.equal(OPS["embedding"].reference(ids, weight), F.embedding(ids, weight))
    assert torch.equal(OPS["embedding"].reference(ids.long(), weight), F.embedding(ids, weight))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 1, 1), (5, 48, 72), (7, 37, 3), (3, 515, 129)])
def test_linear_is_a_float64_matmul(dtype: torch.dtype, rows: int, inner: int, outer: int) -> None:
    g = generator(rows)
    x, weight, bias = randn(g, dtype, rows, inner), randn(g, dtype, outer, inner), randn(g, dtype, outer)
    product = x.double() @ weight.double().T
    check(OPS["linear"].reference(x, weight), product, dtype)
    # In float16 and bfloat16 torch may add the bias to the rounded product: one rounding more.
    check(OPS["linear"].reference(x, weight, bias), product + bias.double(), dtype, 1 if dtype in (F32, F64) else 4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(6, 40), (1, 1), (5, 3, 17)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], scale: float) -> None:
    g = generator(1)
    x, weight = randn(g, dtype, *shape) * scale, randn(g, dtype, shape[-1])
    found = OPS["rms_norm"].reference(x, weight, eps=1e-5)
    # torch rounds once where Llama rounds the normed value first.
    check(found, F.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5), dtype)
    if dtype != F64:  # transformers computes in float32 whatever it is given
        theirs = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
        theirs.weight.data.copy_(weight)
        assert torch.equal(found, theirs(x))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_rms_norm_with_a_wider_weight_is_gemmas(dtype: torch.dtype) -> None:
    """Gains in float32: nothing is rounded before the product, and the result is x's dtype."""
    g = generator(21)
    x, weight = randn(g, dtype, 7, 40) * 3, randn(g, dtype, 40)
    theirs = gemma2.Gemma2RMSNorm(40, eps=1e-6)
    theirs.weight.data.copy_(weight)
    found = OPS["rms_norm"].reference(x, 1 + weight.float(), eps=1e-6)
    assert found.dtype == dtype and torch.equal(found, theirs(x))
    assert not torch.equal(found, OPS["rms_norm"].reference(x, 1 + weight, eps=1e-6))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(6, 40), (5, 3, 17), (1, 2)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2])
def test_layer_norm_is_torchs(dtype: torch.dtype, shape: tuple[int, ...], scale: float) -> None:
    g = generator(22)
    x, weight = (randn(g, dtype, *shape) + 2) * scale, randn(g, dtype, shape[-1])
    expected = F.layer_norm(x.double(), shape[-1:], weight.double(), eps=1e-5)
    # In float16 and bfloat16 the quotient is rounded before the product.
    check(OPS["layer_norm"].reference(x, weight, eps=1e-5), expected, dtype, 10 if dtype in (F32, F64) else 1)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("gains", [(4, 16), (16,)])
def test_layer_norm_with_float32_gains_is_coheres(dtype: torch.dtype, gains: tuple[int, ...]) -> None:
    """One weight for all heads, or one for each."""
    g = generator(23)
    x, weight = randn(g, dtype, 6, 4, 16) + 1, randn(g, F32, *gains)
    theirs = cohere.CohereLayerNorm(gains, eps=1e-5)
    theirs.weight.data.copy_(weight)
    found = OPS["layer_norm"].reference(x, weight, eps=1e-5)
    assert found.dtype == dtype
    problem = compare(found, theirs(x), dtype)
    assert problem is None, problem


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_mul_is_torchs(dtype: torch.dtype, approximate: str) -> None:
    g = generator(24)
    gate, up = randn(g, dtype, 5, 37) * 3, randn(g, dtype, 5, 37)
    expected = F.gelu(gate.double(), approximate=approximate) * up.double()
    found = OPS["gelu_mul"].reference(gate, up, approximate=approximate)
    check(found, expected, dtype)
    other = F.gelu(gate.double(), approximate="tanh" if approximate == "none" else "none") * up.double()
    if dtype in (F32, F64):
        assert compare(found, other, dtype) is not None, "the two approximations differ by more than rounding"
    merged = torch.cat([gate, up], 1)
    sliced = OPS["gelu_mul"].reference(merged[:, :37], merged[:, 37:], approximate=approximate)
    assert sliced.is_contiguous()
    check(sliced, found, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cap", [1.0, 30.0, 50])
def test_soft_cap(dtype: torch.dtype, cap: float) -> None:
    x = randn(generator(25), dtype, 6, 33) * 60
    found = OPS["soft_cap"].reference(x, cap=cap)
    check(found, cap * torch.tanh(x.double() / cap), dtype)
    assert bool((found.abs() <= cap).all()) and bool((found * x >= 0).all())


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_add_rms_norm_rounds_the_sum_first(dtype: torch.dtype) -> None:
    g = generator(2)
    x, residual, weight = randn(g, dtype, 6, 40), randn(g, dtype, 6, 40) * 50, randn(g, dtype, 40)
    normed, total = OPS["add_rms_norm"].reference(x, residual, weight, eps=1e-6)
    theirs = LlamaRMSNorm(40, eps=1e-6).to(dtype)
    theirs.weight.data.copy_(weight)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, theirs(x + residual))


@pytest.mark.parametrize("dtype", FLOATS)
def test_silu_mul(dtype: torch.dtype) -> None:
    g = generator(3)
    gate, up = randn(g, dtype, 5, 37) * 5, randn(g, dtype, 5, 37)
    check(OPS["silu_mul"].reference(gate, up), F.silu(gate.double()) * up.double(), dtype)
    merged = torch.cat([gate, up], 1)
    sliced = OPS["silu_mul"].reference(merged[:, :37], merged[:, 37:])
    assert sliced.is_contiguous()
    check(sliced, OPS["silu_mul"].reference(gate, up), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_select_rows_and_cast(dtype: torch.dtype) -> None:
    x = randn(generator(4), dtype, 6, 3, 5)
    assert torch.equal(OPS["select_rows"].reference(x, ints(5, 0, 0, 2)), x[[5, 0, 0, 2]])
    for other in FLOATS:
        assert torch.equal(OPS["cast"].reference(x, dtype=other), x.to(other))


# --- rotary embedding ------------------------------------------------------------------------------------------------

ROPE_CASES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
]


def rope_attrs(case: dict[str, Any], rotary_dim: int, theta: float, positions: int) -> dict[str, Any]:
    renamed = {"original_max_position_embeddings": "original_max_position"}
    scaling = {renamed.get(name, name): value for name, value in case.items()}
    return {"kind": "rope", "positions": positions, "rotary_dim": rotary_dim, "theta": theta, **scaling}


def llama_config(case: dict[str, Any], head_dim: int, theta: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **case},
    )


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("case", ROPE_CASES, ids=lambda case: str(case["rope_type"]))
def test_rope_tables_are_transformers(case: dict[str, Any], head_dim: int, theta: float) -> None:
    config = llama_config(case, head_dim, theta)
    if case["rope_type"] == "default":
        frequencies, scaling = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[case["rope_type"]](config)
    assert scaling == 1.0
    attrs = rope_attrs(case, head_dim, theta, 4096)
    ours = ROPE_TYPES[case["rope_type"]](attrs)
    assert ours.dtype == frequencies.dtype == F32
    if case["rope_type"] == "llama3":  # the same formula in another order
        torch.testing.assert_close(ours, frequencies, rtol=2**-22, atol=0)
    else:
        assert torch.equal(ours, frequencies)

    table = make_table(attrs)
    assert table.shape == (4096, head_dim) and table.dtype == F32 and table.is_contiguous()
    positions = torch.arange(4096)
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), positions[None])
    theirs = torch.cat([cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]], 1)
    if torch.equal(ours, frequencies):
        assert torch.equal(table, theirs)
    else:  # an angle is off by what its frequency is off
        angles = torch.outer(positions.float(), ours)
        assert bool(((table - theirs).abs() <= torch.cat([angles, angles], 1) * 2**-21 + 2**-23).all())
    assert torch.equal(table[0, : head_dim // 2], torch.ones(head_dim // 2))


def test_attention_factor_scales_cosines_and_sines() -> None:
    attrs = rope_attrs({"rope_type": "default"}, 8, 1e4, 50)
    assert torch.equal(make_table({**attrs, "attention_factor": 1.25}), make_table(attrs) * 1.25)


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown table 'rope' / 'yarm'"):
        make_table(rope_attrs({"rope_type": "yarm"}, 8, 1e4, 4))
    with pytest.raises(ConfigError, match="unknown table 'alibi'"):
        make_table({"kind": "alibi"})


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rotary", [16, 12, 2])
def test_rope_is_transformers(dtype: torch.dtype, rotary: int) -> None:
    """With the table's own angles, in float64; the rest of each head stays as it is, to the bit."""
    g = generator(5)
    x, positions = randn(g, dtype, 7, 3, 16), ints(0, 1, 63, 17, 17, 5, 40)
    table = make_table(rope_attrs({"rope_type": "default"}, rotary, 1e4, 64))
    cos, sin = (part.repeat(1, 2)[positions.long()][None].double() for part in table.chunk(2, 1))
    turned, _ = apply_rotary_pos_emb(x[None, ..., :rotary].double(), x[None, ..., :rotary].double(), cos, sin, 2)
    found = OPS["rope"].reference(x, positions, table)
    check(found[..., :rotary], turned[0], dtype)
    assert torch.equal(found[..., rotary:], x[..., rotary:])


@pytest.mark.parametrize("case", ROPE_CASES, ids=lambda case: str(case["rope_type"]))
def test_rope_is_llamas(case: dict[str, Any]) -> None:
    g = generator(6)
    q, k, positions = randn(g, F32, 9, 4, 64), randn(g, F32, 9, 2, 64), torch.randint(0, 512, (9,), generator=g)
    cos, sin = LlamaRotaryEmbedding(llama_config(case, 64, 1e4))(q, positions[None])
    table = make_table(rope_attrs(case, 64, 1e4, 512))
    for x in (q, k):
        theirs = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)[0][0]
        check(OPS["rope"].reference(x, positions.int(), table), theirs, F32, 5)  # angles differ by ulps at position 511


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rotary", [16, 12, 2])
def test_interleaved_rope_is_coheres(dtype: torch.dtype, rotary: int) -> None:
    """Cohere turns 2i against 2i + 1, in float32; the rest of each head stays as it is."""
    g = generator(26)
    x, positions = randn(g, dtype, 7, 3, 16), ints(0, 1, 63, 17, 17, 5, 40)
    table = make_table(rope_attrs({"rope_type": "default"}, rotary, 1e4, 64))
    cos, sin = (part.repeat_interleave(2, 1)[positions.long()][None] for part in table.chunk(2, 1))
    turned, _ = cohere.apply_rotary_pos_emb(x[None, ..., :rotary], x[None, ..., :rotary], cos, sin, unsqueeze_dim=2)
    found = OPS["rope"].reference(x, positions, table, interleaved=True)
    if dtype == F64:  # theirs is float32 whatever it is given
        check(found[..., :rotary].float(), turned[0], F32)
    else:
        check(found[..., :rotary], turned[0], dtype)
    assert torch.equal(found[..., rotary:], x[..., rotary:])
    # The same turn as in NeoX order with the elements of a head sorted: evens, then odds.
    order = torch.cat([torch.arange(0, rotary, 2), torch.arange(1, rotary, 2), torch.arange(rotary, 16)])
    assert torch.equal(found[..., order], OPS["rope"].reference(x[..., order], positions, table))


# --- attention -------------------------------------------------------------------------------------------------------


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """torch's attention of the last q.shape[0] positions of one sequence, in float64."""
    mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
    q4, k4, v4 = (tensor.double().transpose(0, 1)[None] for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(q4, k4, v4, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


HEADS = [(4, 4), (6, 2), (5, 1), (1, 1)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_attention_is_torchs(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    g = generator(heads)
    lengths, dim = [5, 1, 9, 3], 17
    total = sum(lengths)
    q, k, v = (
        randn(g, dtype, total, heads, dim),
        randn(g, dtype, total, kv_heads, dim),
        randn(g, dtype, total, kv_heads, dim),
    )
    expected = torch.cat(
        [sdpa(*parts, 0.3) for parts in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)]
    )
    positions = torch.cat([torch.arange(n) for n in lengths]).int()
    seqs = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).int()
    check(OPS["attention"].reference(q, k, v, positions, seqs, scale=0.3, layer=0), expected, dtype)
    # The order of the tokens in a step means nothing: only positions and sequences do.
    order = torch.randperm(total, generator=g)
    args = (q[order], k[order], v[order], positions[order], seqs[order])
    check(OPS["attention"].reference(*args, scale=0.3, layer=7), expected[order], dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_paged_attention_is_attention_over_the_whole_sequence(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    """Three steps of four sequences over permuted pages, with NaN wherever nothing was written."""
    g = generator(7)
    page_size, dim, pages = 4, 9, 40
    steps = [[5, 1, 9, 0], [1, 1, 3, 8], [1, 7, 1, 1]]
    owned = torch.randperm(pages, generator=g)[: 4 * 6].view(4, 6)
    kv = torch.full((pages, 2, page_size, kv_heads, dim), math.nan, dtype=dtype)
    history = {name: [torch.empty(0, kv_heads, dim, dtype=dtype)] * 4 for name in "kv"}
    for lengths in steps:
        total = sum(lengths) + 2  # two rows of padding
        q, k, v = (
            randn(g, dtype, total, heads, dim),
            randn(g, dtype, total, kv_heads, dim),
            randn(g, dtype, total, kv_heads, dim),
        )
        slots, expected, start = torch.full((total,), -1), torch.zeros(total, heads, dim, dtype=F64), 0
        for b, length in enumerate(lengths):
            rows = slice(start, start + length)
            places = history["k"][b].shape[0] + torch.arange(length)
            slots[rows] = owned[b, places // page_size] * page_size + places % page_size
            history["k"][b] = torch.cat([history["k"][b], k[rows]])
            history["v"][b] = torch.cat([history["v"][b], v[rows]])
            if length:
                expected[rows] = sdpa(q[rows], history["k"][b], history["v"][b], 0.3)
            start += length
        kv = OPS["kv_append"].reference(kv, k, v, slots)
        kv_lens = [keys.shape[0] for keys in history["k"]]
        table = owned.int().clone()
        for b, length in enumerate(kv_lens):
            table[b, -(-length // page_size) :] = 2**30  # past a sequence's length the table is never read
        starts = ints(*(sum(lengths[:b]) for b in range(4)))
        found = OPS["paged_attention"].reference(q, kv, table, starts, ints(*lengths), ints(*kv_lens), scale=0.3)
        check(found, expected, dtype)
    written = sum(sum(lengths) for lengths in steps)
    assert int((~kv[:, 0].isnan()).sum()) == int((~kv[:, 1].isnan()).sum()) == written * kv_heads * dim


VARIANTS: list[dict[str, Any]] = [
    {},
    {"window": 3},
    {"window": 1},
    {"window": 1000},
    {"soft_cap": 1.5},
    {"sinks": True},
    {"window": 4, "soft_cap": 2.0, "sinks": True},
]


def attention_by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, variant: dict[str, Any], sinks: torch.Tensor | None
) -> torch.Tensor:
    """In float64, one query and one head at a time: the last q.shape[0] positions of one sequence."""
    q, k, v = q.double(), k.double(), v.double()
    out, group = torch.empty_like(q), q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        place = k.shape[0] - q.shape[0] + row
        first = max(0, place - variant.get("window", place + 1) + 1)
        for head in range(q.shape[1]):
            keys, values = (x[first : place + 1, head // group] for x in (k, v))
            scores = keys @ q[row, head] * scale
            if "soft_cap" in variant:
                scores = variant["soft_cap"] * torch.tanh(scores / variant["soft_cap"])
            weights = scores.exp()
            rest = 0.0 if sinks is None else float(sinks[head].double().exp())
            out[row, head] = weights @ values / (weights.sum() + rest)
    return out


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_attention_with_window_soft_cap_and_sinks(dtype: torch.dtype, variant: dict[str, Any]) -> None:
    g = generator(27)
    lengths, total = [5, 1, 9], 15
    q, k, v = (randn(g, dtype, total, heads, 8) for heads in (6, 2, 2))
    sinks = randn(g, dtype, 6) if variant.get("sinks") else None
    options = {name: value for name, value in variant.items() if name != "sinks"}
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    expected = torch.cat([attention_by_hand(*part, 0.3, variant, sinks) for part in parts])
    positions = torch.cat([torch.arange(n) for n in lengths]).int()
    seqs = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).int()
    found = OPS["attention"].reference(q, k, v, positions, seqs, sinks, scale=0.3, layer=0, **options)
    check(found, expected, dtype)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", ["soft_cap", "sinks"])
def test_attention_is_gemmas_and_gpt_osss(kind: str, window: int | None) -> None:
    """transformers' eager attention of the two models that these came from, in float32."""
    g = generator(28)
    length, heads, kv_heads = 11, 6, 2
    q, k, v = (randn(g, F32, length, n, 16) for n in (heads, kv_heads, kv_heads))
    behind = torch.arange(length)[:, None] - torch.arange(length)
    seen = (behind >= 0) & (behind < (window or length))
    mask = torch.zeros(1, 1, length, length).masked_fill(~seen, -math.inf)
    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))
    sinks = randn(g, F32, heads) * 2
    layer = SimpleNamespace(num_key_value_groups=heads // kv_heads, training=False, sinks=sinks, head_dim=16)
    args = (q, k, v, torch.arange(length).int(), torch.zeros(length, dtype=torch.int32))
    options: dict[str, Any] = {"scale": 0.7, "layer": 0, "window": window}
    if kind == "soft_cap":
        theirs, _ = gemma2.eager_attention_forward(layer, q4, k4, v4, mask, scaling=0.7, softcap=2.5)
        found = OPS["attention"].reference(*args, **options, soft_cap=2.5)
    else:
        theirs, _ = gpt_oss.eager_attention_forward(layer, q4, k4, v4, mask, scaling=0.7)
        found = OPS["attention"].reference(*args, sinks, **options)
    check(found, theirs[0], F32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_paged_attention_with_window_soft_cap_and_sinks(dtype: torch.dtype, variant: dict[str, Any]) -> None:
    """Pages that lie wholly before every window are never read: their numbers in the table are nonsense."""
    g = generator(29)
    lengths, counts, page, dim = [13, 6, 1], [2, 6, 1], 4, 8
    k, v = ([randn(g, dtype, n, 2, dim) for n in lengths] for _ in range(2))
    q, sinks = randn(g, dtype, 9, 6, dim), randn(g, dtype, 6) if variant.get("sinks") else None
    table = torch.randperm(20, generator=g)[:12].view(3, 4).int()
    kv = torch.full((20, 2, page, 2, dim), math.nan, dtype=dtype)
    for b, length in enumerate(lengths):
        places = torch.arange(length)
        slots = table[b, places // page].long() * page + places % page
        kv = OPS["kv_append"].reference(kv, k[b], v[b], slots)
        unread = max(0, length - counts[b] - variant.get("window", 1000) + 1) // page
        table[b, :unread] = 2**30
        table[b, -(-length // page) :] = 2**30
    parts = zip(q.split(counts), k, v, strict=True)
    expected = torch.cat([attention_by_hand(*part, 0.3, variant, sinks) for part in parts])
    options = {name: value for name, value in variant.items() if name != "sinks"}
    args = (q, kv, table, ints(0, 2, 8), ints(*counts), ints(*lengths), sinks)
    for function in (OPS["paged_attention"].reference, OPS["paged_attention"].rowwise):
        check(function(*args, scale=0.3, **options), expected, dtype)


# --- norm, rope and cache write in one -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_qk_norm_rope_append_is_its_parts(
    dtype: torch.dtype, interleaved: bool, normed: bool, wide_weight: bool
) -> None:
    g = generator(30)
    qkv = randn(g, dtype, 5, 8 * 12)
    q, k, v = (part.view(5, -1, 12) for part in qkv.split([48, 24, 24], 1))
    weights = [randn(g, torch.promote_types(dtype, F32) if wide_weight else dtype, 12) for _ in range(2)]
    kv, slots = randn(g, dtype, 6, 2, 4, 2, 12), torch.tensor([5, 23, -1, 0, 12])
    positions, table = ints(3, 0, 9, 9, 31), make_table(rope_attrs({"rope_type": "default"}, 8, 1e4, 32))
    args = (kv, q, k, v, positions, table, slots, *(weights if normed else ()))
    found = OPS["qk_norm_rope_append"].reference(*args, eps=1e-3, interleaved=interleaved)
    if normed:
        q, k = (OPS["rms_norm"].reference(x, w, eps=1e-3) for x, w in zip((q, k), weights, strict=True))
    q, k = (OPS["rope"].reference(x, positions, table, interleaved=interleaved) for x in (q, k))
    assert torch.equal(found[0], q)
    assert torch.equal(found[1], OPS["kv_append"].reference(kv, k, v, slots))
    untouched = torch.ones(6, 4, dtype=torch.bool)
    untouched.view(-1)[slots[slots >= 0]] = False
    changed = found[1].transpose(1, 2)
    assert torch.equal(changed[untouched], kv.transpose(1, 2)[untouched])


@pytest.mark.parametrize("dtype", FLOATS)
def test_qk_norm_rope_append_of_a_token_does_not_see_the_others(dtype: torch.dtype) -> None:
    """No provider computes it row by row, so its own bits must not depend on the batch."""
    op = OPS["qk_norm_rope_append"]
    g = generator(31)
    for heads, dim in ((4, 64), (2, 80), (3, 36)):
        q, k, v = (randn(g, dtype, 33, n, dim) for n in (heads * 2, heads, heads))
        kv, slots = torch.zeros(5, 2, 16, heads, dim, dtype=dtype), torch.randperm(80, generator=g)[:33]
        positions = torch.randint(0, 64, (33,), generator=g).int()
        table = make_table(rope_attrs({"rope_type": "default"}, dim, 1e4, 64))
        weights = (randn(g, dtype, dim), randn(g, dtype, dim))
        query, cache = op.rowwise(kv, q, k, v, positions, table, slots, *weights, eps=1e-6)
        for row in range(33):
            one = slice(row, row + 1)
            alone, kv = op.rowwise(kv, q[one], k[one], v[one], positions[one], table, slots[one], *weights, eps=1e-6)
            assert torch.equal(alone, query[one])
        assert torch.equal(kv, cache)


# --- sampling --------------------------------------------------------------------------------------------------------

NO_FILTER = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def draw(
    logits: torch.Tensor, *, temperature: float = 1.0, seeds: Any = 0, positions: Any = 0, **options: Any
) -> torch.Tensor:
    """`sample` with one setting for all rows."""
    count = logits.shape[0]
    settings = {**NO_FILTER, **options}
    tokens: torch.Tensor = OPS["sample"].reference(
        logits,
        torch.full((count,), temperature),
        torch.full((count,), settings["top_k"], dtype=torch.int32),
        torch.full((count,), settings["top_p"]),
        torch.full((count,), settings["min_p"]),
        torch.zeros(count, dtype=torch.int64) + seeds,
        torch.zeros(count, dtype=torch.int32) + positions,
    )
    return tokens


# Random123's kat_vectors, the lines "philox4x32 10".
PHILOX_VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX_VECTORS)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    first, second = torch.tensor([key[0]]), torch.tensor([key[1]])
    assert tuple(int(word) for word in philox(tuple(torch.tensor([c]) for c in counter), (first, second))) == words


def test_uniform_is_words_of_philox() -> None:
    """Word j of a row is word j % 4 of counter (j // 4, position, 0, 0) under the two halves of the seed."""
    seeds, positions = torch.tensor([-1, 2**40 + 7, 0]), ints(3, 2**31 - 1, 0)
    found = uniform(seeds, positions, 11)
    assert found.shape == (3, 11) and found.dtype == F32
    for row in range(3):
        key = (seeds[row : row + 1] & 0xFFFFFFFF, (seeds[row : row + 1] >> 32) & 0xFFFFFFFF)
        for j in range(11):
            zero = torch.tensor([0])
            words = philox((torch.tensor([j // 4]), positions[row : row + 1].long(), zero, zero), key)
            assert abs(float(found[row, j]) - int(words[j % 4]) / 2**32) <= 2**-23


def test_uniform_stays_inside_the_open_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest word once rounded to 1: the noise was infinite and overruled every filter."""
    import sys

    def extremes(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.full_like(counter[0], word) for word in (0, 0xFFFFFFFF, 0xFFFFFFFE, 1))

    monkeypatch.setattr(sys.modules["ingot.ir.ops.sampling"], "philox", extremes)
    found = uniform(torch.tensor([0]), ints(0), 4)
    assert bool((found > 0).all()) and bool((found < 1).all())
    assert int(draw(torch.tensor([[9.0, 1.0, 2.0, 0.0]]), top_k=1)) == 0


def test_keep_mask_is_transformers() -> None:
    """MinP, then TopK, then TopP of transformers, in float64 so that no threshold falls between two roundings."""
    g = generator(8)
    unused: Any = None  # the ids so far
    for row in range(200):
        vocab = int(torch.randint(1, 70, (1,), generator=g))
        logits = torch.randn(1, vocab, generator=g, dtype=F64) * 4
        top_k = [0, 1, 3, 20, 1000][row % 5]
        top_p, min_p = [1.0, 0.95, 0.5, 0.01][row % 4], [0.0, 0.02, 0.3, 1.0][row // 5 % 4]
        if row % 7 == 0:
            logits[0, ::3] = -math.inf
            logits[0, 0] = 0.0
        scores = MinPLogitsWarper(min_p)(unused, logits)
        if top_k:
            scores = TopKLogitsWarper(top_k)(unused, scores)
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(unused, scores)
        columns = (torch.tensor([top_p], dtype=F64), torch.tensor([min_p], dtype=F64))
        found = keep_mask(logits, ints(top_k), *columns)
        assert torch.equal(found, scores.isfinite()), (row, vocab, top_k, top_p, min_p)


def test_keep_mask_at_ties_and_edges() -> None:
    def kept(logits: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
        mask = keep_mask(torch.tensor([logits]), ints(top_k), torch.tensor([top_p]), torch.tensor([min_p]))
        return mask[0].nonzero().flatten().tolist()

    assert kept([1.0, 2.0, 2.0, 2.0, 0.0], top_k=2) == [1, 2, 3]  # ties with the k-th survive
    assert kept([0.0, 0.0, 0.0, 0.0], top_p=0.3) == [0, 1]  # of ties at the edge, the lowest ids
    assert kept([1.0, 2.0, 3.0], top_p=0.0) == [2]  # the most likely one always does
    assert kept([1.0, 2.0, 3.0], min_p=1.0) == [2]
    assert kept([1.0, 1.0, 1.0], top_k=1, top_p=0.0, min_p=1.0) == [0]
    assert kept([0.0] * 2000, top_p=0.0101) == list(range(21))
    assert kept([30.0, 0.0, 1.0]) == [0, 1, 2]  # off means off, though in float32 the first has all the probability


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """How many standard deviations Pearson's statistic lies above its mean."""
    expected = probs * counts.sum()
    used = expected > 0
    assert int(counts[~used].sum()) == 0
    statistic = float(((counts - expected)[used] ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
@pytest.mark.parametrize("by", ["seeds", "positions"])
def test_draws_follow_the_distribution(options: dict[str, Any], by: str) -> None:
    count, vocab = 20_000, 15
    logits = torch.randn(1, vocab, generator=generator(9)) * 1.5
    scaled = logits.double() / options.get("temperature", 1.0)
    settings = {**NO_FILTER, **options}
    mask = keep_mask(
        scaled, ints(settings["top_k"]), torch.tensor([settings["top_p"]]), torch.tensor([settings["min_p"]])
    )
    probs = scaled.masked_fill(~mask, -math.inf).softmax(-1)[0]
    keys: dict[str, Any] = {by: torch.arange(count, dtype=torch.int64 if by == "seeds" else torch.int32)}
    tokens = draw(logits.expand(count, vocab), **options, **keys)
    assert tokens.dtype == torch.int32
    assert chi_square(torch.bincount(tokens.long(), minlength=vocab), probs) < 4


def test_consecutive_draws_are_independent() -> None:
    count = 20_000
    logits = torch.tensor([[0.0, 0.5, 1.0, -0.5]])
    first, second = (draw(logits.expand(count, 4), seeds=torch.arange(count) << 20, positions=p).long() for p in (6, 7))
    probs = logits.double().softmax(-1)[0]
    assert chi_square(torch.bincount(first * 4 + second, minlength=16), torch.outer(probs, probs).flatten()) < 4


@pytest.mark.parametrize("vocab", [1, 37, 1001])
def test_a_draw_depends_on_its_row_alone(vocab: int) -> None:
    g = generator(10)
    rows = 23
    args = (
        torch.randn(rows, vocab, generator=g) * 3,
        torch.tensor([0.0, 0.7, 1.0, 2.0])[torch.arange(rows) % 4],
        torch.tensor([0, 1, 7], dtype=torch.int32)[torch.arange(rows) % 3],
        torch.tensor([1.0, 0.9])[torch.arange(rows) % 2],
        torch.tensor([0.0, 0.05])[torch.arange(rows) // 2 % 2],
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        torch.randint(0, 2**31 - 1, (rows,), generator=g, dtype=torch.int32),
    )
    sample = OPS["sample"].reference
    whole = sample(*args)
    order = torch.randperm(rows, generator=g)
    assert torch.equal(sample(*(arg[order] for arg in args)), whole[order])
    assert torch.equal(sample(*(arg[:5] for arg in args)), whole[:5])
    for row in range(rows):
        assert torch.equal(sample(*(arg[row : row + 1] for arg in args)), whole[row : row + 1])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_cannot_be_sampled_give_minus_one(temperature: float) -> None:
    logits = torch.randn(6, 9, generator=generator(11))
    good = draw(logits, temperature=temperature)
    logits[1, 4], logits[2, 0] = math.nan, math.inf
    logits[3] = -math.inf
    logits[4, 1:] = -math.inf
    found = draw(logits, temperature=temperature)
    assert found.tolist() == [int(good[0]), -1, -1, -1, 0, int(good[5])]


def test_greedy_takes_the_lowest_of_the_most_likely() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-1.0, -2.0, -1.0, -1.0]])
    assert draw(logits, temperature=0.0, top_k=2, seeds=5).tolist() == [1, 0, 0]
    long = torch.zeros(2, 40_003)
    long[:, 7::5000] = 1.0
    assert draw(long, temperature=0.0).tolist() == [7, 7]


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 1e-45])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """Logits over a tiny temperature overflowed once, and token 0 came out."""
    logits = torch.tensor([[-80.0, 5.0, 80.0, 79.0], [-9.0, -3.0, -8.0, -7.0]])
    assert draw(logits, temperature=temperature, top_p=0.9).tolist() == [2, 1]


# --- the ends of a step ----------------------------------------------------------------------------------------------


def random_step(seed: int) -> tuple[tuple[torch.Tensor, ...], int]:
    """Arguments of `feed`, with padding, decode rows and prefill rows mixed."""
    g = generator(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    page_size, slots, sequences = [1, 4, 16][seed % 3], 9, pick(1, 5)
    rows = torch.randperm(slots, generator=g)[:sequences].int()
    tokens: list[int] = []
    seqs: list[int] = []
    starts: list[int] = []
    lens: list[int] = []
    begins: list[int] = []
    for b in range(sequences):
        starts.append(len(tokens))
        if pick(0, 4) == 0:  # a padding sequence
            rows[b] = -1
            lens.append(0)
            begins.append(-1)
            continue
        decode = pick(0, 2) == 0
        length = 1 if decode else pick(1, 7)
        lens.append(length)
        begins.append(-1 if decode else pick(0, 12))
        tokens += [-1] if decode else [pick(0, 99) for _ in range(length)]
        seqs += [b] * length
    padding = pick(0, 3)
    tokens += [pick(-1, 99) for _ in range(padding)] or ([-1] if not tokens else [])
    seqs += [-1] * (len(tokens) - len(seqs))
    table = torch.randint(0, 50, (sequences, 24), generator=g, dtype=torch.int32)
    last, position = (torch.randint(0, 12, (slots,), generator=g, dtype=torch.int32) for _ in range(2))
    return (
        (ints(*tokens), ints(*seqs), ints(*starts), ints(*lens), rows, ints(*begins), table, last, position),
        page_size,
    )


@pytest.mark.parametrize("seed", range(40))
def test_feed_and_advance_against_a_plain_model(seed: int) -> None:
    args, page_size = random_step(seed)
    tokens, seqs, starts, lens, rows, begins, table, last, position = (arg.tolist() for arg in args)
    ids: list[int] = []
    places: list[int] = []
    slots: list[int] = []
    for i, token in enumerate(tokens):
        b = seqs[i]
        if b < 0:
            ids, places, slots = [*ids, 0], [*places, 0], [*slots, -1]
            continue
        begin = begins[b] if begins[b] >= 0 else position[rows[b]]
        place = begin + i - starts[b]
        ids.append(last[rows[b]] if token == -1 else token)
        places.append(place)
        slots.append(table[b][place // page_size] * page_size + place % page_size)
    kv_lens = []
    for b, row in enumerate(rows):
        begin = begins[b] if begins[b] >= 0 else position[row]
        kv_lens.append(begin + lens[b] if row >= 0 else 0)
    found = OPS["feed"].reference(*args, page_size=page_size)
    assert [tensor.tolist() for tensor in found] == [ids, places, slots, kv_lens]

    sampled = torch.arange(100, 100 + len(rows), dtype=torch.int32)
    index = ints(*((b + seed) % len(rows) if (b * 7 + seed) % 3 else -1 for b in range(len(rows))))
    for b, row in enumerate(rows):
        if row >= 0:
            position[row] = kv_lens[b]
            if index[b] >= 0:
                last[row] = int(sampled[index[b]])
    moved = OPS["advance"].reference(args[7], args[8], args[4], found[3], sampled, index)
    assert [tensor.tolist() for tensor in moved] == [last, position]


def test_advance_takes_back_what_is_rejected() -> None:
    """Rows 2, 0, 3 feed 3, 1 and 2 tokens, each with its row of logits; row 3 commits nothing, row 1 is not fed."""
    last, position = ints(90, 91, 92, 93), ints(10, 11, 12, 13)
    sampled = ints(70, 71, 72, 80, 60, 61)
    args = (ints(2, 0, -1, 3), ints(15, 11, 0, 15), sampled, ints(2, 3, -1, -1))
    found = OPS["advance"].reference(last, position, *args, ints(2, 0, 0, 2))
    assert [tensor.tolist() for tensor in found] == [[80, 91, 70, 93], [11, 11, 13, 13]]
    none = OPS["advance"].reference(last, position, *args, ints(0, 0, 0, 0))
    assert all(map(torch.equal, none, OPS["advance"].reference(last, position, *args)))


# --- what is promised of all ops -------------------------------------------------------------------------------------

ROWS: dict[str, tuple[str, ...]] = {
    "embedding": ("tokens",),
    "linear": ("x",),
    "quant_linear": ("x",),
    "rms_norm": ("x",),
    "add_rms_norm": ("x", "residual"),
    "rope": ("x", "positions"),
    "silu_mul": ("gate", "up"),
    "gelu_mul": ("gate", "up"),
    "layer_norm": ("x",),
    "soft_cap": ("x",),
    "select_rows": ("rows",),
    "cast": ("x",),
    "moe": ("x", "router_logits"),
    "sample": ("logits", "temperature", "top_k", "top_p", "min_p", "seeds", "positions"),
    "penalize": ("logits", "count_rows", "repetition", "frequency", "presence", "banned"),
    "top_logprobs": ("logits", "sampled", "targets", "num_logprobs"),
}


# Ops whose rows belong to sequences or to a state.
MOVERS = ("state_copy", "state_move", "state_zero")
WHOLE = (
    "attention",
    "paged_attention",
    "kv_append",
    "qk_norm_rope_append",
    "feed",
    "advance",
    "count_tokens",
    *MOVERS,
)

# Ops of several ranks, which have no reference for one: `test_collectives.py` has their tests.
COLLECTIVES = frozenset(name for name, op in OPS.items() if op.across is not None)


def odd_samples(name: str, dtype: torch.dtype) -> list[Sample]:
    """Fresh arguments of odd sizes, strided where a merged weight would make them so."""
    g = generator(99)

    def rand(*shape: int) -> torch.Tensor:
        return randn(g, dtype, *shape)

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=g, dtype=torch.int32)

    merged = rand(11, 3 * 37)
    heads = rand(11, 5 * 18).view(11, 5, 18)
    table = make_table(rope_attrs({"rope_type": "linear", "factor": 2.0}, 10, 1e6, 31))
    counts = ints(2, 0, 1)
    int8, int4 = (quantize(rand(53, inner), SCHEMES[scheme]) for inner, scheme in ((37, "int8"), (32, "int4_g32")))
    kv, kv10 = rand(7, 2, 3, 2, 5), rand(7, 2, 3, 2, 10)
    return {
        "embedding": [Sample((whole(17, 11), rand(17, 37)))],
        "linear": [Sample((rand(11, 37), rand(53, 37), rand(53))), Sample((merged[:, 37:74], rand(1, 37)))],
        "quant_linear": [
            Sample((rand(11, 37), int8["weight"], int8["scales"], None, rand(53)), {"scheme": "int8"}),
            Sample((merged[:, 37:69], *int4.values()), {"scheme": "int4_g32"}),
        ],
        "rms_norm": [
            Sample((merged[:, :37], rand(37)), {"eps": 1e-6}),
            Sample((heads[:, 1:4], rand(18)), {"eps": 0.1}),
            Sample((heads[:, 1:4], rand(18).to(torch.promote_types(dtype, F32))), {"eps": 0.1}),
        ],
        "layer_norm": [
            Sample((merged[:, :37], rand(37)), {"eps": 1e-6}),
            Sample((heads[:, 1:4], rand(3, 18).to(torch.promote_types(dtype, F32))), {"eps": 0.1}),
        ],
        "add_rms_norm": [Sample((rand(11, 37), merged[:, 37:74], rand(37)), {"eps": 1e-5})],
        "rope": [
            Sample((heads[:, 1:4], whole(31, 11), table)),
            Sample((heads[:, 1:4], whole(31, 11), table), {"interleaved": True}),
        ],
        "gelu_mul": [Sample((merged[:, :37], merged[:, 74:]), {"approximate": how}) for how in ("none", "tanh")],
        "soft_cap": [Sample((merged[:, 3:8],), {"cap": 0.5}), Sample((rand(2, 3, 5),), {"cap": 50.0})],
        "silu_mul": [Sample((merged[:, :37], merged[:, 74:])), Sample((rand(1, 1), rand(1, 1)))],
        "select_rows": [Sample((rand(11, 3, 5), whole(11, 7)))],
        "moe": [
            Sample(
                (
                    merged[:, 37:74],
                    torch.randn(11, 7, generator=g).to(torch.promote_types(dtype, F32)),
                    rand(7, 6, 37),
                    rand(7, 37, 3),
                ),
                {"top_k": 7},
            )
        ],
        "cast": [Sample((merged[:, 3:8],), {"dtype": F16}), Sample((rand(3, 5),), {"dtype": dtype})],
        "attention": [
            Sample((heads[:, :4], heads[:, 4:], rand(11, 1, 18), *order), {"scale": 0.5, "layer": 3})
            for order in [(ints(*range(11)), whole(1, 11)), (ints(*range(5), *range(6)), ints(*[1] * 5, *[0] * 6))]
        ]
        + [
            Sample(
                (rand(7, 3, 5), rand(7, 3, 5), rand(7, 3, 5), ints(*range(7)), whole(1, 7)), {"scale": 1.0, "layer": 0}
            ),
            Sample(
                (heads[:, :4], heads[:, 4:], rand(11, 1, 18), ints(*range(11)), whole(1, 11), rand(4)),
                {"scale": 0.5, "layer": 3, "window": 4, "soft_cap": 2.0},
            ),
        ],
        "kv_append": [Sample((kv, rand(4, 2, 5), merged[:4, :10].view(4, 2, 5), torch.tensor([20, -1, 0, 7])))],
        "paged_attention": [
            Sample(
                (rand(4, 6, 5), kv, ints(3, 0, 6, 6, 1, 2).view(3, 2), ints(0, 2, 2), counts, ints(5, 0, 2)),
                {"scale": 0.4, **options},
            )
            for options in ({}, {"window": 2}, {"soft_cap": 0.7})
        ],
        "qk_norm_rope_append": [
            Sample(
                (
                    kv10,
                    *(part.view(11, -1, 10) for part in rand(11, 70).split([30, 20, 20], 1)),
                    whole(31, 11),
                    table,
                    torch.tensor([20, -1, 0, 7, -1, 3, 19, 1, 2, 4, 9]),
                    *weights,
                ),
                {"eps": 0.1, **order},
            )
            for weights, order in [((), {}), ((rand(10), rand(10)), {}), ((rand(10), rand(10)), {"interleaved": True})]
        ],
        "feed": [Sample(random_step(seed)[0], {"page_size": random_step(seed)[1]}) for seed in range(3)],
        "sample": [
            Sample(
                (
                    torch.randn(11, 37, generator=g) * 2,
                    torch.tensor([0.0, 1.0, 0.3] * 4)[:11],
                    whole(5, 11),
                    torch.rand(11, generator=g),
                    torch.rand(11, generator=g) * 0.2,
                    torch.arange(11) * 12345678901,
                    whole(1000, 11),
                )
            )
        ],
        "count_tokens": [
            Sample((whole(9, 7, 5), whole(5, 6), whole(4, 6), ints(0, 0, 1, -1, 2, 2), ints(6, 0, 3), ends))
            for ends in (ints(2, -1, 0), ints(-1, -1, -1))
        ],
        "penalize": [
            Sample((rand(3, 17).float(), whole(9, 4, 17), rows, *torch.rand(3, 3, generator=g), banned))
            for rows, banned in [
                (ints(3, -1, 0), ints(16, 0, -1).view(3, 1)),
                (ints(-1, -1, -1), ints(-1, -1, -1).view(3, 1)),  # nothing is asked for
            ]
        ],
        "top_logprobs": [
            Sample((rand(5, vocab).float().round(), whole(3, 5) - 1, ints(-1, 1, -1, 0, -1), wanted))
            for vocab in (3, 53)
            for wanted in (ints(20, 0, 2, -1, 7), ints(-1, -1, -1, -1, -1))
        ],
        **{
            name: [
                Sample(
                    (kv, *[torch.tensor([6, 0, 2]), torch.tensor([0, 5, 6])][: len(OPS[name].parameters()) - 2]),
                    {"axis": 0},
                )
            ]
            for name in MOVERS
        },
        "advance": [
            Sample((whole(50, 7), whole(50, 7), ints(6, -1, 2), ints(9, 0, 4), ints(70, 71), ints(1, 0, -1), *taken))
            for taken in ((), (ints(1, 0, 2),))
        ],
    }[name]


def cases(name: str, dtype: torch.dtype) -> list[Sample]:
    return OPS[name].samples(generator(), dtype) + odd_samples(name, dtype)


def results(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def over_tensors(sample: Sample, change: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
    return replace(sample, args=tuple(change(arg) if isinstance(arg, torch.Tensor) else arg for arg in sample.args))


def named_rows(op: Op, sample: Sample) -> tuple[dict[str, Any], int]:
    named = op.bind(sample.args, sample.kwargs)
    return named, named[ROWS[op.name][0]].shape[0]


def test_every_op_is_tested_here() -> None:
    assert set(OPS) == {*ROWS, *WHOLE, *COLLECTIVES}


every_op = pytest.mark.parametrize("name", sorted(OPS.keys() - COLLECTIVES))
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@every_op
@every_dtype
def test_samples_are_reproducible(name: str, dtype: torch.dtype) -> None:
    first, second = OPS[name].samples(generator(3), dtype), OPS[name].samples(generator(3), dtype)
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert one.kwargs == other.kwargs
        for left, right in zip(one.args, other.args, strict=True):
            assert torch.equal(left, right)


@every_op
@every_dtype
def test_op_through_torch_is_the_reference(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    packet = getattr(torch.ops.ingot, name)
    assert op.overload is packet.default and op_of(op.overload) is op
    for sample in cases(name, dtype):
        expected = results(op.reference(*sample.args, **sample.kwargs))
        for call in (packet, op.overload, op):
            for found, wanted in zip(results(call(*sample.args, **sample.kwargs)), expected, strict=True):
                assert torch.equal(found, wanted)


@every_op
@every_dtype
def test_fake_has_the_shape_dtype_and_strides_of_the_reference(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    for sample in cases(name, dtype):
        expected = results(op.reference(*sample.args, **sample.kwargs))
        metas = over_tensors(sample, to_meta)
        with FakeTensorMode() as mode:
            fakes = over_tensors(sample, mode.from_tensor)
            fake = results(op.overload(*fakes.args, **fakes.kwargs))
        for found in (
            results(op.fake(*metas.args, **metas.kwargs)),
            results(op.overload(*metas.args, **metas.kwargs)),
            fake,
        ):
            described = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in found]
            assert described == [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in expected]


@every_op
@every_dtype
def test_op_is_pure(name: str, dtype: torch.dtype) -> None:
    """No argument changes, and no result shares memory with an argument, unless it may be that argument."""
    op = OPS[name]
    for sample in cases(name, dtype):
        before = over_tensors(sample, torch.clone)
        for function in (op.reference, op.rowwise):
            given = {key: arg for key, arg in op.bind(sample.args, sample.kwargs).items() if key != op.may_return}
            memory = {arg.untyped_storage().data_ptr() for arg in given.values() if isinstance(arg, torch.Tensor)}
            for result in results(function(*sample.args, **sample.kwargs)):
                assert result.untyped_storage().data_ptr() not in memory
            for left, right in zip(sample.args, before.args, strict=True):
                assert left is right or torch.equal(left, right)


@every_op
@every_dtype
def test_rowwise_is_the_reference(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in cases(name, dtype):
        pairs = zip(
            results(op.rowwise(*sample.args, **sample.kwargs)),
            results(op.reference(*sample.args, **sample.kwargs)),
            strict=True,
        )
        for found, expected in pairs:
            assert found.stride() == expected.stride()
            check(found, expected, expected.dtype)


@pytest.mark.parametrize("name", sorted(ROWS))
@every_dtype
def test_rowwise_gives_a_row_the_same_bits_alone(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in cases(name, dtype):
        named, count = named_rows(op, sample)
        whole = results(op.rowwise(**named))
        order = torch.randperm(count, generator=generator(12))
        shuffled = {key: value[order] if key in ROWS[name] else value for key, value in named.items()}
        for found, expected in zip(results(op.rowwise(**shuffled)), whole, strict=True):
            assert torch.equal(found, expected[order])
        for row in range(count):
            alone = {key: value[row : row + 1].clone() if key in ROWS[name] else value for key, value in named.items()}
            for found, expected in zip(results(op.rowwise(**alone)), whole, strict=True):
                assert torch.equal(found, expected[row : row + 1])


def test_rowwise_does_not_see_where_a_row_lies() -> None:
    """Sizes at which a math library takes other kernels for rows at odd addresses."""
    g = generator(4)
    for inputs, outputs in ((75, 210), (141, 93)):
        x, weight = randn(g, F32, 8, inputs), randn(g, F32, outputs, inputs)
        alone = [OPS["linear"].rowwise(x[row : row + 1].clone(), weight) for row in range(8)]
        assert torch.equal(OPS["linear"].rowwise(x, weight), torch.cat(alone))
    q, kv = randn(g, F32, 9, 3, 5), randn(g, F32, 4, 2, 8, 3, 5)
    places = (ints(0, 1, 2, 3).view(1, 4), ints(0), ints(9), ints(30))
    whole = OPS["paged_attention"].rowwise(q, kv, *places, scale=0.3)
    for row in range(9):
        seen = ints(22 + row)
        one = OPS["paged_attention"].rowwise(q[row : row + 1].clone(), kv, places[0], ints(0), ints(1), seen, scale=0.3)
        assert torch.equal(one, whole[row : row + 1])


@every_dtype
def test_rowwise_attention_does_not_see_the_rest_of_the_step(dtype: torch.dtype) -> None:
    op = OPS["attention"]
    for sample in cases("attention", dtype):
        q, k, v, positions, seqs, *sinks = sample.args
        whole = op.rowwise(*sample.args, **sample.kwargs)
        for row in range(q.shape[0]):
            seen = ((seqs == seqs[row]) & (positions <= positions[row])).nonzero().flatten()
            alone = op.rowwise(q[seen], k[seen], v[seen], positions[seen], seqs[seen], *sinks, **sample.kwargs)
            assert torch.equal(alone[seen == row], whole[row : row + 1])


@every_dtype
def test_rowwise_paged_attention_does_not_see_the_rest_of_the_step(dtype: torch.dtype) -> None:
    op = OPS["paged_attention"]
    for sample in cases("paged_attention", dtype):
        q, kv, table, starts, lens, kv_lens, *sinks = sample.args
        whole = op.rowwise(*sample.args, **sample.kwargs)
        for b in range(table.shape[0]):
            for i in range(int(lens[b])):
                row = slice(int(starts[b]) + i, int(starts[b]) + i + 1)
                seen = kv_lens[b : b + 1] - lens[b] + i + 1
                alone = op.rowwise(q[row], kv, table[b : b + 1], ints(0), ints(1), seen, *sinks, **sample.kwargs)
                assert torch.equal(alone, whole[row])


@pytest.mark.parametrize("seed", range(10))
def test_feed_gives_a_sequence_the_same_alone(seed: int) -> None:
    args, page_size = random_step(seed)
    tokens, seqs, _, lens, rows, begins, table, last, position = args
    whole = OPS["feed"].rowwise(*args, page_size=page_size)
    for b in range(len(lens)):
        mine, one = seqs == b, slice(b, b + 1)
        if not bool(mine.any()):
            continue
        found = OPS["feed"].rowwise(
            tokens[mine], seqs[mine] * 0, ints(0), lens[one], rows[one], begins[one], table[one], last, position,
            page_size=page_size,
        )  # fmt: skip
        expected = (*(tensor[mine] for tensor in whole[:3]), whole[3][one])
        assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


@every_dtype
def test_state_writes_do_not_depend_on_their_order(dtype: torch.dtype) -> None:
    for sample in cases("kv_append", dtype):
        kv, k, v, slots = sample.args
        one_by_one = kv
        for row in reversed(range(slots.shape[0])):
            one = slice(row, row + 1)
            one_by_one = OPS["kv_append"].rowwise(one_by_one, k[one], v[one], slots[one])
        assert torch.equal(one_by_one, OPS["kv_append"].rowwise(*sample.args))
    for sample in cases("advance", dtype):
        states, (rows, kv_lens, sampled, index, *taken) = sample.args[:2], sample.args[2:]
        for b in reversed(range(rows.shape[0])):
            one = slice(b, b + 1)
            back = [rejected[one] for rejected in taken]
            states = OPS["advance"].rowwise(*states, rows[one], kv_lens[one], sampled, index[one], *back)
        expected = OPS["advance"].rowwise(*sample.args)
        assert all(torch.equal(left, right) for left, right in zip(states, expected, strict=True))


STATEFUL = sorted(name for name, op in OPS.items() if op.states)
FUSED = sorted(name for name, op in OPS.items() if op.decompose)


@pytest.mark.parametrize("axis", [0, 2])
def test_state_movers_against_lists(axis: int) -> None:
    """A page or slot at a time, all read before any is written: a rotation of three, and one that is copied away."""
    state = torch.randn(7, 3, 7, generator=generator())
    sources, targets = [1, 4, 2, 6], [4, 2, 1, 0]
    for name, cleared in (("state_copy", []), ("state_move", [6])):
        parts = list(state.unbind(axis))
        for source, target in zip(sources, targets, strict=True):
            parts[target] = state.select(axis, source)
        for place in cleared:
            parts[place] = torch.zeros_like(parts[place])
        found = OPS[name].reference(state, torch.tensor(sources), torch.tensor(targets), axis=axis)
        assert torch.equal(found, torch.stack(parts, axis)), name
    zeroed = [part * (place not in (0, 5)) for place, part in enumerate(state.unbind(axis))]
    assert torch.equal(OPS["state_zero"].reference(state, torch.tensor([5, 0]), axis=axis), torch.stack(zeroed, axis))


def test_ops_that_write_states_say_how_in_place() -> None:
    assert sorted({"advance", "count_tokens", "kv_append", "qk_norm_rope_append", *MOVERS}) == STATEFUL
    assert FUSED == ["add_rms_norm", "qk_norm_rope_append"]
    assert all((OPS[name].in_place is not None) == bool(OPS[name].states) for name in OPS)


@pytest.mark.parametrize("name", STATEFUL)
@every_dtype
def test_in_place_is_the_pure_form(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    assert op.in_place is not None
    for sample in cases(name, dtype):
        pure = results(op.reference(*sample.args, **sample.kwargs))
        given = over_tensors(sample, torch.clone)
        left_over = op.in_place(*given.args, **given.kwargs)
        named = op.bind(given.args, given.kwargs)
        written = [named[state] for state in op.states]
        others = () if left_over is None else results(left_over)
        for found, expected in zip((*others, *written), pure, strict=True):
            assert torch.equal(found, expected)
        for key, before in op.bind(sample.args, sample.kwargs).items():
            assert key in op.states or not isinstance(before, torch.Tensor) or torch.equal(named[key], before)


@pytest.mark.parametrize("name", FUSED)
@every_dtype
def test_decomposition_is_the_reference(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    assert op.decompose is not None
    for sample in cases(name, dtype):
        found, expected = op.decompose(*sample.args, **sample.kwargs), op.reference(*sample.args, **sample.kwargs)
        for left, right in zip(results(found), results(expected), strict=True):
            assert torch.equal(left, right)


@every_op
def test_cost_needs_no_data(name: str) -> None:
    op = OPS[name]
    for sample in cases(name, BF16):
        metas = over_tensors(sample, lambda tensor: tensor.to("meta"))
        cost = op.cost(*sample.args, **sample.kwargs)
        assert op.cost(*metas.args, **metas.kwargs) == cost
        assert cost.flops >= 0 and cost.bytes > 0


def test_defining_a_name_twice_is_an_error() -> None:
    with pytest.raises(InternalError, match="op 'linear' is defined twice"):
        define("linear(Tensor x) -> Tensor", samples=lambda g, dtype: [])(lambda x: x)


def test_op_of_knows_its_own_only() -> None:
    assert op_of(torch.ops.aten.add.Tensor) is None
    assert op_of("ingot.linear") is None
    assert op_of(torch.ops.ingot.linear) is None  # a packet is not a target


# --- the table of tolerances -----------------------------------------------------------------------------------------


@every_dtype
def test_one_ulp_passes_and_a_wrong_digit_does_not(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -1.5, 1e-3, 300.0, 0.0], dtype=dtype)
    above = torch.nextafter(values, torch.tensor(math.inf, dtype=dtype))
    assert compare(above, values, dtype) is None
    assert compare(values, values.double(), dtype) is None
    assert "[3]" in str(compare(values * torch.tensor([1, 1, 1, 1.05, 1]).to(dtype), values, dtype))


def test_compare_says_what_is_wrong_and_where() -> None:
    expected = torch.ones(2, 3)
    found = expected.clone()
    found[1, 2], found[0, 1] = 1.5, 1.2
    problem = compare(found, expected, F32)
    assert problem == "max error 0.5 at [1, 2]: found 1.5, expected 1.0 ± 0.00011; 2 of 6 wrong"
    assert compare(found, expected, F32, factor=1e4) is None
    assert compare(found[0], expected, F32) == "shape [3], expected [2, 3]"
    assert compare(ints(1, 2), ints(1, 3), torch.int32) == "found 2, expected 3 at [1]; 1 of 2 wrong"
    assert compare(ints(1, 2), ints(1, 2), torch.int32) is None
    assert compare(torch.empty(0), torch.empty(0), F32) is None
    assert compare(torch.tensor(2.0), torch.tensor(2.0), F32) is None


def test_compare_never_passes_nan_and_no_lone_infinity() -> None:
    nan, inf, one = (torch.tensor([1.0, value]) for value in (math.nan, math.inf, 1.0))
    for found, expected in [(nan, nan), (nan, one), (one, nan), (inf, one), (one, inf), (-inf, inf), (inf, nan)]:
        assert compare(found, expected, F32, factor=1e9) is not None
    assert compare(inf, inf, F32) is None
    assert compare(-inf, -inf, BF16) is None
    assert compare(nan, nan, torch.int32) is not None
