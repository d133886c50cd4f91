"""Transformers' model of a config.json, or a family's oracle, as the reference of parity tests."""

from collections.abc import Mapping
from typing import Any

import torch
from families import FAMILIES

# Plain torch, which takes sizes that are no multiple of 16 bytes.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def hf_model(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
) -> torch.nn.Module:
    """The model with the weights `tensors`, in `dtype`. The tables of `rope` are those for `max_seq_len`."""
    family = FAMILIES.get(config["model_type"])
    if family is not None and family.oracle is not None:
        return family.oracle(config, tensors, dtype, max_seq_len).eval()
    import transformers
    from transformers.initialization import no_init_weights

    kind = class_of(config)
    config_class = type(transformers.AutoConfig.for_model(config["model_type"]))
    with no_init_weights():  # they are all replaced
        model = kind._from_config(config_class.from_dict(dict(config)), dtype=dtype, **EAGER)
    renamed = family.renamed if family is not None else {}
    known = {".".join(renamed.get(part, part) for part in name.split(".")): one for name, one in tensors.items()}
    if family is not None and family.restored is not None:
        known = family.restored(config, known)
    missing, unexpected = model.eval().load_state_dict(known, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(missing) <= tied and not unexpected, f"missing {missing}, unexpected {unexpected}"
    model.tie_weights()
    fix_rotary_table(model, max_seq_len)
    return model


def class_of(config: Mapping[str, Any]) -> Any:
    """Transformers' class for a config.json. Checkpoints that came with code of their own may have that code's name of
    it."""
    import transformers

    config_class = type(transformers.AutoConfig.for_model(config["model_type"]))
    named = getattr(transformers, config["architectures"][0], None)  # not every such class is in the mapping
    return named or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]


def fix_rotary_table(model: Any, max_seq_len: int) -> None:
    """Ingot chooses a table once, for the context it compiles for; transformers chooses at every step. Here it gets the
    table that its own functions give for that context, and keeps it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary = getattr(model.base_model, "rotary_emb", None)  # none in a model with learned positions
    if getattr(rotary, "rope_type", None) in ("dynamic", "longrope"):
        rotary.inv_freq, rotary.attention_scaling = ROPE_INIT_FUNCTIONS[rotary.rope_type](
            model.config, seq_len=max_seq_len
        )
        rotary.rope_type = "default"
