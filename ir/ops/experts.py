"""The op of the experts in a mixture: each token runs through the experts that a router chose for it.

Only the device knows the number of tokens per expert. No size of a program depends on it: there are always T * top_k
rows, grouped by expert, and a count per expert.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ingot.ir.errors import VerifyError
from ingot.ir.formats import PARTS, find_format
from ingot.ir.formats.stacked import quantize_stack
from ingot.ir.ops.activations import gelu_mul, silu_mul
from ingot.ir.ops.expert_weights import WEIGHTS, ExpertWeight, part_parameter, splits_of
from ingot.ir.ops.registry import Sample, bytes_of, define, wide
from ingot.ir.placements import Call, Fit, whole

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# How an expert joins its gate and up, by name. "clamped" has two constants.
GATES: Mapping[str, Gate] = {
    "silu": silu_mul.reference,
    "gelu": partial(gelu_mul.reference, approximate="none"),
    "gelu_tanh": partial(gelu_mul.reference, approximate="tanh"),
}
CLAMPED = "clamped"


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """Return g * sigmoid(alpha * g) * (u + 1), the gate of GPT-OSS (transformers, modeling_gpt_oss.py).

    g is `gate` limited to at most `limit`, and u is `up` limited to the range from -`limit` to `limit`. Only the result
    is rounded to their dtype.
    """
    g, u = wide(gate).clamp(max=limit), wide(up).clamp(-limit, limit)
    return (g * torch.sigmoid(alpha * g) * (u + 1)).to(gate.dtype)


def group_by_expert(chosen: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the chosen experts of all tokens by expert, and return (order i64[T * top_k], counts i64[num_experts]).

    `chosen` [T, top_k] holds the chosen experts. Choice i of token t has the number t * top_k + i. `order` lists these
    numbers: first all choices of expert 0, then those of expert 1, and so on. Within an expert they are in token order.
    `counts` says how many choices each expert has.
    """
    flat = chosen.flatten().long()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return flat.argsort(stable=True), counts.scatter_add_(0, flat, torch.ones_like(flat))


def _weights(bound: Mapping[str, Any]) -> tuple[ExpertWeight, ExpertWeight]:
    """Return the weights of gate and up, and of down, from the arguments of a call by parameter name."""
    gate_up, down = (
        ExpertWeight.of(
            name,
            bound[f"{name}_format"],
            bound[f"{name}_bias"],
            tuple(bound[part_parameter(name, part)] for part in PARTS),
        )
        for name in WEIGHTS
    )
    return gate_up, down


def _check(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, bound: Mapping[str, Any]) -> None:
    gate_up, down = _weights(bound)
    (num_experts, rows, columns), hidden = gate_up.shape, x.shape[-1]
    ffn = down.shape[2]
    if (rows, columns) != (2 * ffn, hidden) or down.shape != (num_experts, hidden, ffn):
        raise VerifyError(
            f"expert weights {list(gate_up.shape)} and {list(down.shape)}",
            expected=f"[E, 2F, D] and [E, D, F], with D = {hidden}",
        )
    for one in (gate_up, down):
        if one.bias is not None and tuple(one.bias.shape) != one.shape[:2]:
            raise VerifyError(f"{one.name}_bias is {list(one.bias.shape)}", expected=str(list(one.shape[:2])))
    if chosen.dtype != torch.int32 or weights.shape != chosen.shape or chosen.shape[0] != x.shape[0]:
        raise VerifyError(
            f"weights {list(weights.shape)} and experts {chosen.dtype} {list(chosen.shape)}",
            expected=f"[T, top_k] and int32 [T, top_k], with T = {x.shape[0]}",
        )
    for name, least in (("identities", 0), ("identity_parts", 1)):
        if bound[name] < least:
            raise VerifyError(f"{name} is {bound[name]}", where="ingot.experts", expected=f"at least {least}")
    most = num_experts + bound["identities"]
    if not 1 <= chosen.shape[1] <= most:
        raise VerifyError(f"{chosen.shape[1]} experts for each token", expected=f"1 to {most}")
    activation = bound["activation"]
    if activation not in (*GATES, CLAMPED):
        raise VerifyError(
            f"activation '{activation:.80}'", where="ingot.experts", expected=", ".join((*GATES, CLAMPED))
        )


def _fake(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    bound = experts.bind((x, weights, chosen, *args), kwargs)
    for one in _weights(bound):
        one.check(x.dtype)
    _check(x, weights, chosen, bound)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _flops(*args: Any, **kwargs: Any) -> int:
    bound = experts.bind(args, kwargs)
    ffn = _weights(bound)[1].shape[2]
    # Gate, up and down, two operations a weight.
    return 6 * int(bound["chosen"].shape[1]) * int(bound["x"].numel()) * ffn


def _traffic(*args: Any, **kwargs: Any) -> dict[str, int]:
    """Return the bytes that a call reads of each tensor of the weights.

    It assumes that the tokens choose as many different experts as possible. The weights of each of these are read once.
    """
    bound = experts.bind(args, kwargs)
    matrices = _weights(bound)
    different = min(matrices[0].shape[0], bound["chosen"].numel())
    return {name: different * bytes_of(one[:1]) for each in matrices for name, one in each.tensors().items()}


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) / math.sqrt(shape[-1])).to(dtype)

    router_dtype = torch.promote_types(dtype, torch.float32)
    order = torch.rand(6, 4, generator=g).argsort(-1).to(torch.int32)
    x, matrices = randn(6, 24), (randn(4, 40, 24), randn(4, 24, 20))
    biases = randn(4, 40), randn(4, 24)

    def routed(tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = torch.rand(tokens, top_k, generator=g).to(router_dtype)
        return x[:tokens], weights, order[:tokens, :top_k].clone(memory_format=torch.contiguous_format)

    def stored(up: str, down: str, biased: bool, **options: Any) -> Sample:
        """Return a call with weights in storage formats. Each expert has its own scales."""
        wide = torch.randn(6, 64, generator=g).to(dtype)
        made = [
            quantize_stack(torch.randn(4, *shape, generator=g) / 8, find_format(name))
            for name, shape in ((up, (128, 64)), (down, (64, 64)))
        ]
        own = [one for parts in made for one in (parts.get(part) for part in PARTS[1:])]
        biases = (randn(4, 128), randn(4, 64)) if biased else (None, None)
        _, weights, chosen = routed(6, 2)
        formats = {"gate_up_format": up, "down_format": down}
        return Sample((wide, weights, chosen, *(one["weight"] for one in made), *biases, *own), {**options, **formats})

    # With one token most experts get none.
    return [
        Sample((*routed(6, 2), *matrices)),
        Sample((*routed(6, 3), *matrices), {"activation": "gelu"}),
        Sample((*routed(6, 1), *matrices), {"activation": "gelu_tanh", "weigh_input": True}),
        Sample((*routed(6, 2), *matrices, *biases), {"activation": CLAMPED, "limit": 0.4, "alpha": 1.5}),
        Sample((*routed(1, 1), *matrices)),
        Sample((*routed(6, 4), *(one[:2] for one in matrices)), {"identities": 2}),
        stored("mxfp4", "mxfp4", biased=True, activation=CLAMPED),
        stored("int4_g32_asym", "int8", biased=False),
        stored("int8_tensor", "int8_g32", biased=False),
    ]


def _through(
    x: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    counts: Sequence[int],
    bound: Mapping[str, Any],
    stored: torch.dtype,
) -> torch.Tensor:
    """Run each token of x through its chosen experts, and return the weighted sums [T, D].

    weights       the weight of each choice [T, top_k]
    order         the choices (token * top_k + i) by expert. The first `counts[0]` of them belong to expert 0, the next
                  `counts[1]` to expert 1, and so on. The rest are of experts that return their input.
    bound         the arguments of the call by parameter name
    stored        the dtype of the rows that a kernel stores: x with its weight, and joined rows
    """
    (gate_up, down), weigh_input = _weights(bound), bound["weigh_input"]
    gate_of = _gate(bound["activation"], bound["limit"], bound["alpha"])
    if bound["identity_parts"] > 1:
        weights = torch.where(bound["chosen"] < gate_up.shape[0], weights, weights / bound["identity_parts"])
    rows = x[order // weights.shape[1]]
    if weigh_input:
        rows = (wide(rows) * weights.flatten()[order, None]).to(stored).to(x.dtype)
    made = torch.empty_like(rows)
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            mine = slice(begin, begin + count)
            gate, up = gate_up.linear(rows[mine], expert).chunk(2, -1)
            made[mine] = down.linear(gate_of(gate, up).to(stored).to(x.dtype), expert)
        begin += count
    made[begin:] = rows[begin:]
    by_choice = torch.empty_like(made)
    by_choice[order] = made
    shares = wide(by_choice).view(*weights.shape, x.shape[-1])
    return (shares if weigh_input else shares * weights[..., None]).sum(1).to(x.dtype)


def run_experts(bound: Mapping[str, Any], stored: torch.dtype | None = None) -> torch.Tensor:
    """Compute a call of `experts` from its arguments by parameter name, as `Op.bind` returns them, without checks.

    `stored` is the dtype of the rows that a kernel stores before its two matmuls: weighed rows of x, and joined rows.
    None means the dtype of x. With x in float32 and `stored` in the dtype of a model, this rounds where a kernel does.
    """
    x, chosen = bound["x"], bound["chosen"]
    num_experts = _weights(bound)[0].shape[0]
    order, counts = group_by_expert(chosen, num_experts + bound["identities"])
    return _through(x, bound["weights"], order, counts[:num_experts].tolist(), bound, stored or x.dtype)


def _gate(activation: str, limit: float, alpha: float) -> Gate:
    return partial(clamped_swiglu, limit=limit, alpha=alpha) if activation == CLAMPED else GATES[activation]


def _all_to_the_same(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Allocate the most memory that a call of `experts` can need. The memory planner measures it.

    The worst case is that all tokens choose the same experts. The result only has the right shape.
    """
    bound = experts.bind(args, kwargs)
    x, weights, chosen = bound["x"], bound["weights"], bound["chosen"]
    num_experts = _weights(bound)[0].shape[0]
    order, _ = group_by_expert(chosen, num_experts + bound["identities"])
    return _through(x, weights, order, [x.shape[0]] * min(chosen.shape[1], num_experts), bound, x.dtype)


def _placement(call: Call) -> Fit:
    """The placement rule of `experts` on a mesh axis: each rank has a part of every expert's gate, up and down weights.

    The result is then a partial sum: the sum over the ranks is still to be added. Scales and zeros are split like the
    elements. If the weights are not split, every rank has all arguments whole. So it is if the columns of down must
    stay together. Of experts that return their input, each rank adds its part.
    """
    if call.kind("gate_up") != "shard" and not call.is_shard("down", 2):
        return whole(call)
    if "down_bias" in call.types:
        raise VerifyError(
            "a bias of experts on partial sums is added once by each rank", expected="experts that are not split"
        )
    if call.values["identities"] and call.values["identity_parts"] != call.parts:
        raise VerifyError(
            f"{call.parts} ranks add the input, and identity_parts is {call.values['identity_parts']}",
            expected=f"{call.parts}",
        )
    needs = splits_of(call)
    if needs is None:
        return whole(call)
    return Fit(needs, call.partial)


@define(
    rows=("x", "weights", "chosen"),
    samples=_samples,
    fake=_fake,
    costliest=_all_to_the_same,
    flops=_flops,
    multiplies=True,
    traffic=_traffic,
    fusible=False,
    placement=_placement,
)
def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_up_scales: torch.Tensor | None = None,
    gate_up_zeros: torch.Tensor | None = None,
    gate_up_offsets: torch.Tensor | None = None,
    gate_up_outer: torch.Tensor | None = None,
    gate_up_order: torch.Tensor | None = None,
    gate_up_input_scale: torch.Tensor | None = None,
    gate_up_rotation_in: torch.Tensor | None = None,
    gate_up_rotation_out: torch.Tensor | None = None,
    down_scales: torch.Tensor | None = None,
    down_zeros: torch.Tensor | None = None,
    down_offsets: torch.Tensor | None = None,
    down_outer: torch.Tensor | None = None,
    down_order: torch.Tensor | None = None,
    down_input_scale: torch.Tensor | None = None,
    down_rotation_in: torch.Tensor | None = None,
    down_rotation_out: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    limit: float = 7.0,
    alpha: float = 1.702,
    weigh_input: bool = False,
    identities: int = 0,
    identity_parts: int = 1,
    gate_up_format: str = "plain",
    down_format: str = "plain",
) -> torch.Tensor:
    """Run each token of x [T, D] through its chosen experts, and return the weighted sums [T, D].

    `route` returns `weights` f32[T, top_k] and `chosen` i32[T, top_k]. Expert e computes gate and up by
    `gate_up[e] @ x + gate_up_bias[e]`, the gate first, joins them, and computes `down[e] @ joined + down_bias[e]`.
    `gate_up` is [E, 2F, D], `down` [E, D, F], and biases are [E, 2F] and [E, D].

    `gate_up_format` and `down_format` are the storage formats of the weights (`ingot.ir.formats`). The further tensors
    are the parts that store them, each with the experts on its first axis. A matmul in a format other than "plain"
    computes like `quant_linear`: it rounds its input as the format says.

    `activation` joins gate and up: "silu", "gelu" or "gelu_tanh" as in `silu_mul` and `gelu_mul`, or "clamped", the
    SwiGLU of GPT-OSS with its constants `limit` and `alpha`. With `weigh_input` the weights multiply the experts'
    inputs, and not their results, as in Llama 4. Each matmul is rounded to x's dtype, as in `linear`. The sum is
    rounded once.

    Indices from E to E + `identities` - 1 are of experts that return their input, as the zero experts of LongCat-Flash
    (arXiv 2509.01322). Their weights are divided by `identity_parts`: the ranks that split the other experts each add
    such a part.
    """
    bound = locals()  # the arguments by parameter name, as `Op.bind` returns them
    _check(x, weights, chosen, bound)
    return run_experts(bound)
