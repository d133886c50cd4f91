"""Read the configs of GPT-J and CodeGen: attention and a plain feed-forward part in parallel after one layer norm.

The first elements of a head are rotated in adjacent pairs.
"""

from ingot.ir.errors import ConfigError
from ingot.models.blocks.attention import AttentionNames, AttentionSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.feed_forward import PlainNames, PlainSpec
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.blocks.positions import RotarySpec
from ingot.models.config import MAX_LAYERS, ConfigReader, RopeSpec
from ingot.models.families.reading import PLAIN, read_head, read_norm

# Older checkpoints hold the causal mask and the position tables as tensors.
_NAMES = DecoderNames(
    "transformer",
    "h",
    may_lack_place=True,
    unread=(r"(transformer\.)?h\.\d+\.attn\.((masked_)?bias|causal_mask|embed_positions)",),
)
_BLOCKS = 4  # row blocks of CodeGen's merged tensor, one per training core (transformers, modeling_codegen.py)


def gptj(config: ConfigReader) -> DecoderSpec:
    return _decoder(config, AttentionNames("attn", o="out_proj"))


def codegen(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of CodeGen describes: GPT-J with q, k and v in one tensor.

    The rows of this tensor are in four groups. Each group holds q, then v, then k of a quarter of the heads.
    """
    if config.integer("n_head", 16) % _BLOCKS:
        raise config.error("n_head", f"a multiple of {_BLOCKS}")
    return _decoder(config, AttentionNames("attn", o="out_proj", merged="qkv_proj", order="qvk", groups=_BLOCKS))


def _decoder(config: ConfigReader, names: AttentionNames) -> DecoderSpec:
    hidden, heads = config.integer("n_embd", 4096), config.integer("n_head", 16)
    if hidden % heads:
        raise ConfigError(f"n_embd {hidden} over n_head {heads}", where=config.source, expected="a multiple")
    config.require("rotary", (True,), True)  # in GPT-J's first configuration; transformers always rotates
    rotary = RotarySpec(interleaved=True)
    attention = AttentionSpec(heads, heads, hidden // heads, rotary=rotary, names=names)
    activation = config.choice("activation_function", PLAIN, "gelu_new")
    width, plain = config.integer("n_inner", 4 * hidden), PlainNames(up="fc_in", down="fc_out")
    norm = read_norm(config, 1e-5, "layer_norm_epsilon", kind="layer", bias=True)
    branches = (
        BranchSpec("attention", attention, norm.named("ln_1")),
        BranchSpec("mlp", PlainSpec(width, activation, bias=True, names=plain)),  # it reads attention's input
    )
    return DecoderSpec(
        vocab=config.integer("vocab_size", 50400),
        hidden=hidden,
        layers=(LayerSpec(branches, parallel=True),) * config.integer("n_layer", 28, most=MAX_LAYERS),
        norm=norm.named("ln_f"),
        ropes=(_rope(config, hidden // heads),),
        embedding=EmbeddingSpec(stored="wte"),
        head=read_head(config, bias=True),
        names=_NAMES,
    )


def _rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """Return the rotary embedding of GPT-J, with a base of 10000.

    Raises ConfigError if `rotary_dim` is null, odd or larger than a head.
    """
    given = config.integer("rotary_dim", 64)
    # Null is an error: transformers then builds a table that fits no head.
    if ("rotary_dim" in config.fields and config.fields["rotary_dim"] is None) or given % 2 or given > head_dim:
        raise config.error("rotary_dim", f"an even number, at most {head_dim}, the size of a head")
    return RopeSpec("default", 10000.0, given)
