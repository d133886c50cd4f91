"""Samples of odd sizes for every op, in addition to those of its definition."""

from copy import deepcopy
from functools import cache

import torch
from drawn_edits import drawn_edits
from op_values import F16, F32, generator, ints, no_penalties, randn, random_step, rope_attrs

from ingot.ir.formats import FORMATS, quantize
from ingot.ir.ops import OPS, Sample
from ingot.ir.ops.activations import ACTIVATIONS
from ingot.ir.tables import make_table

# Ops that move the rows of a state.
MOVERS = ("state_copy", "state_move", "state_zero")


def odd_samples(name: str, dtype: torch.dtype) -> list[Sample]:
    """Return new arguments of odd sizes, with strides where a merged weight causes them. Raises LookupError for an op
    without an entry."""
    samples = _all_samples(dtype)
    if name not in samples:
        raise LookupError(f"{__file__} has no calls of odd sizes for the op '{name}': add an entry")
    return deepcopy(samples[name])


@cache  # one random generator makes the samples of all ops, 10 ms
def _all_samples(dtype: torch.dtype) -> dict[str, list[Sample]]:
    g = generator(99)

    def rand(*shape: int) -> torch.Tensor:
        return randn(g, dtype, *shape)

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=g, dtype=torch.int32)

    merged = rand(11, 3 * 37)
    heads = rand(11, 5 * 18).view(11, 5, 18)
    table = make_table(rope_attrs({"rope_type": "linear", "factor": 2.0}, 10, 1e6, 31))
    counts = ints(2, 0, 1)
    int8, int4 = (quantize(rand(53, inner), FORMATS[format]) for inner, format in ((37, "int8"), (32, "int4_g32_asym")))
    fp8, rule = quantize(rand(53, 37), FORMATS["fp8"]), FORMATS["fp8"].activations
    assert rule is not None
    eight_bits = rule.elements(rand(11, 37).float(), None)
    factors = torch.randn(11, 5, generator=generator(98)).to(torch.promote_types(dtype, F32))[:, 1:4]
    kv, kv10 = rand(7, 2, 3, 2, 5), rand(7, 2, 3, 2, 10)
    logits = torch.randn(11, 7, generator=g).to(torch.promote_types(dtype, F32))
    return {
        "embedding": [Sample((whole(17, 11), rand(17, 37)))],
        "linear": [Sample((rand(11, 37), rand(53, 37), rand(53))), Sample((merged[:, 37:74], rand(1, 37)))],
        "head_linear": [
            Sample((heads[:, 1:4, :7], rand(3, 5, 7))),
            Sample((rand(1, 2, 9), rand(2, 9, 1).transpose(1, 2))),
        ],
        "quant_linear": [
            Sample((rand(11, 37), int8["weight"], int8["scales"], None, rand(53)), {"format": "int8"}),
            Sample((merged[:, 37:69], *int4.values()), {"format": "int4_g32_asym"}),
        ],
        "dequantize": [
            Sample((int8["weight"], int8["scales"]), {"format": "int8", "dtype": dtype}),
            Sample((*int4.values(),), {"format": "int4_g32_asym", "dtype": dtype}),
        ],
        "round_rows": [Sample((merged[:, 37:74],), {"format": "fp8"})],
        "rounded_linear": [
            Sample((*eight_bits, fp8["weight"], fp8["scales"], rand(53)), {"format": "fp8", "dtype": dtype}),
        ],
        "rms_norm": [
            Sample((merged[:, :37], rand(37)), {"eps": 1e-6}),
            Sample((heads[:, 1:4], rand(18)), {"eps": 0.1}),
            Sample((heads[:, 1:4], rand(18).to(torch.promote_types(dtype, F32))), {"eps": 0.1}),
        ],
        "layer_norm": [
            Sample((merged[:, :37], rand(37)), {"eps": 1e-6}),
            Sample((heads[:, 1:4], rand(3, 18).to(torch.promote_types(dtype, F32))), {"eps": 0.1}),
            Sample((merged[:, :37], rand(37), rand(37)), {"eps": 1e-6}),
            Sample((heads[:, 1:4], *(rand(3, 18).to(torch.promote_types(dtype, F32)) for _ in range(2))), {"eps": 0.1}),
        ],
        "add_rms_norm": [Sample((rand(11, 37), merged[:, 37:74], rand(37)), {"eps": 1e-5})],
        "rope": [
            Sample((heads[:, 1:4], whole(31, 11), table)),
            Sample((heads[:, 1:4], whole(31, 11), table), {"interleaved": True}),
        ],
        "scale_by_position": [
            Sample((heads[:, 1:4], whole(31, 11)), {"period": 7, "strength": 1.3, "shift": 2}),
            Sample((merged[:, 37:74], whole(31, 11)), {"period": 1, "strength": -0.2}),
        ],
        "gelu_mul": [Sample((merged[:, :37], merged[:, 74:]), {"approximate": how}) for how in ("none", "tanh")],
        "activate": [Sample((merged[:, 37:74],), {"kind": kind}) for kind in ACTIVATIONS],
        "soft_cap": [Sample((merged[:, 3:8],), {"cap": 0.5}), Sample((rand(2, 3, 5),), {"cap": 50.0})],
        "clamp": [
            Sample((merged[:, 3:8],), {"limit": 0.5}),
            Sample((heads[:, 1:4],), {"limit": 1.3}),
            Sample((rand(2, 3, 5),), {"limit": 50.0}),
        ],
        "silu_mul": [Sample((merged[:, :37], merged[:, 74:])), Sample((rand(1, 1), rand(1, 1)))],
        "select_rows": [Sample((rand(11, 3, 5), whole(11, 7)))],
        "mix": [
            Sample((heads[:, 1:4], merged[:, 37:52].view(11, 5, 3))),
            Sample((rand(11, 1, 37), rand(11, 1, 1))),
        ],
        "concat": [
            Sample((heads[:, :1], heads[:, 2:]), {"dim": 1}),
            Sample((heads[:, :2, :5], rand(11, 2, 3)), {"dim": 2}),
            Sample((merged[:, 37:38], merged[:, :37]), {"dim": 1}),
        ],
        "match_rms": [
            Sample((heads[:, 1:4], heads[:, :1]), {"least": 1e-5}),
            Sample((merged[:, :37] * 1e-3, merged[:, 74:]), {"least": 0.1}),
        ],
        "gaussian_top_k": [
            Sample((merged[:, :37],), {"deviations": 0.25}),
            Sample((rand(3, 1) + 4,), {"deviations": 1.6}),
        ],
        "route": [Sample((logits,), {"top_k": 7}), Sample((logits[:1], logits[1]), {"top_k": 5, "scores": "sigmoid"})],
        "sparse_mixer": [Sample((logits,), {"jitter": 0.1})],
        "experts": [
            Sample(
                (
                    merged[:, 37:74],
                    logits.softmax(-1),
                    logits.argsort(-1).int(),
                    rand(count, 6, 37),
                    rand(count, 37, 3),
                ),
                {"identities": 7 - count} if count < 7 else {},
            )
            for count in (7, 4)
        ],
        "lora_shrink": [Sample((merged[:, 37:74], ints(1, 0, 1, -1, 0, 0, 1, 1, -1, 0, 1), rand(2, 3, 37)))],
        "lora_expand": [
            Sample(
                (
                    merged[:, 37:74],
                    torch.randn(11, 9, generator=g).to(torch.promote_types(dtype, F32)),
                    ints(1, 0, 1, -1, 0, 0, 1, 1, -1, 0, 1),
                    rand(2, 37, 3),
                ),
                {"segments": [1, 19, 17]},
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
                {"scale": 0.5, "layer": 3, "mask": "window_4", "soft_cap": 2.0},
            ),
        ],
        "latent_attention": [
            Sample(
                (
                    *(heads[:, :3, :7], heads[:, :3, 7:11], heads[:, 3:4, :9], heads[:, 4:, 9:13]),
                    *(rand(3, 7, 9), rand(3, 2, 9), ints(*range(5), *range(6)), ints(*[1] * 5, *[0] * 6)),
                ),
                {"scale": 0.5, "layer": 2},
            )
        ],
        "choose_positions": [
            Sample(
                (heads[:, :3, :7], heads[:, 3:4, :7], factors, ints(*range(5), *range(6)), ints(*[1] * 5, *[0] * 6)),
                {"top_k": 3, "layer": 2},
            )
        ],
        "paged_choose_positions": [
            Sample(
                (
                    *(heads[:4, :3, :7], rand(7, 1, 3, 1, 7), factors[:4]),
                    *(ints(3, 0, 6, 6, 1, 2).view(3, 2), ints(0, 2, 2), counts, ints(5, 0, 2)),
                ),
                {"top_k": 3},
            )
        ],
        "sparse_attention": [
            Sample(
                (
                    *(rand(4, 6, 5), cache, ints(0, 2, 3, 4, 2, -1, 1, -1).view(4, 2)),
                    *(ints(3, 0, 6, 6, 1, 2).view(3, 2), ints(0, 2, 2), counts),
                ),
                {"scale": 0.4, **options},
            )
            for cache, options in ((kv, {}), (kv[:, :1], {"value_width": 4}))
        ],
        "step_latent_attention": [
            Sample(
                (
                    *(heads[:, :3, :7], heads[:, :3, 7:11], heads[:, 2:, :7], heads[:, 3:4, 9:13], heads[:, 2:, 4:17]),
                    *(ints(1, 4, 9), ints(3, 5, 0), rand(11, 3, 13)),
                    torch.randn(11, 3, generator=g).to(torch.promote_types(dtype, F32)),
                ),
                {"scale": 0.5},
            )
        ],
        "kv_append": [
            Sample((cache, rand(4, 2, 5), v, torch.tensor([20, -1, 0, 7])))
            for cache, v in (
                (kv, merged[:4, :10].view(4, 2, 5)),
                (rand(*kv.shape[:1], 1, *kv.shape[2:4], 8), merged[:4, :10].view(4, 2, 5)[..., 2:]),
                (rand(*kv.shape[:1], 1, *kv.shape[2:]), None),
            )
        ],
        "paged_attention": [
            Sample(
                (rand(4, 6, 5), kv, ints(3, 0, 6, 6, 1, 2).view(3, 2), ints(0, 2, 2), counts, ints(5, 0, 2)),
                {"scale": 0.4, **options},
            )
            for options in (
                {},
                {"mask": "window_2"},
                {"mask": "chunked_2"},
                {"mask": "bidirectional"},
                {"soft_cap": 0.7},
            )
        ],
        "merge_attention": [
            Sample((heads[:, :3], rand(11, 9).float()[:, 2:5], heads[:, 2:], rand(11, 3).float())),
            Sample((rand(1, 1, 3), rand(1, 1).float() * 90, rand(1, 1, 3), rand(1, 1).float() * -90)),
        ],
        "partial_attention": [
            Sample(
                (rand(4, 6, 5), kv, ints(3, 0, 6, 6, 1, 2).view(3, 2), ints(0, 2, 2), counts, ints(*lens)),
                {"scale": 0.4, **options},
            )
            for lens, options in (
                ((5, 0, 2), {}),
                ((5, 0, 2), {"mask": "window_2", "soft_cap": 0.7}),
                ((1, 0, 0), {"mask": "bidirectional"}),  # less than is fed, and nothing
            )
        ],
        "step_attention": [
            Sample(
                (*(part.view(11, -1, 5) for part in rand(11, 50).split([30, 10, 10], 1)), ints(4, 0, 0), ints(6, 0, 3)),
                {"scale": 0.4, **options},
            )
            for options in ({}, {"mask": "bidirectional"}, {"mask": "window_2", "soft_cap": 0.7})
        ],
        "pool": [
            Sample((merged[:, 37:74], ints(4, 0, 0), ints(6, 0, 3), ints(5, 1, 0), ints(0, 1, 1)), {"pooling": pooling})
            for pooling in ("last", "mean", "cls")
        ],
        "append_attention": [
            Sample(
                (
                    kv10,
                    *(part.view(11, -1, 10) for part in rand(11, 80).split([40, 20, 20], 1)),
                    # Three pages of 3; of 8 and 5 positions the last 6 and 3 are fed, and two tokens are padding.
                    ints(2, 3, 4, 5, 6, 7, 0, 2, 3, 4, 0),
                    table,
                    torch.tensor([20, 0, 1, 2, 9, 10, -1, 5, 15, 16, -1]),
                    ints(6, 0, 3, 1, 5, 0).view(2, 3),
                    ints(0, 7),
                    ints(6, 3),
                    ints(8, 5),
                    *weights,
                ),
                {"eps": 0.1, "scale": 0.4, **options},
            )
            for weights, options in [
                ((), {}),
                ((rand(10), rand(10)), {"mask": "window_2"}),
                ((rand(10), rand(10)), {"norm_last": True}),
                ((None, None, rand(4)), {"interleaved": True, "soft_cap": 0.7}),
            ]
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
            for weights, order in [
                ((), {}),
                ((rand(10), rand(10)), {}),
                ((rand(10), rand(10)), {"interleaved": True}),
                ((rand(10), rand(10)), {"norm_last": True}),
            ]
        ],
        "page_slots": [
            Sample(
                (
                    torch.randint(0, 24, (13,), generator=g, dtype=torch.int32),
                    torch.randint(-1, 5, (13,), generator=g, dtype=torch.int32),
                    torch.randint(0, 99, (5, 8), generator=g, dtype=torch.int32),
                ),
                {"page_size": 3},
            )
        ],
        "feed": [Sample(random_step(seed)[0], {"page_size": random_step(seed)[1]}) for seed in range(3)],
        "sample": [
            Sample(
                (
                    (torch.randn(11, 37, generator=g) * 2).to(dtype),
                    torch.tensor([0.0, 1.0, 0.3] * 4)[:11],
                    whole(5, 11),
                    torch.rand(11, generator=g),
                    torch.rand(11, generator=g) * 0.2,
                    torch.tensor([1.0, 1.0, 0.7, 0.3, 1.0, 0.9] * 2)[:11],
                    torch.arange(11) * 12345678901,
                    whole(1000, 11),
                    whole(9, 4, 37),
                    rows,
                    *torch.rand(3, 11, generator=g),
                    banned,
                    *edited,
                )
            )
            for edits, last_token in [drawn_edits(g, 37, [1, 9, 1])]
            for rows, banned, edited in [
                (whole(5, 11) - 1, whole(37, 11, 2) * (whole(2, 11, 2) * 2 - 1), (edits, whole(4, 11) - 1, last_token)),
                (ints(*[-1] * 11), ints(*[-1] * 11).view(11, 1), no_penalties(11, 37)[6:]),  # nothing is asked for
            ]
        ],
        "count_tokens": [
            Sample((whole(9, 7, 5), whole(5, 6), whole(4, 6), ints(0, 0, 1, -1, 2, 2), ints(6, 0, 3), ends))
            for ends in (ints(2, -1, 0), ints(-1, -1, -1))
        ],
        "top_logprobs": [
            Sample((rand(5, vocab).round(), whole(3, 5) - 1, ints(-1, 1, -1, 0, -1), wanted))
            for vocab in (3, 53)
            for wanted in (ints(20, 0, 2, -1, 7), ints(-1, -1, -1, -1, -1))
        ],
        **{
            name: [
                Sample(
                    (kv, *[torch.tensor([6, 0, 2]), torch.tensor([0, 5, 6])][: len(OPS[name].parameters.names) - 2]),
                    {"axis": 0},
                )
            ]
            for name in MOVERS
        },
        "advance": [
            Sample((whole(50, 7), whole(50, 7), ints(6, -1, 2), ints(9, 0, 4), ints(70, 71), ints(1, 0, -1), *taken))
            for taken in ((), (ints(1, 0, 2),))
        ],
        "tree_ancestors": [
            Sample(
                (
                    ints(-1, -2, -3, -4, -1, -2, 8, 9, 0),
                    ints(0, 0, 0, 0, 1, 1, 2, 2, -1),
                    ints(6, 0, 1),
                    whole(7, 50, nodes) - 2,
                )
            )
            for nodes in (3, 20, 63)
        ],
        "tree_positions": [
            Sample(
                (
                    ints(20, 21, 22, 23, 5, 6, 0),
                    ints(0, 0, 0, 0, 1, 1, -1),
                    ints(0, 4),
                    torch.tensor([1, 3, 7, 9, 0, 0, 0]),
                )
            )
        ],
        # Two trees, a prompt between them whose last row is scored, and padding.
        "accept_tree": [
            Sample(
                (
                    ints(9, 4, 5, 4, 7, 7, 8, 9, 4, 5, 0),
                    whole(2, 8) + 4,
                    ints(0, 1, 2, 3, 6, 7, 8, 9),
                    ints(0, 0, 0, 0, 1, 1, 1, 2, 2, 2, -1),
                    ints(0, 4, 7, 0),
                    ints(4, 3, 3, 0),
                    ints(3, 4, 7, -1),
                    torch.tensor([1, 3, 7, 9, 0, 0, 0, 1, 3, 5, 0]),
                ),
                {"drafted": drafted},
            )
            for drafted in (3, 5, 3, 5, 2)
        ],
        "move_slots": [
            Sample((kv, torch.tensor([9, 8, 7, 1, -1]), ints(0, 3, 2, 3, 4))),
            Sample((kv, torch.tensor([-1, -1]), ints(0, 1))),
        ],
        "take_block": [
            Sample(
                (ints(-2, -3, -4, 11, -1, 0), ints(0, 0, 0, 2, 2, -1), ints(6, 0, 1), whole(50, 7, 3) - 20),
                {"mask_token": 49},
            )
        ],
        # A block of three after a prompt, one that is whole, one token, and padding.
        "fill_block": [
            Sample(
                (
                    (torch.randn(8, 37, generator=g) * 2).to(dtype),
                    whole(37, 9),
                    ints(1, 1, 1, 0, 0, 1, 1, 1, 1),
                    ints(2, 3, 4, 5, 6, 7, 8, 0),
                    ints(0, 5, 8, 0),
                    ints(5, 3, 1, 0),
                    ints(2, 5, 6, -1),
                ),
                {"block": 3, "steps": steps, "sure_percent": sure},
            )
            for steps, sure in ((1, 100), (3, 2), (2, 100))
        ],
        "take_drafts": [
            Sample((ints(-1, -2, 3, -2, -3, -4, 0), ints(0, 0, 1, 2, 2, 2, -1), ints(6, 0, 1), whole(50, 7, 3))),
            Sample((ints(4, -1), ints(0, 1), ints(2, 5), whole(50, 7, 1))),  # none is fed
        ],
        # Two drafts after a token, a prompt of three, drafts again, a token, and a row that scores the prompt.
        "accept_drafts": [
            Sample(
                (
                    ints(10, 11, 12, 5, 6, 7, 20, 21, 9),
                    sampled,
                    ints(0, 1, 2, 5, 6, 7, 8, 3),
                    ints(0, 3, 6, 8),
                    ints(3, 3, 2, 1),
                    ints(2, 3, 5, 6),
                )
            )
            for sampled in (ints(11, 12, 90, 91, 21, 92, 93, 94), ints(1, 12, 90, 91, -1, 92, 93, 7), whole(13, 8))
        ],
        "read_rows": [
            Sample((rand(7, 5), ints(6, -1, 0, 6))),
            Sample((whole(50, 7), ints(3))),
            Sample((rand(7, 2, 3), ints(-1, -1))),
        ],
        "write_rows": [
            Sample((rand(7, 5), ints(6, -1, 0), rand(4, 5), ints(3, 0, -1))),
            Sample((whole(50, 7), ints(0, 5), whole(50, 2))),
            Sample((rand(7, 2, 3), ints(-1, 2), rand(2, 2, 3))),
        ],
    }
