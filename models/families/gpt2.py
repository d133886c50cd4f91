"""Read the config of GPT-2: learned positions, layer norms with biases, plain MLPs, matrices stored transposed."""

from dataclasses import replace

from ingot.ir.errors import ConfigError
from ingot.models.blocks.attention import AttentionNames, AttentionSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.feed_forward import PlainNames, PlainSpec
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.blocks.learned_positions import LearnedPositionsSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.config import MAX_LAYERS, ConfigReader
from ingot.models.families.reading import PLAIN, read_head

# The first checkpoints hold the model without its head, and the causal mask as tensors.
_NAMES = DecoderNames(
    "transformer",
    "h",
    transposed=True,
    may_lack_place=True,
    unread=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
)


def gpt2(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of GPT-2 describes.

    With `scale_attn_by_inverse_layer_idx`, attention scores of layer i, from 0, are divided by i + 1.
    """
    config.require("add_cross_attention", (False,), False)
    hidden, layers = config.integer("n_embd", 768), config.integer("n_layer", 12, most=MAX_LAYERS)
    attention = _attention(config, hidden)
    width = config.integer("n_inner", 4 * hidden)
    activation = config.choice("activation_function", PLAIN, "gelu_new")
    mlp = PlainSpec(width, activation, bias=True, names=PlainNames(up="c_fc", down="c_proj"))
    norm = NormSpec(config.number("layer_norm_epsilon", 1e-5), kind="layer", bias=True)
    attentions = [attention] * layers
    if config.flag("scale_attn_by_inverse_layer_idx", False):
        scale = attention.scale or attention.head_dim**-0.5
        attentions = [replace(attention, scale=scale / (index + 1)) for index in range(layers)]
    return DecoderSpec(
        vocab=config.integer("vocab_size", 50257),
        hidden=hidden,
        layers=tuple(_layer(one, mlp, norm) for one in attentions),
        norm=norm.named("ln_f"),
        embedding=LearnedPositionsSpec(config.integer("n_positions", 1024), "wte", "wpe"),
        head=read_head(config, tied=True),
        names=_NAMES,
    )


def _attention(config: ConfigReader, hidden: int) -> AttentionSpec:
    heads = config.integer("n_head", 12)
    if hidden % heads:
        raise ConfigError(f"n_embd {hidden} over n_head {heads}", where=config.source, expected="a multiple")
    scale = None if config.flag("scale_attn_weights", True) else 1.0
    names = AttentionNames("attn", o="c_proj", merged="c_attn")
    return AttentionSpec(heads, heads, hidden // heads, bias=True, o_bias=True, rotary=None, scale=scale, names=names)


def _layer(attention: AttentionSpec, mlp: PlainSpec, norm: NormSpec) -> LayerSpec:
    branches = (
        BranchSpec("attention", attention, norm.named("ln_1")),
        BranchSpec("mlp", mlp, norm.named("ln_2")),
    )
    return LayerSpec(branches)
