"""The dense decoder: one definition with flags for all Llama-like models, with its weight map and sharding plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ingot.ir import ops, recipe
from ingot.ir.recipe import Recipe
from ingot.ir.types import Split
from ingot.models.config import RopeSpec


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer: the positions that attention sees (None: all), and which of the model's
    rotary tables it uses (None: no rotation)."""

    window: int | None = None
    rope: int | None = 0


@dataclass(frozen=True)
class DenseSpec:
    """Shape and flags of a dense decoder. Sizes in elements; `ffn` is the width of the gated MLP.

    norm              "rms" or "layer"
    norm_wide         gains are float32 and the product with them is what gets rounded
    norm_offset       added to the stored gains
    pre_norm, post_norm   norms in front of attention and MLP, and behind them, before they are added to the stream
    parallel          attention and MLP read the same norm and are added together
    qk_norm           None, "head" (over a head's elements) or "full" (over all heads of a token)
    activation        "silu", "gelu" or "gelu_tanh"
    attention_scale   None: head_dim ** -0.5
    embed_scale, residual_scale, logit_scale   factors on embeddings, on what is added to the stream, on logits
    embed_scale_rounded   the factor on embeddings is rounded to the model's dtype first
    post_norm_names   how the checkpoint calls the norms behind attention and MLP; None: as Gemma 2 and OLMo 2 do
    fused_weights     the checkpoint stores q, k, v as one tensor, and gate and up as one
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    ropes: tuple[RopeSpec, ...]
    layers: tuple[LayerSpec, ...]
    tied: bool = False
    norm: str = "rms"
    norm_wide: bool = False
    norm_offset: float = 0.0
    pre_norm: bool = True
    post_norm: bool = False
    post_norm_names: tuple[str, str] | None = None
    parallel: bool = False
    qk_norm: str | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    rope_interleaved: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embed_scale: float | None = None
    embed_scale_rounded: bool = False
    residual_scale: float | None = None
    logit_scale: float | None = None
    fused_weights: bool = False


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    def __init__(self, spec: DenseSpec, dtype: torch.dtype, *shape: int) -> None:
        super().__init__()
        wide = spec.norm_wide or spec.norm_offset
        self.weight = nn.Parameter(torch.empty(*shape, dtype=torch.float32 if wide else dtype))
        self.op = ops.layer_norm if spec.norm == "layer" else ops.rms_norm
        self.eps = spec.norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x, self.weight, eps=self.eps)


class Attention(nn.Module):
    def __init__(self, spec: DenseSpec, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.layer, self.index = spec, spec.layers[index], index
        q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q = Linear(spec.hidden, q_size, dtype, spec.qkv_bias)
        self.k = Linear(spec.hidden, kv_size, dtype, spec.qkv_bias)
        self.v = Linear(spec.hidden, kv_size, dtype, spec.qkv_bias)
        self.o = Linear(q_size, spec.hidden, dtype, spec.o_bias)
        if spec.qk_norm is not None:
            self.q_norm = Norm(spec, dtype, *_qk_norm_shape(spec, spec.heads))
            self.k_norm = Norm(spec, dtype, *_qk_norm_shape(spec, spec.kv_heads))

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, token_seqs: torch.Tensor, ropes: list[nn.Parameter]
    ) -> torch.Tensor:
        spec = self.spec
        q, k, v = self.q(x), self.k(x), self.v(x)
        if spec.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        # view(-1, …), never x.shape[0]: how many tokens there are is no number while the model is traced.
        q = q.view(-1, spec.heads, spec.head_dim)
        k, v = k.view(-1, spec.kv_heads, spec.head_dim), v.view(-1, spec.kv_heads, spec.head_dim)
        if spec.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.layer.rope is not None:
            order = {"interleaved": True} if spec.rope_interleaved else {}
            q = ops.rope(q, positions, ropes[self.layer.rope], **order)
            k = ops.rope(k, positions, ropes[self.layer.rope], **order)
        mask = None if self.layer.window is None else f"window_{self.layer.window}"
        optional = {"mask": mask, "soft_cap": spec.attention_soft_cap}
        attended = ops.attention(
            q,
            k,
            v,
            positions,
            token_seqs,
            scale=spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            layer=self.index,
            **{name: value for name, value in optional.items() if value is not None},
        )
        return self.o(attended.view(-1, spec.heads * spec.head_dim))


class MLP(nn.Module):
    def __init__(self, spec: DenseSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = spec.activation
        self.gate = Linear(spec.hidden, spec.ffn, dtype, spec.mlp_bias)
        self.up = Linear(spec.hidden, spec.ffn, dtype, spec.mlp_bias)
        self.down = Linear(spec.ffn, spec.hidden, dtype, spec.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate(x), self.up(x)
        if self.activation == "silu":
            return self.down(ops.silu_mul(gate, up))
        return self.down(ops.gelu_mul(gate, up, approximate="tanh" if self.activation == "gelu_tanh" else "none"))


class Layer(nn.Module):
    """Attention and a gated MLP, each added to the stream."""

    def __init__(self, spec: DenseSpec, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.attention = Attention(spec, index, dtype)
        self.mlp = MLP(spec, dtype)
        for name in _layer_norms(spec):
            self.add_module(name, Norm(spec, dtype, spec.hidden))

    def _normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, name)(x) if hasattr(self, name) else x

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.spec.residual_scale is None else x * self.spec.residual_scale

    def forward(
        self, h: torch.Tensor, positions: torch.Tensor, token_seqs: torch.Tensor, ropes: list[nn.Parameter]
    ) -> torch.Tensor:
        x = self._normed("attention_norm", h)
        attended = self._normed("attention_post_norm", self.attention(x, positions, token_seqs, ropes))
        if self.spec.parallel:
            return h + self._scaled(attended) + self._scaled(self.mlp(x))
        h = h + self._scaled(attended)
        return h + self._scaled(self._normed("mlp_post_norm", self.mlp(self._normed("mlp_norm", h))))


class DenseDecoder(nn.Module):
    """Token ids to logits. Build it on the meta device; weights are of `dtype`, rotary tables of float32."""

    def __init__(self, spec: DenseSpec, dtype: torch.dtype, max_seq_len: int) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Module()
        self.embed.weight = nn.Parameter(torch.empty(spec.vocab, spec.hidden, dtype=dtype))
        self.layers = nn.ModuleList(Layer(spec, index, dtype) for index in range(len(spec.layers)))
        self.norm = Norm(spec, dtype, spec.hidden)
        self.head = None if spec.tied else Linear(spec.hidden, spec.vocab, dtype)
        self.ropes = nn.ParameterList(
            nn.Parameter(torch.empty(max_seq_len, rope.rotary_dim), requires_grad=False) for rope in spec.ropes
        )
        self.embed_scale = spec.embed_scale
        if spec.embed_scale is not None and spec.embed_scale_rounded:
            self.embed_scale = torch.tensor(spec.embed_scale, dtype=dtype, device="cpu").item()

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, token_seqs: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """tokens, positions, token_seqs i32[T], logit_rows i32[L] -> logits f32[L, vocab]."""
        h = ops.embedding(tokens, self.embed.weight)
        if self.embed_scale is not None:
            h = h * self.embed_scale
        for layer in self.layers:
            h = layer(h, positions, token_seqs, list(self.ropes))
        x = self.norm(ops.select_rows(h, logit_rows))
        logits = ops.linear(x, self.embed.weight) if self.head is None else self.head(x)
        logits = ops.cast(logits, dtype=torch.float32)
        if self.spec.logit_scale is not None:
            logits = logits * self.spec.logit_scale
        return logits if self.spec.logit_soft_cap is None else ops.soft_cap(logits, cap=self.spec.logit_soft_cap)


def _layer_norms(spec: DenseSpec) -> dict[str, str]:
    """The norms of a layer: our names, and Hugging Face's."""
    if not spec.post_norm:
        names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        return {"attention_norm": "input_layernorm"} if spec.parallel else names
    attention, mlp = spec.post_norm_names or ("post_attention_layernorm", "post_feedforward_layernorm")
    behind = {"attention_post_norm": attention, "mlp_post_norm": mlp}
    second = "post_attention_layernorm" if spec.post_norm_names else "pre_feedforward_layernorm"
    in_front = {"attention_norm": "input_layernorm", "mlp_norm": second}
    return {**in_front, **behind} if spec.pre_norm else behind


def _qk_norm_shape(spec: DenseSpec, heads: int) -> tuple[int, ...]:
    if spec.qk_norm == "full":
        return (heads * spec.head_dim,)
    # A layer norm over heads has gains of its own for each head (Cohere), an RMS norm shares them (Qwen3, Gemma 3).
    return (heads, spec.head_dim) if spec.norm == "layer" else (spec.head_dim,)


# Our names of a layer's linears, and Hugging Face's.
_LINEAR_NAMES = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
# Tensors that some checkpoints carry and no dense decoder reads: derived tables, and the copy of a tied head.
IGNORED = (r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
IGNORED_WHEN_TIED = (*IGNORED, r"lm_head\.weight")


def weight_map(spec: DenseSpec, max_seq_len: int) -> dict[str, Recipe]:
    """The recipe of each parameter, from tensors in Hugging Face's names."""
    recipes = {
        "embed.weight": recipe.source("model.embed_tokens.weight"),
        "norm.weight": _norm_recipe(spec, "model.norm.weight"),
    }
    for index, rope in enumerate(spec.ropes):
        recipes[f"ropes.{index}"] = recipe.table(
            kind="rope",
            rope_type=rope.rope_type,
            positions=max_seq_len,
            theta=rope.theta,
            rotary_dim=rope.rotary_dim,
            **dict(rope.constants),
        )
    if not spec.tied:
        recipes["head.weight"] = recipe.source("lm_head.weight")
    for index in range(len(spec.layers)):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        for name, stored in _layer_norms(spec).items():
            recipes[f"{ours}.{name}.weight"] = _norm_recipe(spec, f"{theirs}.{stored}.weight")
        if spec.qk_norm is not None:
            for name in ("q_norm", "k_norm"):
                recipes[f"{ours}.attention.{name}.weight"] = _norm_recipe(spec, f"{theirs}.self_attn.{name}.weight")
        for name, stored in _LINEAR_NAMES.items():
            recipes[f"{ours}.{name}.weight"] = recipe.source(f"{theirs}.{stored}.weight")
            if _has_bias(spec, name):
                recipes[f"{ours}.{name}.bias"] = recipe.source(f"{theirs}.{stored}.bias")
        if spec.fused_weights:
            recipes.update(_fused_recipes(spec, ours, theirs))
    return recipes


def _norm_recipe(spec: DenseSpec, stored: str) -> Recipe:
    source = recipe.source(stored)
    if not spec.norm_offset:
        return source
    # In float32: 1 + w in bfloat16 would lose most of w.
    return recipe.affine(recipe.cast(source, torch.float32), 1.0, spec.norm_offset)


def _has_bias(spec: DenseSpec, linear: str) -> bool:
    if linear == "attention.o":
        return spec.o_bias
    return spec.qkv_bias if linear.startswith("attention.") else spec.mlp_bias


def _fused_recipes(spec: DenseSpec, ours: str, theirs: str) -> dict[str, Recipe]:
    """Parts of the tensors that Phi-3 stores merged, in the order in which they are stored."""
    q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    parts = {
        "self_attn.qkv_proj": {"attention.q": q_size, "attention.k": kv_size, "attention.v": kv_size},
        "mlp.gate_up_proj": {"mlp.gate": spec.ffn, "mlp.up": spec.ffn},
    }
    recipes = {}
    for stored, sizes in parts.items():
        source, begin = recipe.source(f"{theirs}.{stored}.weight"), 0
        for name, size in sizes.items():
            recipes[f"{ours}.{name}.weight"] = recipe.take_slice(source, 0, begin, begin + size)
            begin += size
    return recipes


# The axis along which tensor parallelism splits each parameter, by its last two names; what is not listed is whole on
# every rank. Embedding and head are split over the vocabulary.
TP_DIMS: Mapping[str, int] = {
    **{f"{name}.{part}": 0 for name in ("q", "k", "v", "gate", "up") for part in ("weight", "bias")},
    "o.weight": 1,
    "down.weight": 1,
    "head.weight": 0,
    "embed.weight": 0,
}


def split(spec: DenseSpec, name: str) -> Split | None:
    """How a mesh splits the parameter `name`: by `TP_DIMS`, and what stays together are the heads of q, k, v and o.

    Heads of k and v may be repeated, except where one norm goes over all of them. A vocabulary that does not divide is
    not split. Gains of one row for each head are split with the heads.
    """
    end = ".".join(name.split(".")[-2:])
    if end in ("q_norm.weight", "k_norm.weight"):
        by_head = spec.qk_norm == "head" and len(_qk_norm_shape(spec, spec.heads)) == 2
        return Split("tp", 0, repeat=end == "k_norm.weight") if by_head else None
    if end not in TP_DIMS:
        return None
    options: dict[str, Any] = {}
    match end.partition(".")[0]:
        case "q" | "o":
            options = {"unit": spec.head_dim}
        case "k" | "v":
            options = {"unit": spec.head_dim, "repeat": spec.qk_norm != "full"}
        case "embed" | "head":
            options = {"needed": False}
    return Split("tp", TP_DIMS[end], **options)


def expected_matches(spec: DenseSpec) -> dict[str, int]:
    """How often each pass must match: fewer is an error, for a silently inert pass is lost speed."""
    layers = len(spec.layers)
    merges = layers if spec.parallel and spec.qkv_bias == spec.mlp_bias else 2 * layers  # q, k, v and gate, up
    # Both norms in front follow an add, save the first layer's first, which follows the embedding. The final norm
    # follows the selection of rows.
    fusions = 2 * layers - 1 if spec.pre_norm and not spec.parallel and spec.norm == "rms" else 0
    return {
        "insert-paged-kv": layers,
        "insert-ending": 1,
        "merge-linears": merges,
        "fuse-add-rms-norm": fusions,
    }
