"""Read the config of InternLM 2: Llama with other names, and q, k and v in one tensor, by groups of heads."""

from ingot.models.blocks.attention import AttentionNames
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.feed_forward import GatedNames
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    count_layers,
    read_attention,
    read_decoder,
    read_gated,
    read_head,
    read_norm,
    read_rope,
    require_square_heads,
)

_NAMES = DecoderNames(unread=(r"model\.layers\.\d+\.attention\.rotary_emb\.inv_freq",))
_MLP = GatedNames("feed_forward", gate="w1", up="w3", down="w2")


def internlm2(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of InternLM 2 describes.

    If `bias` is missing, the linears of attention have biases, as in the published config class.
    """
    require_square_heads(config)
    heads, bias = config.integer("num_attention_heads"), config.flag("bias", True)
    kv_heads = config.integer("num_key_value_heads", heads)
    names = AttentionNames("attention", o="wo", merged="wqkv", groups=kv_heads)
    attention = read_attention(config, bias=bias, o_bias=bias, names=names)
    norm = read_norm(config)
    branches = (
        BranchSpec("attention", attention, norm.named("attention_norm")),
        BranchSpec("mlp", read_gated(config, names=_MLP), norm.named("ffn_norm")),
    )
    return read_decoder(
        config,
        [LayerSpec(branches)] * count_layers(config),
        norm,
        read_rope(config, attention.head_dim),
        head=read_head(config, stored="output"),
        embedding=EmbeddingSpec(stored="tok_embeddings"),
        names=_NAMES,
    )
