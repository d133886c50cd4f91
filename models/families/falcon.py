"""Read the configs of Falcon: old and new architecture, and the first field names (RefinedWeb).

q, k and v are one tensor, by groups of heads.
"""

from dataclasses import replace

from ingot.ir.errors import ConfigError
from ingot.models.blocks.alibi import AlibiSpec
from ingot.models.blocks.attention import AttentionNames, AttentionSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.feed_forward import PlainNames, PlainSpec
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.config import MAX_LAYERS, ConfigReader, RopeSpec
from ingot.models.families.reading import PLAIN, count_layers, read_head, read_norm, require_square_heads

_NAMES = DecoderNames("transformer", "h", may_lack_place=True, unread=())


def falcon(config: ConfigReader) -> DecoderSpec:
    if config.fields.get("n_embed") is not None:  # an older name, which has precedence in transformers
        config = config.within({**config.fields, "hidden_size": config.integer("n_embed")})
    hidden, head_dim = config.integer("hidden_size"), require_square_heads(config)
    layer = _layer(config, hidden, head_dim)
    norm = read_norm(config, 1e-5, "layer_norm_epsilon", kind="layer", bias=True)
    return DecoderSpec(
        vocab=config.integer("vocab_size"),
        hidden=hidden,
        layers=(layer,) * count_layers(config),
        norm=norm.named("ln_f"),
        ropes=() if config.flag("alibi", False) else (_rope(config, head_dim),),
        embedding=EmbeddingSpec(stored="word_embeddings"),
        head=read_head(config, tied=True),
        names=_NAMES,
    )


def refined_web(config: ConfigReader) -> DecoderSpec:
    """Return the spec that an early config.json of Falcon describes, with the field names of modelling_RW.py.

    Falcon 40B has the field `n_head_kv` and the new decoder architecture. Falcon 7B has the old one.
    """
    if "n_head" not in config.fields:  # the fields were renamed, the architecture was not
        return falcon(config)
    config.require("apply_residual_connection_post_layernorm", (False,), False)
    kv_heads = config.integer_or_none("n_head_kv")
    named = {
        "num_attention_heads": config.integer("n_head"),
        "num_hidden_layers": config.integer("n_layer", most=MAX_LAYERS),
    }
    if kv_heads is not None:
        named |= {"num_kv_heads": kv_heads, "new_decoder_architecture": True, "parallel_attn": True}
    defaults = {"multi_query": False, "parallel_attn": False}
    return falcon(config.within({**defaults, **config.fields, **named}))


def _layer(config: ConfigReader, hidden: int, head_dim: int) -> LayerSpec:
    """Return a Falcon layer: attention, and a plain MLP, in parallel or in sequence.

    In parallel, they share one norm, or each has a norm. The new decoder architecture is always parallel.
    """
    new, bias = config.flag("new_decoder_architecture", False), config.flag("bias", False)
    attention = _attention(config, head_dim, new=new, bias=bias)
    activation, plain = config.choice("activation", PLAIN, "gelu"), PlainNames(up="dense_h_to_4h", down="dense_4h_to_h")
    mlp = PlainSpec(config.integer("ffn_hidden_size", 4 * hidden), activation, bias=bias, names=plain)
    norm = read_norm(config, 1e-5, "layer_norm_epsilon", kind="layer", bias=True)
    parallel = config.flag("parallel_attn", True)
    if new:
        config.require("parallel_attn", (True,), True)
    config.require("num_ln_in_parallel_attn", (1, 2) if new else (1,), 2 if new else 1)
    names: tuple[str, str | None] = ("input_layernorm", None if parallel else "post_attention_layernorm")
    if new and config.integer("num_ln_in_parallel_attn", 2) == 2:
        names = ("ln_attn", "ln_mlp")
    first, second = names
    branches = (
        BranchSpec("attention", attention, norm.named(first)),
        BranchSpec("mlp", mlp, norm.named(second) if second else None),  # no norm: reads attention's input
    )
    return LayerSpec(branches, parallel=parallel)


def _attention(config: ConfigReader, head_dim: int, *, new: bool, bias: bool) -> AttentionSpec:
    heads, kv_heads = config.integer("num_attention_heads"), _count_kv_heads(config, new=new)
    names = AttentionNames("self_attention", o="dense", merged="query_key_value", groups=kv_heads)
    attention = AttentionSpec(heads, kv_heads, head_dim, bias=bias, o_bias=bias, names=names)
    if not config.flag("alibi", False):
        return attention
    # Falcon adds ALiBi before scaling the scores. Transformers first rounds it to bfloat16; vLLM and Ingot do not.
    return replace(attention, rotary=None, alibi=AlibiSpec(factor=head_dim**-0.5))


def _rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    rope = config.rope(head_dim)
    if rope.rotary_dim != head_dim:
        raise ConfigError(
            f"partial_rotary_factor rotates {rope.rotary_dim} elements of {head_dim}",
            where=config.source,
            expected="all of them: Falcon's code rotates whole heads",
        )
    return rope


def _count_kv_heads(config: ConfigReader, *, new: bool) -> int:
    """Return the number of k/v heads. `new` says whether the model has the new decoder architecture.

    In the old one, it is 1 or the number of q heads.
    """
    heads = config.integer("num_attention_heads")
    if not new and config.flag("multi_query", True):
        return 1
    kv_heads = config.integer("num_kv_heads", heads)
    if heads % kv_heads or (kv_heads != heads and not new):
        raise config.error("num_kv_heads", f"a divisor of {heads} attention heads" if new else f"{heads}, one per head")
    return kv_heads
