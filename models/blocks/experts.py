"""A mixture of experts in place of a feed-forward part: a router, the experts, and a part that every token runs."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ingot.ir import ops, recipe
from ingot.ir.types import Split
from ingot.models.blocks.block import Block
from ingot.models.blocks.expert_names import ExpertNames
from ingot.models.blocks.feed_forward import GatedSpec
from ingot.models.blocks.linear import Linear, merges
from ingot.models.blocks.positions import Positions
from ingot.models.params import Place, parameter


@dataclass(frozen=True)
class RouterSpec:
    """The router of a mixture: a linear to a logit for each expert, and the choice of `top_k` experts.

    scores        "softmax" over all experts, or "sigmoid"
    renormalize   whether the weights of a token are divided by their sum. With softmax this equals a softmax over the
                  chosen logits.
    least_sum     the least value of that sum
    choice_bias   name of a bias that is added to scores for the choice alone; None: no such bias
    one_row       whether the checkpoint stores that bias as a matrix of one row
    groups        number of groups of successive experts
    kept_groups   number of groups that are open to a token's choice
    group_best    a group's score is the sum of this number of its best scores
    scale         a factor on the weights
    by_logits     whether the experts with the highest logits are chosen, of which scores may be equal by rounding
    jitter        chooses two experts by SparseMixer with this constant, and the fields above do not count; None: no
                  SparseMixer
    bias          whether the linear has a bias
    wide          whether the linear is computed in float32
    stored        name of the linear in the checkpoint
    """

    top_k: int
    scores: str = "softmax"
    renormalize: bool = False
    least_sum: float = 0.0
    choice_bias: str | None = None
    one_row: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    scale: float = 1.0
    by_logits: bool = False
    jitter: float | None = None
    bias: bool = False
    wide: bool = False
    stored: str = "gate"

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the op `route`: those that differ from the op's defaults."""
        options: dict[str, Any] = {"top_k": self.top_k}
        if self.scores != "softmax":
            options["scores"] = self.scores
        if self.renormalize:
            options["renormalize"] = True
            options |= {"least_sum": self.least_sum} if self.least_sum else {}
        if self.groups > 1:
            options |= {"groups": self.groups, "kept_groups": self.kept_groups, "group_best": self.group_best}
        options |= {"by_logits": True} if self.by_logits else {}
        return {**options, "scale": self.scale} if self.scale != 1 else options


class ExpertRouter(Block):
    """The router of a mixture: x [T, hidden] -> weights f32[T, top_k] and indices i32[T, top_k] of chosen experts.

    Logits are float32, whatever the model's dtype. A mesh does not split the router.
    """

    def __init__(self, spec: RouterSpec, place: Place, hidden: int, experts: int) -> None:
        super().__init__()
        self.spec = spec
        stored = replace(place / spec.stored, dtype=torch.float32 if spec.wide else place.dtype)
        self.linear = Linear(stored, hidden, experts, bias=spec.bias)
        self.choice_bias = None
        if spec.choice_bias is not None:
            made = place.source(spec.choice_bias)
            made = recipe.reshape(made, (experts,)) if spec.one_row else made
            self.choice_bias = parameter((experts,), made, torch.float32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spec, wide = self.spec, torch.float32
        logits = self.linear(ops.cast(x, dtype=wide)) if spec.wide else ops.cast(self.linear(x), dtype=wide)
        if spec.jitter is not None:
            return ops.sparse_mixer(logits, jitter=spec.jitter)
        bias = () if self.choice_bias is None else (self.choice_bias,)
        return ops.route(logits, *bias, **spec.options())


@dataclass(frozen=True)
class SharedSpec:
    """A gated feed-forward part beside the experts, which every token runs.

    mlp    the part itself
    gate   name of a linear with one output. The sigmoid of that output multiplies the part's result. None: no factor
    """

    mlp: GatedSpec
    gate: str | None = None


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts: the weighted sum of the results of the experts that the router chooses for a token.

    experts       number of experts with weights
    width         number of outputs of an expert's gate and of its up
    router        chooses experts
    activation    how an expert joins gate and up, as in the op `experts`
    limit         limit of the activation "clamped"
    alpha         constant of the activation "clamped"
    bias          whether the linears of experts have biases
    weigh_input   whether a token's weights multiply the inputs of its experts, and not their results
    identities    number of further experts, after the others, that return their input
    shared        a part that every token runs, whose result is added; None: no such part
    place         prefix of the tensors within the layer
    names         names of the experts' tensors in the checkpoint
    """

    experts: int
    width: int
    router: RouterSpec
    activation: str = "silu"
    limit: float = 7.0
    alpha: float = 1.702
    bias: bool = False
    weigh_input: bool = False
    identities: int = 0
    shared: SharedSpec | None = None
    place: str = "mlp"
    names: ExpertNames = field(default_factory=ExpertNames)

    def build(self, place: Place, hidden: int, layer: int) -> "Experts":
        return Experts(self, place / self.place, hidden, layer)

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the op `experts`: those that differ from the op's defaults."""
        options: dict[str, Any] = {} if self.activation == "silu" else {"activation": self.activation}
        options |= {"weigh_input": True} if self.weigh_input else {}
        options |= {"identities": self.identities} if self.identities else {}
        return options | ({"limit": self.limit, "alpha": self.alpha} if self.activation == "clamped" else {})


class Experts(Block):
    """A mixture of experts: x [T, hidden] -> [T, hidden]. `place` is the prefix of its tensors in the checkpoint.

    On a mesh each rank has a part of every expert. Experts with biases stay whole.
    """

    def __init__(self, spec: ExpertsSpec, place: Place, hidden: int, layer: int) -> None:
        super().__init__()
        self.spec, width, names = spec, spec.width, spec.names
        self.router = ExpertRouter(spec.router, place, hidden, spec.experts + spec.identities)
        splits = (None, None) if spec.bias else (Split("tp", 1, (width, width)), Split("tp", 2))
        gate_up, down = names.of_gate_up(place, spec.experts, width), names.of_down(place, spec.experts, width)
        self.gate_up = parameter((spec.experts, 2 * width, hidden), gate_up, place.dtype, splits[0])
        self.down = parameter((spec.experts, hidden, width), down, place.dtype, splits[1])
        self.gate_up_bias = self.down_bias = None
        if spec.bias:
            biases = names.of_biases(place)
            self.gate_up_bias = parameter((spec.experts, 2 * width), biases[0], place.dtype)
            self.down_bias = parameter((spec.experts, hidden), biases[1], place.dtype)
        self.shared = self.shared_gate = None
        if spec.shared is not None:
            self.shared = spec.shared.mlp.build(place, hidden, layer)
            self.shared_gate = None if spec.shared.gate is None else Linear(place / spec.shared.gate, hidden, 1)

    def forward(self, x: torch.Tensor, at: Positions) -> torch.Tensor:
        biases = () if self.gate_up_bias is None else (self.gate_up_bias, self.down_bias)
        result = ops.experts(x, *self.router(x), self.gate_up, self.down, *biases, **self.spec.options())
        if self.shared is None:
            return result
        shared = self.shared(x, at)
        if self.shared_gate is not None:
            shared = ops.activate(self.shared_gate(x), kind="sigmoid") * shared
        return result + shared

    def matches(self) -> dict[str, int]:
        """Return how many linears the pass merge-linears must merge, beyond those of the shared part.

        The router and the shared part's gate read the same value.
        """
        same = () if self.spec.router.wide or self.shared_gate is None else (self.router.linear, self.shared_gate)
        return {"merge-linears": merges(same)}
