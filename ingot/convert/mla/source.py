"""The attention of a model that is converted, and what a conversion to latent attention cannot keep."""

from dataclasses import dataclass, replace

from ingot.ir.errors import ConversionError
from ingot.ir.program import ModelSpec
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.latent_attention import LatentAttentionSpec
from ingot.models.blocks.normed_latent_attention import NormedLatentAttentionSpec

# The architecture that a converted model gets. Linears of q, k and v with biases and without are one architecture.
FOLDED, NORMED = "LlamaMLAForCausalLM", "Qwen3MLAForCausalLM"
TARGETS = {
    "LlamaForCausalLM": FOLDED,
    "MistralForCausalLM": FOLDED,
    "Qwen2ForCausalLM": FOLDED,
    "Qwen3ForCausalLM": NORMED,
}
# Types whose frequencies are each a function of one frequency of the plain embedding. So a table of every n-th pair is
# the table of fewer elements. YaRN and LongRoPE also scale rotated elements, and those that are no longer rotated
# would need it too; dynamic scaling changes the base with the number of elements.
_ROPES = ("default", "linear", "llama3")
_FIELDS = {
    "q_latent": "queries that are made of a latent",
    "alibi": "ALiBi: its slopes are of positions, and not of keys",
    "clip": "a limit on q, k and v, which comes before any rotation",
    "window": "a window: converted layers see all tokens",
    "chunk": "chunks: converted layers see all tokens",
    "q_scale": "queries that are scaled by their positions",
    "soft_cap": "capped scores",
    "v_norm": "norms of values",
    "v_scale": "a factor on values",
}


@dataclass(frozen=True)
class Heads:
    """The sizes of the attention that is converted, equal in all layers.

    - `spec`: the attention
    - `target`: the architecture of the converted model
    """

    spec: AttentionSpec
    target: str

    @property
    def width(self) -> int:
        """The number of elements of a head."""
        return self.spec.head_dim

    @property
    def keys(self) -> int:
        """The number of elements of the keys of all heads; values have as many."""
        return self.spec.kv_heads * self.spec.head_dim

    @property
    def scale(self) -> float:
        return self.width**-0.5 if self.spec.scale is None else self.spec.scale


def read_heads(spec: ModelSpec, where: str) -> Heads:
    """Return the attention of a model. Raises ConversionError, with the reason, if it cannot become latent attention.

    `where` names the checkpoint in errors.
    """

    def refuse(what: str, expected: str = "", hint: str = "") -> ConversionError:
        return ConversionError(f"{spec.architecture} has {what}", where=where, expected=expected, hint=hint)

    dims = spec.dims
    if not isinstance(dims, DecoderSpec):
        raise refuse("several residual streams", "one residual stream")
    attentions = [layer.branches[0].block if layer.branches else None for layer in dims.layers]
    for layer, block in enumerate(attentions):
        if isinstance(block, LatentAttentionSpec | NormedLatentAttentionSpec):
            raise refuse("latent attention already", "grouped-query attention")
        if not isinstance(block, AttentionSpec):
            raise refuse(f"no attention of its own in layer {layer}", "an attention in each layer")
        if problem := _problem(block, dims):
            raise refuse(problem)
        if block != attentions[0]:
            raise refuse(f"another attention in layer {layer} than in layer 0", "equal attentions in all layers")
    first = attentions[0]
    assert isinstance(first, AttentionSpec)
    if spec.architecture not in TARGETS:
        raise refuse("no converted architecture", ", ".join(TARGETS))
    if first.o_bias and TARGETS[spec.architecture] == FOLDED:
        raise refuse("a bias in the output linear of attention", f"none: {FOLDED} has none")
    return Heads(first, TARGETS[spec.architecture])


def with_attention_of(dims: DecoderSpec, other: DecoderSpec) -> DecoderSpec:
    """Return the decoder with the attentions and rotary tables of another decoder that has as many layers."""
    layers = [
        replace(layer, branches=(replace(layer.branches[0], block=given.branches[0].block), *layer.branches[1:]))
        for layer, given in zip(dims.layers, other.layers, strict=True)
    ]
    return replace(dims, layers=tuple(layers), ropes=other.ropes)


def _problem(one: AttentionSpec, dims: DecoderSpec) -> str:
    """Return what a conversion of an attention would not keep; "" if it keeps all."""
    if one.sinks:
        return "attention sinks, which latent attention has not"
    for field, what in _FIELDS.items():
        if getattr(one, field) is not None:
            return what
    if one.rotary is None:
        return "a layer without a rotary embedding"
    rope = dims.ropes[one.rotary.table]
    if rope.rope_type not in _ROPES:
        return (
            f"the rotary type {rope.rope_type}, which scales more than single frequencies ({', '.join(_ROPES)} do not)"
        )
    if rope.rotary_dim != one.head_dim:
        return f"a rotary embedding of {rope.rotary_dim} of {one.head_dim} elements of a head"
    if one.value_width != one.head_dim:
        return f"values of {one.value_width} elements and keys of {one.head_dim}"
    if one.qk_norm is not None and (one.qk_norm.over != "head" or one.qk_norm.after_rotation):
        return "norms of q and k that are not one norm for each head before the rotation"
    if one.names.merged is not None or one.names.merged_kv is not None:
        return "q, k and v in one stored tensor"
    return ""
