"""The dense decoder: one definition with flags for Llama-like models, with its weight map and sharding plan."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ingot.ir import ops, recipe
from ingot.ir.recipe import Recipe
from ingot.ir.types import Placement
from ingot.models.config import RopeSpec


@dataclass(frozen=True)
class DenseSpec:
    """Shape and flags of a dense decoder. Sizes in elements; `ffn` is the width of the gated MLP."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    rope: RopeSpec
    tied: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, eps=self.eps)


class Layer(nn.Module):
    """Attention, then a gated MLP, each behind a norm and added to the stream."""

    def __init__(self, spec: DenseSpec, index: int) -> None:
        super().__init__()
        self.index, self.head_dim = index, spec.head_dim
        self.heads, self.kv_heads = spec.heads, spec.kv_heads
        q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.q = Linear(spec.hidden, q_size, spec.attention_bias)
        self.k = Linear(spec.hidden, kv_size, spec.attention_bias)
        self.v = Linear(spec.hidden, kv_size, spec.attention_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.o = Linear(q_size, spec.hidden, spec.attention_bias)
        self.mlp_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.gate = Linear(spec.hidden, spec.ffn, spec.mlp_bias)
        self.up = Linear(spec.hidden, spec.ffn, spec.mlp_bias)
        self.down = Linear(spec.ffn, spec.hidden, spec.mlp_bias)

    def forward(
        self, h: torch.Tensor, positions: torch.Tensor, token_seqs: torch.Tensor, rope_table: torch.Tensor
    ) -> torch.Tensor:
        x = self.attention_norm(h)
        # view(-1, …), never x.shape[0]: a size node would be shared by every region.
        q = self.q(x).view(-1, self.heads, self.head_dim)
        k = self.k(x).view(-1, self.kv_heads, self.head_dim)
        v = self.v(x).view(-1, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = ops.rope(q, positions, rope_table), ops.rope(k, positions, rope_table)
        attended = ops.attention(q, k, v, positions, token_seqs, scale=self.head_dim**-0.5, layer=self.index)
        h = h + self.o(attended.view(-1, self.heads * self.head_dim))
        x = self.mlp_norm(h)
        return h + self.down(ops.silu_mul(self.gate(x), self.up(x)))


class DenseDecoder(nn.Module):
    """Token ids to logits. Build it on the meta device; parameters are of `dtype`, the rope table of float32."""

    def __init__(self, spec: DenseSpec, dtype: torch.dtype, max_seq_len: int) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Module()
        self.embed.weight = nn.Parameter(torch.empty(spec.vocab, spec.hidden))
        self.layers = nn.ModuleList(Layer(spec, index) for index in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.head = None if spec.tied else Linear(spec.hidden, spec.vocab)
        self.to(dtype)
        self.rope_table = nn.Parameter(torch.empty(max_seq_len, spec.rope.rotary_dim), requires_grad=False)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, token_seqs: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """tokens, positions, token_seqs i32[T], logit_rows i32[L] -> logits f32[L, vocab]."""
        h = ops.embedding(tokens, self.embed.weight)
        for layer in self.layers:
            h = layer(h, positions, token_seqs, self.rope_table)
        x = self.norm(ops.select_rows(h, logit_rows))
        logits = ops.linear(x, self.embed.weight) if self.head is None else self.head(x)
        return ops.cast(logits, dtype=torch.float32)


# Our names of a layer's modules, and Hugging Face's.
_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# Tensors that some checkpoints carry and no dense decoder reads: derived tables, and the copy of a tied head.
IGNORED = (r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
IGNORED_WHEN_TIED = (*IGNORED, r"lm_head\.weight")


def weight_map(spec: DenseSpec, max_seq_len: int) -> dict[str, Recipe]:
    """The recipe of each parameter, from tensors in Hugging Face's names."""
    rope = spec.rope
    recipes = {
        "embed.weight": recipe.source("model.embed_tokens.weight"),
        "norm.weight": recipe.source("model.norm.weight"),
        "rope_table": recipe.table(
            kind="rope",
            rope_type=rope.rope_type,
            positions=max_seq_len,
            theta=rope.theta,
            rotary_dim=rope.rotary_dim,
            **dict(rope.constants),
        ),
    }
    if not spec.tied:
        recipes["head.weight"] = recipe.source("lm_head.weight")
    biased = {"q", "k", "v", "o"} if spec.attention_bias else set()
    biased |= {"gate", "up", "down"} if spec.mlp_bias else set()
    for index in range(spec.layers):
        for ours, theirs in _LAYER_NAMES.items():
            if ours in ("q_norm", "k_norm") and not spec.qk_norm:
                continue
            for part in ("weight", "bias") if ours in biased else ("weight",):
                recipes[f"layers.{index}.{ours}.{part}"] = recipe.source(f"model.layers.{index}.{theirs}.{part}")
    return recipes


# How tensor parallelism splits each parameter, by its last two names; what is not listed is replicated.
TP_PLAN: Mapping[str, Placement] = {
    **{
        f"{name}.{part}": Placement("tp", "shard", 0)
        for name in ("q", "k", "v", "gate", "up")
        for part in ("weight", "bias")
    },
    "o.weight": Placement("tp", "shard", 1),
    "down.weight": Placement("tp", "shard", 1),
    "head.weight": Placement("tp", "shard", 0),
    "embed.weight": Placement("tp", "shard", 0),
}


def placement(name: str) -> tuple[Placement, ...]:
    """The placement of the parameter `name`."""
    found = TP_PLAN.get(".".join(name.split(".")[-2:]))
    return (found,) if found else ()


def expected_matches(spec: DenseSpec) -> dict[str, int]:
    """How often each pass must match: fewer is an error, for a silently inert pass is lost speed."""
    return {
        "insert-paged-kv": spec.layers,
        "insert-sampling": 1,
        "merge-linears": 2 * spec.layers,  # q, k, v and gate, up
        # Both norms of a layer follow an add, save the first layer's first, which follows the embedding. The final
        # norm follows the selection of rows.
        "fuse-add-rms-norm": 2 * spec.layers - 1,
    }
