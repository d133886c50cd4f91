"""Read the configs of GPT-NeoX, Pythia and models trained with their code.

q, k and v are one tensor, by heads, and a part of a head is rotated.
"""

from ingot.models.blocks.attention import AttentionNames, AttentionSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.feed_forward import PlainNames, PlainSpec
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.config import ConfigReader, RopeSpec
from ingot.models.families.reading import PLAIN, count_layers, read_head, read_norm, require_square_heads

# Older checkpoints hold the causal mask and the frequencies as tensors.
_NAMES = DecoderNames(
    "gpt_neox",
    may_lack_place=True,
    unread=(r"(gpt_neox\.)?layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
)


def gpt_neox(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of GPT-NeoX describes.

    Attention and MLP each have a norm. They run in parallel or in sequence.
    """
    head_dim, heads = require_square_heads(config), config.integer("num_attention_heads")
    bias = config.flag("attention_bias", True)
    names = AttentionNames("attention", o="dense", merged="query_key_value", groups=heads)
    attention = AttentionSpec(heads, heads, head_dim, bias=bias, o_bias=bias, names=names)
    activation = config.choice("hidden_act", PLAIN, "gelu")
    plain = PlainNames(up="dense_h_to_4h", down="dense_4h_to_h")
    mlp = PlainSpec(config.integer("intermediate_size"), activation, bias=True, names=plain)
    norm = read_norm(config, 1e-5, "layer_norm_eps", kind="layer", bias=True)
    branches = (
        BranchSpec("attention", attention, norm.named("input_layernorm")),
        BranchSpec("mlp", mlp, norm.named("post_attention_layernorm")),
    )
    layer = LayerSpec(branches, parallel=config.flag("use_parallel_residual", True))
    return DecoderSpec(
        vocab=config.integer("vocab_size"),
        hidden=config.integer("hidden_size"),
        layers=(layer,) * count_layers(config),
        norm=norm.named("final_layer_norm"),
        ropes=(_rope(config, head_dim),),
        embedding=EmbeddingSpec(stored="embed_in"),
        head=read_head(config, stored="embed_out"),
        names=_NAMES,
    )


def _rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """Return the rotary embedding. The base is the field `rotary_emb_base`.

    The rotated share of a head is the field `rotary_pct`.
    """
    beside = {
        "rope_theta": config.number("rotary_emb_base", 10000.0),
        "partial_rotary_factor": config.number("rotary_pct", 0.25),
    }
    return config.within({**config.fields, **beside}).rope(head_dim)
