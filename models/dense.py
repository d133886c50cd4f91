"""The dense decoder: one definition with flags for all Llama-like models."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ingot.ir import ops, recipe
from ingot.ir.recipe import Recipe
from ingot.ir.types import Split
from ingot.models.config import RopeSpec
from ingot.models.matches import Block
from ingot.models.params import Place, parameter


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


class Linear(Block):
    def __init__(self, place: Place, inputs: int, outputs: int, bias: bool = False, split: Split | None = None) -> None:
        super().__init__()
        self.weight = parameter((outputs, inputs), place.source("weight"), place.dtype, split)
        along_outputs = split if split is not None and split.dim == 0 else None
        self.bias = parameter((outputs,), place.source("bias"), place.dtype, along_outputs) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


def merges(*linears: Linear) -> int:
    """How many linears are left of those that read one value, beyond those that stay alone."""
    alike = Counter(linear.bias is None for linear in linears)
    return sum(count > 1 for count in alike.values())


class Norm(Block):
    def __init__(self, spec: DenseSpec, place: Place, *shape: int, split: Split | None = None) -> None:
        super().__init__()
        wide = spec.norm_wide or spec.norm_offset
        self.weight = parameter(shape, _gains(spec, place), torch.float32 if wide else place.dtype, split)
        self.op = ops.layer_norm if spec.norm == "layer" else ops.rms_norm
        self.eps = spec.norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x, self.weight, eps=self.eps)


def _gains(spec: DenseSpec, place: Place) -> Recipe:
    stored = place.source("weight")
    if not spec.norm_offset:
        return stored
    # In float32: 1 + w in bfloat16 would lose most of w.
    return recipe.affine(recipe.cast(stored, torch.float32), 1.0, spec.norm_offset)


class Attention(Block):
    """Heads of k and v may be repeated on a mesh, except where one norm goes over all of them."""

    def __init__(self, spec: DenseSpec, place: Place, index: int) -> None:
        super().__init__()
        self.spec, self.layer, self.index = spec, spec.layers[index], index
        sizes = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim
        of_q = Split("tp", 0, unit=spec.head_dim)
        of_kv = replace(of_q, repeat=spec.qk_norm != "full")
        stored = (place / "qkv_proj").split(*sizes) if spec.fused_weights else [place / f"{one}_proj" for one in "qkv"]
        self.q = Linear(stored[0], spec.hidden, sizes[0], spec.qkv_bias, of_q)
        self.k = Linear(stored[1], spec.hidden, sizes[1], spec.qkv_bias, of_kv)
        self.v = Linear(stored[2], spec.hidden, sizes[2], spec.qkv_bias, of_kv)
        self.o = Linear(place / "o_proj", sizes[0], spec.hidden, spec.o_bias, replace(of_q, dim=1))
        if spec.qk_norm is not None:
            self.q_norm = self._norm(place / "q_norm", spec.heads, repeat=False)
            self.k_norm = self._norm(place / "k_norm", spec.kv_heads, repeat=True)

    def _norm(self, place: Place, heads: int, *, repeat: bool) -> Norm:
        spec = self.spec
        if spec.qk_norm == "full":
            return Norm(spec, place, heads * spec.head_dim)
        if spec.norm == "layer":  # with gains of its own for each head (Cohere); RMS norms share them (Qwen3, Gemma 3)
            return Norm(spec, place, heads, spec.head_dim, split=Split("tp", 0, repeat=repeat))
        return Norm(spec, place, spec.head_dim)

    def matches(self) -> dict[str, int]:
        return {"insert-paged-kv": 1, "merge-linears": merges(self.q, self.k, self.v)}

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


class MLP(Block):
    def __init__(self, spec: DenseSpec, place: Place) -> None:
        super().__init__()
        self.activation = spec.activation
        gate, up = _gate_and_up(spec, place)
        self.gate = Linear(gate, spec.hidden, spec.ffn, spec.mlp_bias, Split("tp", 0))
        self.up = Linear(up, spec.hidden, spec.ffn, spec.mlp_bias, Split("tp", 0))
        self.down = Linear(place / "down_proj", spec.ffn, spec.hidden, spec.mlp_bias, Split("tp", 1))

    def matches(self) -> dict[str, int]:
        return {"merge-linears": merges(self.gate, self.up)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate(x), self.up(x)
        if self.activation == "silu":
            return self.down(ops.silu_mul(gate, up))
        return self.down(ops.gelu_mul(gate, up, approximate="tanh" if self.activation == "gelu_tanh" else "none"))


def _gate_and_up(spec: DenseSpec, place: Place) -> Sequence[Place]:
    if spec.fused_weights:
        return (place / "gate_up_proj").split(spec.ffn, spec.ffn)
    return place / "gate_proj", place / "up_proj"


class Layer(Block):
    """Attention and a gated MLP, each added to the stream."""

    def __init__(self, spec: DenseSpec, place: Place, index: int) -> None:
        super().__init__()
        self.spec = spec
        self.attention = Attention(spec, place / "self_attn", index)
        self.mlp = MLP(spec, place / "mlp")
        for name, stored in _layer_norms(spec).items():
            self.add_module(name, Norm(spec, place / stored, spec.hidden))

    @property
    def begins_with_rms_norm(self) -> bool:
        return self.spec.pre_norm and self.spec.norm == "rms"

    def matches(self) -> dict[str, int]:
        """Of the norms the one that follows the first sum; in a parallel layer both parts read one value."""
        if not self.spec.parallel:
            return {"fuse-add-rms-norm": int(self.begins_with_rms_norm)}
        attention, mlp = self.attention, self.mlp
        apart = (attention.q, attention.k, attention.v), (mlp.gate, mlp.up)
        return {"merge-linears": merges(*apart[0], *apart[1]) - sum(merges(*linears) for linears in apart)}

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


class DenseDecoder(Block):
    """Token ids to logits. Build it on the meta device; weights are of `dtype`, rotary tables of float32."""

    def __init__(self, spec: DenseSpec, dtype: torch.dtype, max_seq_len: int) -> None:
        super().__init__()
        self.spec = spec
        model, of_vocab = Place("model", dtype), Split("tp", 0, needed=False)
        self.embed = nn.Module()
        embeddings = (model / "embed_tokens").source("weight")
        self.embed.weight = parameter((spec.vocab, spec.hidden), embeddings, dtype, of_vocab)
        self.layers = nn.ModuleList(Layer(spec, model / "layers" / index, index) for index in range(len(spec.layers)))
        self.norm = Norm(spec, model / "norm", spec.hidden)
        self.head = None if spec.tied else Linear(Place("lm_head", dtype), spec.hidden, spec.vocab, split=of_vocab)
        self.ropes = nn.ParameterList(rope_table(rope, max_seq_len) for rope in spec.ropes)
        self.embed_scale = spec.embed_scale
        if spec.embed_scale is not None and spec.embed_scale_rounded:
            self.embed_scale = torch.tensor(spec.embed_scale, dtype=dtype, device="cpu").item()

    def matches(self) -> dict[str, int]:
        """A norm in front of a layer follows the sum at the end of the layer before."""
        return {"fuse-add-rms-norm": sum(layer.begins_with_rms_norm for layer in list(self.layers)[1:])}

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


def rope_table(rope: RopeSpec, max_seq_len: int) -> nn.Parameter:
    """The rotary table f32[max_seq_len, rotary_dim]."""
    made = recipe.table(
        kind="rope",
        rope_type=rope.rope_type,
        positions=max_seq_len,
        theta=rope.theta,
        rotary_dim=rope.rotary_dim,
        **dict(rope.constants),
    )
    return parameter((max_seq_len, rope.rotary_dim), made, torch.float32)


# Tensors that some checkpoints carry and no dense decoder reads: derived tables, and the copy of a tied head.
IGNORED = (r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
IGNORED_WHEN_TIED = (*IGNORED, r"lm_head\.weight")
