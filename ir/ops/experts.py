"""The op of the experts in a mixture: each token runs through the experts that a router chose for it.

Only the device knows the number of tokens per expert. No size of a program depends on it: there are always T * top_k
rows, grouped by expert, and a count per expert.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from ingot.ir.errors import VerifyError
from ingot.ir.ops.activations import gelu_mul, silu_mul
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


def _check(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
) -> None:
    num_experts, ffn, hidden = gate_up.shape[0], down.shape[-1], x.shape[-1]
    if gate_up.shape != (num_experts, 2 * ffn, hidden) or down.shape != (num_experts, hidden, ffn):
        raise VerifyError(
            f"expert weights {list(gate_up.shape)} and {list(down.shape)}",
            expected=f"[E, 2F, D] and [E, D, F], with D = {hidden}",
        )
    biases = {
        "gate_up_bias": (gate_up_bias, [num_experts, 2 * ffn]),
        "down_bias": (down_bias, [num_experts, hidden]),
    }
    for name, (bias, shape) in biases.items():
        if bias is not None and list(bias.shape) != shape:
            raise VerifyError(f"{name} is {list(bias.shape)}", expected=str(shape))
    if chosen.dtype != torch.int32 or weights.shape != chosen.shape or chosen.shape[0] != x.shape[0]:
        raise VerifyError(
            f"weights {list(weights.shape)} and experts {chosen.dtype} {list(chosen.shape)}",
            expected=f"[T, top_k] and int32 [T, top_k], with T = {x.shape[0]}",
        )
    if not 1 <= chosen.shape[1] <= num_experts:
        raise VerifyError(f"{chosen.shape[1]} experts for each token", expected=f"1 to {num_experts}")
    if activation not in (*GATES, CLAMPED):
        raise VerifyError(
            f"activation '{activation:.80}'", where="ingot.experts", expected=", ".join((*GATES, CLAMPED))
        )


def _fake(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    limit: float = 7.0,
    alpha: float = 1.702,
    weigh_input: bool = False,
) -> torch.Tensor:
    _check(x, weights, chosen, gate_up, down, gate_up_bias, down_bias, activation)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _flops(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *tensors: torch.Tensor, **_: object) -> int:
    down = tensors[1]
    return 6 * chosen.shape[1] * x.numel() * int(down.shape[2])  # gate, up and down, two operations a weight


def _traffic(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    *tensors: torch.Tensor | None,
    **_: object,
) -> int:
    """Return the bytes that a call reads and writes.

    It assumes that the tokens choose as many different experts as possible. The weights of each of these are read once.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    experts = min(given[0].shape[0], chosen.numel())
    return 2 * bytes_of(x) + bytes_of(weights, chosen) + experts * bytes_of(*(tensor[:1] for tensor in given))


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

    # With one token most experts get none.
    return [
        Sample((*routed(6, 2), *matrices)),
        Sample((*routed(6, 3), *matrices), {"activation": "gelu"}),
        Sample((*routed(6, 1), *matrices), {"activation": "gelu_tanh", "weigh_input": True}),
        Sample((*routed(6, 2), *matrices, *biases), {"activation": CLAMPED, "limit": 0.4, "alpha": 1.5}),
        Sample((*routed(1, 1), *matrices)),
    ]


def _through(
    x: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    counts: Sequence[int],
    matrices: Sequence[torch.Tensor | None],
    gate_of: Gate,
    weigh_input: bool,
) -> torch.Tensor:
    """Run each token of x through its chosen experts, and return the weighted sums [T, D].

    weights       the weight of each choice [T, top_k]
    order         the choices (token * top_k + i) by expert. The first `counts[0]` of them belong to expert 0, the next
                  `counts[1]` to expert 1, and so on.
    matrices      the experts' gate_up, down, and biases of both or None
    gate_of       joins gate and up
    weigh_input   whether the weights multiply the inputs of experts, and not their results
    """
    gate_up, down, gate_up_bias, down_bias = matrices
    assert gate_up is not None and down is not None
    rows = x[order // weights.shape[1]]
    if weigh_input:
        rows = (wide(rows) * weights.flatten()[order, None]).to(x.dtype)
    made = torch.empty_like(rows)
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            mine = slice(begin, begin + count)
            biases = [None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias)]
            gate, up = F.linear(rows[mine], gate_up[expert], biases[0]).chunk(2, -1)
            made[mine] = F.linear(gate_of(gate, up), down[expert], biases[1])
        begin += count
    by_choice = torch.empty_like(made)
    by_choice[order] = made
    shares = wide(by_choice).view(*weights.shape, x.shape[-1])
    return (shares if weigh_input else shares * weights[..., None]).sum(1).to(x.dtype)


def _gate(activation: str, limit: float, alpha: float) -> Gate:
    return partial(clamped_swiglu, limit=limit, alpha=alpha) if activation == CLAMPED else GATES[activation]


def _all_to_the_same(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    limit: float = 7.0,
    alpha: float = 1.702,
    weigh_input: bool = False,
) -> torch.Tensor:
    """Allocate the most memory that a call of `experts` can need. The memory planner measures it.

    The worst case is that all tokens choose the same experts. The result only has the right shape.
    """
    order, _ = group_by_expert(chosen, gate_up.shape[0])
    counts, matrices = [x.shape[0]] * chosen.shape[1], (gate_up, down, gate_up_bias, down_bias)
    return _through(x, weights, order, counts, matrices, _gate(activation, limit, alpha), weigh_input)


def _placement(call: Call) -> Fit:
    """The placement rule of `experts` on a mesh axis: each rank has a part of every expert's gate, up and down weights.

    The result is then a partial sum: the sum over the ranks is still to be added. If the weights are not split, every
    rank has all arguments whole.
    """
    if call.kind("gate_up") != "shard" and not call.is_shard("down", 2):
        return whole(call)
    if "down_bias" in call.types:
        raise VerifyError(
            "a bias of experts on partial sums is added once by each rank", expected="experts that are not split"
        )
    size = call.size("down", 2)
    assert isinstance(size, int)
    halves = (size * call.parts,) * 2
    biases = {"gate_up_bias": call.shard(1, halves)} if "gate_up_bias" in call.types else {}
    return Fit({"gate_up": call.shard(1, halves), "down": call.shard(2), **biases}, call.partial)


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
    *,
    activation: str = "silu",
    limit: float = 7.0,
    alpha: float = 1.702,
    weigh_input: bool = False,
) -> torch.Tensor:
    """Run each token of x [T, D] through its chosen experts, and return the weighted sums [T, D].

    `route` returns `weights` f32[T, top_k] and `chosen` i32[T, top_k]. Expert e computes gate and up by
    `gate_up[e] @ x + gate_up_bias[e]`, the gate first, joins them, and computes `down[e] @ joined + down_bias[e]`.
    `gate_up` is [E, 2F, D], `down` [E, D, F], and biases are [E, 2F] and [E, D].

    `activation` joins gate and up: "silu", "gelu" or "gelu_tanh" as in `silu_mul` and `gelu_mul`, or "clamped", the
    SwiGLU of GPT-OSS with its constants `limit` and `alpha`. With `weigh_input` the weights multiply the experts'
    inputs, and not their results, as in Llama 4. Each matmul is rounded to x's dtype, as in `linear`. The sum is
    rounded once.
    """
    _check(x, weights, chosen, gate_up, down, gate_up_bias, down_bias, activation)
    order, counts = group_by_expert(chosen, gate_up.shape[0])
    matrices = (gate_up, down, gate_up_bias, down_bias)
    return _through(x, weights, order, counts.tolist(), matrices, _gate(activation, limit, alpha), weigh_input)
