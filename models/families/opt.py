"""Read the config of OPT: learned positions after two rows of padding, and plain feed-forward parts.

Layer norms come before blocks, or after their results are added. Token tables may be narrower than the hidden size.
"""

from ingot.ir.errors import ConfigError
from ingot.models.blocks.attention import AttentionNames, AttentionSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.feed_forward import PlainNames, PlainSpec
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.blocks.learned_positions import LearnedPositionsSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.blocks.projection import ProjectionSpec
from ingot.models.config import MAX_LAYERS, ConfigReader
from ingot.models.families.reading import PLAIN, read_head

# The first checkpoints hold the model without its head.
_NAMES = DecoderNames("model.decoder", may_lack_place=True, unread=())
# Transformers, modeling_opt.py: rows of the position table that tokens of an unpadded prompt never use.
_OFFSET = 2
_EPS = 1e-5  # of nn.LayerNorm; no field sets it


def opt(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of OPT describes.

    If norms come after the residual addition, as in OPT-350m, there is no norm before the head.
    """
    hidden, bias = config.integer("hidden_size", 768), config.flag("enable_bias", True)
    affine, before = config.flag("layer_norm_elementwise_affine", True), config.flag("do_layer_norm_before", True)
    norm = NormSpec(_EPS, kind="layer", gains=affine, bias=affine)
    mlp = PlainSpec(
        config.integer("ffn_dim", 3072),
        config.choice("activation_function", PLAIN, "relu"),
        bias=bias,
        names=PlainNames("", up="fc1", down="fc2"),
    )
    layer = _layer(_attention(config, hidden, bias), mlp, norm, before)
    width = config.integer("word_embed_proj_dim", hidden)
    into, out = (
        None if width == hidden else ProjectionSpec(width, name)
        for name in ("project_in", f"{_NAMES.place}.project_out")
    )
    positions = config.integer("max_position_embeddings", 2048)
    last = not config.flag("_remove_final_layer_norm", False) and before
    return DecoderSpec(
        vocab=config.integer("vocab_size", 50272),
        hidden=hidden,
        layers=(layer,) * config.integer("num_hidden_layers", 12, most=MAX_LAYERS),
        norm=norm.named("final_layer_norm") if last else None,
        embedding=LearnedPositionsSpec(positions, "embed_tokens", "embed_positions", _OFFSET, into),
        head=read_head(config, tied=True, projection=out),
        names=_NAMES,
    )


def _attention(config: ConfigReader, hidden: int, bias: bool) -> AttentionSpec:
    heads = config.integer("num_attention_heads", 12)
    if hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} over num_attention_heads {heads}", where=config.source, expected="a multiple"
        )
    names = AttentionNames(o="out_proj")
    return AttentionSpec(heads, heads, hidden // heads, bias=bias, o_bias=bias, rotary=None, names=names)


def _layer(attention: AttentionSpec, mlp: PlainSpec, norm: NormSpec, before: bool) -> LayerSpec:
    """Return an OPT layer. `norm` is the spec of its two norms.

    If `before`, norms come before attention and MLP. If not, they come after the residual additions.
    """
    at = "norm" if before else "stream_norm"
    branches = (
        BranchSpec("attention", attention, **{at: norm.named("self_attn_layer_norm")}),
        BranchSpec("mlp", mlp, **{at: norm.named("final_layer_norm")}),
    )
    return LayerSpec(branches)
