"""Calls of every op that the triton backend claims: samples of the definitions, odd sizes, and the edges of shapes."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from drawn_edits import drawn_edits
from eight_bit_samples import NARROW, OVER_CACHES, eight_bit_samples, form_in, in_eight_bits, with_token_scales
from odd_samples import odd_samples
from one_call import OneCall, moved
from op_values import ints, random_step
from paged_steps import Heads, paged_step

from ingot.ir.formats import PARTS, find_format, quantize
from ingot.ir.ops import OPS
from ingot.ir.ops.activations import ACTIVATIONS
from ingot.ir.ops.rounded_linear import why_not_separate
from ingot.ir.tables import make_table

# Ops whose arguments have the same dtypes in every model.
OF_ONE_DTYPE = frozenset(
    {"feed", "page_slots", "advance", "count_tokens", "sample", "top_logprobs", "route", "sparse_mixer"}
)
# Sizes of a hidden state: a power of two, models' own (Qwen2.5's 896, SmolLM2's 576), odd, and wider than a tile.
_WIDTHS = (64, 576, 896, 1031, 4096)
# Tokens of a step at both ends of the bucket classes.
_TOKENS = (1, 13, 17, 64, 131)
# (tokens fed, positions cached before) of each sequence: a page begun, one filled to its end, chunks, idle sequences.
_MIXES = (
    [(1, 300)],
    [(1, 0), (1, 15), (1, 16), (1, 31), (0, 7), (1, 200)],
    [(3, 40), (1, 130), (5, 0)],
    [(37, 0), (1, 190), (40, 23)],
)
_HEADS = (Heads(14, 2, 64), Heads(3, 1, 80), Heads(6, 2, 96), Heads(8, 8, 128), Heads(2, 1, 256))

Draw = Callable[..., torch.Tensor]
Calls = list[OneCall]


def cases(op: str, dtype: torch.dtype) -> Calls:
    """The calls of an op, the same each time."""
    g = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    samples = OPS[op].samples(g, dtype) + odd_samples(op, dtype) if op in OPS else []
    calls = [OneCall(op, sample.args, sample.kwargs) for sample in samples]
    edges = _EDGES.get(op, lambda *_: [])(op, draw, g)
    if op not in OVER_CACHES:
        return calls + edges
    narrow = [OneCall(op, sample.args, sample.kwargs) for sample in eight_bit_samples(op, dtype)]
    return [*calls, *edges, *narrow, *(_narrowed(call, number) for number, call in enumerate(edges))]


def _narrowed(call: OneCall, number: int) -> OneCall:
    """The call over a cache of eight bits, in f8e4m3 and i8 in turn: without scales, with them, and per token. Some
    keys and values are beyond the range of the first two."""
    given = OPS[call.op].bind(call.args, dict(call.kwargs))
    shared = given.get("value_width") is not None or ("k" in given and given["v"] is None)
    static = {"k_scale": 0.3, "v_scale": 0.3 if shared else 1.7}
    form, narrow = form_in(given), NARROW[number // 3 % 2]
    scales: dict[str, Any] = ({}, static, {"per_token": True})[number % 3]
    if "per_token" in scales and not (form.equal or form.shared) and form.numbers % 4:
        scales = static

    def change(name: str, value: Any) -> Any:
        if name == "kv":
            return with_token_scales(value, form, narrow) if "per_token" in scales else in_eight_bits(value, narrow)
        if name in ("k", "v") and value is not None:
            value = moved(value, "cpu")
            value[:1] *= 2000 * scales.get(f"{name}_scale", 1.0)
        return value

    args, kwargs = OPS[call.op].changed(call.args, dict(call.kwargs), change)
    return OneCall(call.op, args, {**kwargs, **scales})


def _ids(g: torch.Generator, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=g, dtype=torch.int32)


def _rows(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """Ops on rows, some of them parts of a wider product."""
    calls: Calls = []
    for tokens, width, kind in zip(_TOKENS, _WIDTHS, itertools.cycle(ACTIVATIONS), strict=False):
        merged = draw(tokens, 2 * width)
        left, right, alone = merged[:, :width], merged[:, width:], draw(tokens, width)
        given: Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
            "rms_norm": ((alone, draw(width)), {"eps": 1e-6}),
            "layer_norm": ((alone, draw(width)), {"eps": 1e-5}),
            "add_rms_norm": ((alone, draw(tokens, width), draw(width)), {"eps": 1e-6}),
            "silu_mul": ((left, right), {}),
            "gelu_mul": ((left, right), {"approximate": "tanh"}),
            "activate": ((right,), {"kind": kind}),
            "soft_cap": ((alone,), {"cap": 30.0}),
            "clamp": ((right,), {"limit": 0.7}),
            "cast": ((alone,), {"dtype": torch.float32}),
            "scale_by_position": ((right, _ids(g, 1 << 17, tokens)), {"period": 8192, "strength": 0.1, "shift": 1}),
            "aten.add.Tensor": ((alone, draw(tokens, width)), {}),
            "aten.mul.Tensor": ((alone, 0.25), {}),
            "embedding": ((_ids(g, 57, tokens), draw(57, width)), {}),
            "select_rows": ((alone, _ids(g, tokens, min(3, tokens))), {}),
        }
        calls.append(OneCall(op, *given[op]))
    return calls


def _streams(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """Streams of hidden sizes, and rows of feed-forward parts up to Gemma 3n's."""
    calls: Calls = []
    for tokens, width in zip(_TOKENS, (*_WIDTHS[1:], 16_384), strict=True):
        x, merged = draw(tokens, 4, width), draw(tokens, 2 * width)
        given: Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
            "mix": ((x, draw(tokens, 4, 4)), {}),
            "concat": ((x[:, :1], x[:, 2:]), {"dim": 1}),
            "match_rms": ((x[:, 1:], x[:, :1] * 3), {"least": 1e-5}),
            "gaussian_top_k": ((merged[:, :width],), {"deviations": 1.64}),
        }
        calls.append(OneCall(op, *given[op]))
    return calls


def _linear(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """Products of one token and of each tile of tokens; results of size one."""
    shapes = ((1, 896, 896), (1, 131, 4864), (9, 257, 576), (16, 130, 2200), (32, 1152, 896), (64, 37, 101))
    return [OneCall(op, (draw(tokens, k), draw(n, k) * k**-0.5, draw(n) if n % 2 else None)) for tokens, n, k in shapes]


# Tokens, heads, columns and depth of calls of head_linear. The last four have sizes of DeepSeek-V2-Lite.
_HEAD_LINEAR = (
    *((1, 3, 37, 24), (5, 6, 26, 10), (17, 4, 130, 96), (64, 3, 12, 1031), (131, 5, 70, 101)),
    *((1, 16, 512, 128), (32, 16, 512, 128), (9, 16, 128, 512), (150, 16, 512, 128)),
)


def _head_linear(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """Heads that are parts of a product, and matrices as they are stored or turned."""
    calls: Calls = []
    for number, (tokens, heads, n, k) in enumerate(_HEAD_LINEAR):
        x = draw(tokens, heads, k + 8 * (number % 2))[..., :k]
        weight = draw(heads, k, n).transpose(1, 2) if n > k else draw(heads, n, k)
        calls.append(OneCall(op, (x, weight * k**-0.5)))
    return calls


# Formats that kernels read, with columns and depths of a weight.
_STORED = (
    *(("int8", 37, 101), ("int8_tensor", 130, 2200), ("int8_g128", 257, 1280), ("int8_w8a8", 131, 896)),
    *(("fp8", 896, 896), ("fp8_per_channel_per_token", 130, 2200), ("fp8_block128", 200, 1152)),
    *(("f8e4m3/1x*:f32", 257, 576), ("f8e4m3/128x128:f32", 200, 1031), ("int4_g64", 37, 576)),
    *(("int4_g128", 1152, 4864), ("int4_g128_asym", 257, 896), ("u4/1x128:f16:zeros/low_first", 130, 1152)),
)


def _quant_linear(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """Products with weights in each format that kernels read, for steps of all sizes."""
    calls: Calls = []
    for (name, n, k), tokens in zip(_STORED, itertools.cycle(_TOKENS), strict=False):
        parts = quantize(torch.randn(n, k, generator=g) * k**-0.5, find_format(name))
        weight, scales, zeros, *others = (parts.get(part) for part in PARTS)
        bias = draw(n) if n % 2 else None
        calls.append(OneCall(op, (draw(tokens, k), weight, scales, zeros, bias, *others), {"format": name}))
    return calls


def _dequantize(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """Matrices of weights in each format that kernels read, whose linears do not round x."""
    calls: Calls = []
    for name, n, k in _STORED:
        if find_format(name).activations is None:
            parts = quantize(torch.randn(n, k, generator=g) * k**-0.5, find_format(name))
            given = tuple(parts.get(part) for part in OPS[op].parameters.names[: OPS[op].parameters.positional])
            calls.append(OneCall(op, given, {"format": name, "dtype": draw(1).dtype}))
    return calls


def _round_rows(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """Rows, rounded for each format that kernels read and that rounds activations."""
    calls: Calls = []
    rounded = [(name, k) for name, _, k in _STORED if not why_not_separate(find_format(name))]
    for (name, k), tokens in zip(rounded, itertools.cycle(_TOKENS), strict=False):
        rule = find_format(name).activations
        assert rule is not None
        calls.append(OneCall(op, (draw(tokens, k // (rule.columns or 1) * (rule.columns or 1)),), {"format": name}))
    return calls


# Rows, experts, choices of a row, sizes of a row and of an expert: choices one by one, in blocks of each size, and more
# experts than rows choose.
_EXPERTS = (
    *((1, 16, 8, 2048, 768), (3, 64, 2, 320, 200), (13, 8, 2, 896, 131), (17, 4, 3, 131, 576), (64, 16, 4, 320, 256)),
    *((131, 8, 2, 576, 320), (131, 4, 2, 320, 131), (300, 4, 2, 256, 200)),
)


def _experts(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """Rows that choose at random, of which some choose the same."""
    calls: Calls = []
    wide = torch.promote_types(draw(1).dtype, torch.float32)
    for number, (tokens, experts, top_k, hidden, ffn) in enumerate(_EXPERTS):
        ranks = torch.rand(tokens, experts, generator=g).argsort(-1).int()
        chosen = ranks[:, :top_k].clone(memory_format=torch.contiguous_format)
        chosen[tokens // 2 :] = chosen[:1]
        args = [draw(tokens, hidden), torch.rand(tokens, top_k, generator=g).to(wide), chosen]
        args += [draw(experts, 2 * ffn, hidden) * hidden**-0.5, draw(experts, hidden, ffn) * ffn**-0.5]
        options: dict[str, Any] = {"activation": ("silu", "gelu", "gelu_tanh", "clamped")[number % 4]}
        if number % 2:
            args += [draw(experts, 2 * ffn), draw(experts, hidden)]
        calls.append(OneCall(op, tuple(args), {**options, "weigh_input": number % 3 == 2}))
    return calls


def _routers(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """Routers of models' sizes. Scores of two experts are the same number or far apart: roundings change no choice."""
    calls: Calls = []
    grouped = {"groups": 8, "renormalize": True, "least_sum": 1e-20, "scale": 2.5}
    for tokens, experts, options in (
        (1, 128, {"top_k": 8, "renormalize": True}),
        (17, 256, {"top_k": 8, "kept_groups": 4, "scores": "sigmoid", **grouped}),
        (64, 160, {"top_k": 6, "kept_groups": 3, "group_best": 1, **grouped}),
        (131, 512, {"top_k": 16}),
    ):
        logits = (torch.randn(tokens, experts, generator=g) * 16).round() / 16
        calls.append(OneCall(op, (logits,), {"jitter": 0.1} if op == "sparse_mixer" else options))
    return calls


def _lora(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """Ranks below and above a tile's, parts of q, k and v that a tile does and does not divide, rows of one adapter."""
    calls: Calls = []
    for tokens, k, rank, segments in (
        (1, 896, 16, [1024, 256, 256]),
        (17, 4864, 8, [896]),
        (64, 2048, 64, [131, 77, 5]),
        (131, 1031, 16, [512, 128, 128]),
        (70, 320, 128, [256, 300]),
    ):
        slots = _ids(g, 4, tokens) - 1
        slots[tokens // 2 :] = 2
        ranks = rank * len(segments)
        wide = torch.promote_types(draw(1).dtype, torch.float32)
        given = {
            "lora_shrink": ((draw(tokens, k), slots, draw(3, ranks, k) * k**-0.5), {}),
            "lora_expand": (
                (draw(tokens, sum(segments)), draw(tokens, ranks).to(wide), slots, draw(3, sum(segments), rank)),
                {"segments": segments},
            ),
        }
        calls.append(OneCall(op, *given[op]))
    return calls


def _head_norm(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """rms_norm of heads that are parts of a product, beside that of rows."""
    product = draw(13, 8 * 96)
    heads = product[:, 96 : 5 * 96].view(13, 4, 96)
    return [*_rows(op, draw, g), OneCall(op, (heads, draw(96)), {"eps": 1e-6})]


def _rope(op: str, draw: Draw, g: torch.Generator) -> Calls:
    table = _table(64)
    return [
        OneCall(op, (draw(tokens, heads, 80), _ids(g, 512, tokens), table), {"interleaved": interleaved})
        for tokens, heads, interleaved in ((1, 3, False), (17, 14, True), (131, 1, False))
    ]


# Values narrower than keys and wider; latent caches, whose heads of q are cut into groups.
_OTHER_FORMS = [Heads(4, 2, 192, 128), Heads(3, 1, 40, 72), Heads(40, 1, 576, 512, shared=True)]


def _attention(op: str, draw: Draw, g: torch.Generator) -> Calls:
    dtype = draw(1).dtype
    places = [(mix, _HEADS[0], 16) for mix in _MIXES] + [(_MIXES[1], heads, 16) for heads in _HEADS[1:]]
    # One page holds everything; 13 is a page of a prime size.
    places += [([(1, 31), (2, 0)], _HEADS[0], 32), (_MIXES[2], _HEADS[2], 13)]
    if op in ("paged_attention", "partial_attention", "kv_append"):
        places += [(mix, heads, 16) for mix in _MIXES[:3] for heads in _OTHER_FORMS]
    calls: Calls = []
    for number, (mix, heads, page) in enumerate(places):
        step = paged_step(g, dtype, heads, mix, page=page, gap=number % 2, behind=number % 3)
        scale = {**heads.options}
        if number % 4 == 3:
            scale["mask"] = "window_21"
        gains = (draw(heads.dim), draw(heads.dim)) if number % 2 else (None, None)
        table, normed = _table(heads.dim if number % 2 else 32), {"eps": 1e-6}
        qkv, kv = (step.q, step.k, step.v), step.kv
        match op:
            case "append_attention":
                if len(step.q) <= 64:  # there is one for few tokens only
                    args = (kv, *qkv, step.positions, table, step.slots, *step.lens, *gains)
                    calls.append(OneCall(op, args, {**normed, **scale}))
            case "paged_attention" | "partial_attention":
                filled = OPS["kv_append"].reference(kv, step.k, step.v, step.slots)
                calls.append(OneCall(op, (step.q, filled, *step.lens), scale))
                if op == "partial_attention" and number % 3 == 0:
                    before = {**scale, "mask": "bidirectional", "cached": True}
                    calls.append(OneCall(op, (step.q, filled, *step.lens), before))
            case "qk_norm_rope_append":
                calls.append(OneCall(op, (kv, *qkv, step.positions, table, step.slots, *gains), normed))
            case "kv_append":
                calls.append(OneCall(op, (kv, step.k, step.v, step.slots)))
    return calls


def _table(rotary: int) -> torch.Tensor:
    return make_table({"kind": "rope", "rope_type": "default", "positions": 512, "theta": 1e4, "rotary_dim": rotary})


def _step_attention(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """Sequences within a tile, at its edge and over several; tokens of none in front, between and after."""
    calls: Calls = []
    for number, heads in enumerate(_HEADS):
        lens = ints(*((1, 16, 33), (3, 0, 1), (131,), (1, 1, 1, 1), (70, 64))[number])
        gaps = torch.arange(len(lens)) % 2
        gaps[0] = 2
        starts = (lens.cumsum(0) - lens + gaps.cumsum(0)).int()
        tokens = int(starts[-1] + lens[-1]) + number
        kv = draw(tokens, 2 * heads.kv * heads.dim)
        k, v = (part.view(tokens, heads.kv, heads.dim) for part in kv.chunk(2, 1))
        options: dict[str, Any] = {"scale": heads.dim**-0.5, "mask": ("bidirectional", "window_21")[number % 2]}
        calls.append(OneCall(op, (draw(tokens, heads.q, heads.dim), k, v, starts, lens), options))
    return calls


def _step_latent_attention(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """Heads of odd sizes and of DeepSeek's, that are parts of products; sequences without and with a part before."""
    calls: Calls = []
    for number, (heads, n, r, v) in enumerate(((3, 24, 8, 40), (2, 128, 64, 128), (1, 192, 64, 256))):
        lens = ints(*((1, 40, 0, 33), (70, 3), (131,))[number])
        starts = (lens.cumsum(0) - lens + 1).int()
        tokens = int(starts[-1] + lens[-1]) + number
        q, latents = draw(tokens, heads, n + r), draw(tokens, 1, 16 + r)
        k, values = draw(tokens, heads * n).view(tokens, heads, n), draw(tokens, heads * v).view(tokens, heads, v)
        before, lse = draw(tokens, heads, v), torch.randn(tokens, heads, generator=g) * 3
        before[tokens // 2 :], lse[tokens // 2 :] = 0, float("-inf")
        args = (q[..., :n], q[..., n:], k, latents[..., 16:], values, starts, lens, before, lse)
        calls.append(OneCall(op, args, {"scale": (n + r) ** -0.5}))
    return calls


# Decoding above and below what a token chooses, chunks, and a prompt (tokens fed, positions before); pages.
_CHOICES = (([(1, 700)], 16), ([(1, 40), (3, 211), (0, 7), (1, 0), (1, 330)], 13), ([(70, 250), (1, 190)], 16))


def _choices(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """Indexers of odd sizes and DeepSeek's, and attention over their choices by the heads of one device of several, of
    odd sizes, and all of DeepSeek's. Scores are whole numbers, exact in any order, and many are equal."""
    calls: Calls = []
    dtype = draw(1).dtype

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=g).to(dtype)

    indexers = (Heads(3, 1, 24, shared=True), Heads(17, 1, 80, shared=True), Heads(64, 1, 128, shared=True))
    latents = (
        Heads(16, 1, 576, 512, shared=True),
        Heads(5, 1, 40, 32, shared=True),
        Heads(128, 1, 576, 512, shared=True),
    )
    for number, (mix, page) in enumerate(_CHOICES):
        options = {"page": page, "gap": number % 2, "behind": number}
        step = paged_step(g, dtype, indexers[number], mix, **options)
        keys = OPS["kv_append"].reference(step.kv, step.k, None, step.slots)
        keys = torch.where(keys.isnan(), keys, whole(*keys.shape))
        weights = torch.randint(-2, 3, step.q.shape[:2], generator=g).float()
        choice = OneCall(op, (whole(*step.q.shape), keys, weights, *step.lens), {"top_k": (37, 150, 128)[number]})
        if op == "sparse_attention":
            (chosen,) = replace(choice, op="paged_choose_positions").reference()
            over = paged_step(g, dtype, latents[number], mix, **options)
            kv = OPS["kv_append"].reference(over.kv, over.k, None, over.slots)
            choice = OneCall(op, (over.q, kv, chosen, *over.lens[:3]), latents[number].options)
            assert torch.equal(over.kv_lens, step.kv_lens)
        calls.append(choice)
    return calls


def _pool(op: str, draw: Draw, g: torch.Generator) -> Calls:
    """More tokens than a program takes at a time, rows wider than one, a vector of zeros that gets length 1."""
    calls: Calls = []
    for pooling, width in zip(("last", "mean", "cls"), _WIDTHS[2:], strict=True):
        x = draw(77, width)
        x[70:] = 0
        lens, starts = ints(3, 60, 0, 7), ints(0, 3, 65, 70)
        calls.append(OneCall(op, (x, starts, lens, ints(0, 65, 0, 0), ints(1, 1, 1, 1)), {"pooling": pooling}))
    return calls


def _feed(op: str, draw: Draw, g: torch.Generator) -> Calls:
    # A captured step of 8 that three sequences use: all else is padding.
    padded = (
        ints(-1, 9, -1, -1, -1, -1, -1, -1), ints(0, 1, 2, -1, -1, -1, -1, -1), ints(*range(8)),
        ints(1, 1, 1, 0, 0, 0, 0, 0), ints(4, 0, 2, -1, -1, -1, -1, -1), ints(-1, 7, -1, -1, -1, -1, -1, -1),
        torch.arange(40, dtype=torch.int32).view(8, 5), ints(11, 12, 13, 14, 15), ints(0, 1, 2, 3, 16),
    )  # fmt: skip
    drawn = [(step, {"page_size": size}) for step, size in map(random_step, range(3, 7))]
    return [OneCall(op, args, kwargs) for args, kwargs in [(padded, {"page_size": 4}), *drawn]]


def _page_slots(op: str, draw: Draw, g: torch.Generator) -> Calls:
    # More tokens than a program takes, slots beyond 32 bits, padding in between.
    count = 300
    seqs = torch.arange(count, dtype=torch.int32)
    seqs[::7] = -1
    table = torch.randint(0, 2**31 - 1, (count, 4), generator=g, dtype=torch.int32)
    return [OneCall(op, (_ids(g, 64, count), seqs, table), {"page_size": 16})]


def _advance(op: str, draw: Draw, g: torch.Generator) -> Calls:
    sequences, slots = 130, 150
    rows = torch.randperm(slots, generator=g)[:sequences].int()
    rows[::5] = -1
    index = _ids(g, 9, sequences) - 1
    args = (_ids(g, 99, slots), _ids(g, 30, slots), rows, _ids(g, 50, sequences) + 1, _ids(g, 99, 8), index)
    return [OneCall(op, args)]


def _logits(op: str, draw: Draw, g: torch.Generator) -> Calls:
    calls: Calls = []
    for rows, vocab in ((1, 151_936), (64, 4099), (3, 1)):
        logits = torch.randn(rows, vocab, generator=g) * 3
        if op == "sample":
            knobs = (_ids(g, 50, rows), torch.rand(rows, generator=g), torch.rand(rows, generator=g) / 10)
            knobs = (*knobs, torch.tensor([1.0, 0.5, 0.9] * rows)[:rows])
            temperature = torch.tensor([0.0, 1.0, 0.6] * rows)[:rows]
            counts = _ids(g, 7, 5, vocab) * (torch.rand(5, vocab, generator=g) < 0.3)
            columns = [torch.rand(rows, generator=g) + 0.5 for _ in range(3)]
            banned = _ids(g, vocab + 1, rows, 16) - 1
            banned[::2] = -1
            edits, last_token = drawn_edits(g, vocab, [0, 5])
            edited = (edits, _ids(g, 3, rows) - 1, last_token)
            penalties = (counts.int(), _ids(g, 6, rows) - 1, *columns, banned, *edited)
            keys = (torch.arange(rows) + 2**40, _ids(g, 9999, rows))
            calls.append(OneCall(op, (logits, temperature, *knobs, *keys, *penalties)))
        else:
            asked = _ids(g, 22, rows) - 1
            calls.append(OneCall(op, (logits, _ids(g, vocab, rows), _ids(g, vocab, rows), asked)))
    return calls


_EDGES: Mapping[str, Callable[[str, Draw, torch.Generator], Calls]] = {
    **dict.fromkeys(
        ("layer_norm", "add_rms_norm", "silu_mul", "gelu_mul", "activate", "soft_cap", "clamp", "cast"), _rows
    ),
    **dict.fromkeys(("aten.add.Tensor", "aten.mul.Tensor", "embedding", "select_rows", "scale_by_position"), _rows),
    **dict.fromkeys(("mix", "concat", "match_rms", "gaussian_top_k"), _streams),
    "rms_norm": _head_norm,
    "linear": _linear,
    "head_linear": _head_linear,
    "quant_linear": _quant_linear,
    "dequantize": _dequantize,
    "round_rows": _round_rows,
    **dict.fromkeys(("lora_shrink", "lora_expand"), _lora),
    "experts": _experts,
    **dict.fromkeys(("route", "sparse_mixer"), _routers),
    "rope": _rope,
    **dict.fromkeys(("append_attention", "paged_attention", "qk_norm_rope_append", "kv_append"), _attention),
    "step_attention": _step_attention,
    "step_latent_attention": _step_latent_attention,
    **dict.fromkeys(("paged_choose_positions", "sparse_attention"), _choices),
    "pool": _pool,
    "feed": _feed,
    "page_slots": _page_slots,
    "advance": _advance,
    **dict.fromkeys(("sample", "top_logprobs"), _logits),
}
