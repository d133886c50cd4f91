"""Read the config of Bloom: ALiBi, a norm of the embedding, and one tensor with q, k and v of each head in turn."""

from ingot.ir.errors import ConfigError
from ingot.models.blocks.alibi import AlibiSpec
from ingot.models.blocks.attention import AttentionNames, AttentionSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.feed_forward import PlainNames, PlainSpec
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.config import MAX_LAYERS, ConfigReader
from ingot.models.families.reading import read_head

# The first checkpoints hold the model without its head.
_NAMES = DecoderNames("transformer", "h", may_lack_place=True, unread=())
_PLAIN = PlainNames(up="dense_h_to_4h", down="dense_4h_to_h")


def bloom(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Bloom describes.

    With `apply_residual_connection_post_layernorm`, the result of attention or MLP is added to its normed input.
    """
    config.require("slow_but_exact", (False,), False)  # it sums parts of a linear, and omits its bias
    hidden = config.integer("n_embed", config.integer("hidden_size", 64))
    config.require("n_inner", (4 * hidden,), 4 * hidden)
    layers = config.integer("n_layer", config.integer("num_hidden_layers", 2, most=MAX_LAYERS), most=MAX_LAYERS)
    norm = NormSpec(config.number("layer_norm_epsilon", 1e-5), kind="layer", bias=True)
    branches = (
        BranchSpec("attention", _attention(config, hidden), norm.named("input_layernorm")),
        BranchSpec(
            "mlp",
            PlainSpec(4 * hidden, "gelu_tanh", bias=True, names=_PLAIN),
            norm.named("post_attention_layernorm"),
        ),
    )
    layer = LayerSpec(branches, onto_norm=config.flag("apply_residual_connection_post_layernorm", False))
    return DecoderSpec(
        vocab=config.integer("vocab_size", 250880),
        hidden=hidden,
        layers=(layer,) * layers,
        norm=norm.named("ln_f"),
        embedding=EmbeddingSpec(norm=norm.named("word_embeddings_layernorm"), stored="word_embeddings"),
        head=read_head(config, tied=True),
        names=_NAMES,
    )


def _attention(config: ConfigReader, hidden: int) -> AttentionSpec:
    heads = config.integer("n_head", config.integer("num_attention_heads", 8))
    if hidden % heads:
        raise ConfigError(f"hidden_size {hidden} over n_head {heads}", where=config.source, expected="a multiple")
    names = AttentionNames("self_attention", o="dense", merged="query_key_value", groups=heads)
    return AttentionSpec(
        heads, heads, hidden // heads, bias=True, o_bias=True, rotary=None, alibi=AlibiSpec(), names=names
    )
