"""Reading a config.json: both spellings, the context that scaling gives, defaults, and errors that name the field."""

import re
from dataclasses import replace
from typing import Any

import pytest
from families import FAMILIES
from tiny import TINY
from tiny_checkpoint import MAX_SEQ_LEN, Tiny

from ingot.ir.errors import ConfigError
from ingot.models.architectures import ARCHITECTURES, read_spec
from ingot.models.config import MAX_SIZE

OF_ARCHITECTURE = {tiny.config["architectures"][0]: tiny for tiny in reversed(TINY.values())}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}


def _config(name: str, **changes: Any) -> dict[str, Any]:
    """A tiny checkpoint's config.json with some fields changed, or taken away where they are `...`."""
    return {key: value for key, value in {**TINY[name].config, **changes}.items() if value is not ...}


def _other_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` for `rope_theta` and `rope_scaling`, or the other way round; `dtype` for `torch_dtype`."""
    config = dict(config)
    if "torch_dtype" in config:
        config["dtype"] = config.pop("torch_dtype")
    if "rope_parameters" in config:
        table = dict(config.pop("rope_parameters"))
        return {**config, "rope_theta": table.pop("rope_theta"), "rope_scaling": table}
    table = config.pop("rope_scaling", {"rope_type": "default"})
    return {**config, "rope_parameters": {"rope_theta": config.pop("rope_theta"), **table}}


ONE_TABLE = [
    name
    for name, tiny in TINY.items()
    if not name.startswith(("gemma3", "mimo_v2", "olmo3")) and {"rope_theta", "rope_parameters"} & tiny.config.keys()
]


@pytest.mark.parametrize("name", ONE_TABLE)
def test_both_spellings_read_the_same(name: str) -> None:
    config = _config(name)
    assert read_spec(_other_spelling(config)) == read_spec(config)


def test_gemma3_spellings_of_two_tables_read_the_same() -> None:
    tables = {
        "full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 2003.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 101.0},
    }
    changes = {"rope_theta": ..., "rope_local_base_freq": ..., "rope_scaling": ..., "rope_parameters": tables}
    layers = {
        "sliding_window_pattern": ...,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    assert read_spec(_config("gemma3_text-old", **changes, **layers)) == read_spec(_config("gemma3_text-old"))


def test_olmo3_scales_only_layers_without_a_window() -> None:
    old = read_spec(_config("olmo3-window", rope_parameters=..., rope_theta=5e5, rope_scaling=YARN)).dims
    assert [rope.rope_type for rope in old.ropes] == ["yarn", "default"]
    assert [rope.theta for rope in old.ropes] == [5e5, 5e5]


def test_a_base_without_a_table_is_no_table() -> None:
    """Transformers takes CWM's default table as a whole, with its own base."""
    assert read_spec(_config("cwm-window", rope_scaling=...)).dims.ropes[0].theta == 1e6


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, MAX_SEQ_LEN),
        ({"rope_type": "linear", "factor": 2.5}, 400),
        ({"rope_type": "dynamic", "factor": 3.0}, 480),
        (YARN, 160),
        ({**YARN, "factor": 6.5}, 260),
        (TINY["llama-scaled"].config["rope_scaling"], MAX_SEQ_LEN),
        ({"type": "su", "short_factor": [1.0] * 7, "long_factor": [2.0] * 7, "factor": 3.0}, MAX_SEQ_LEN),
    ],
    ids=lambda value: (value.get("rope_type") or "su") if isinstance(value, dict) else str(value),
)
def test_the_longest_context_counts_scaling_as_vllm_does(rope: dict[str, Any], expected: int) -> None:
    assert read_spec(_config("llama-plain", rope_parameters=..., rope_scaling=rope)).max_position == expected


@pytest.mark.parametrize("name", ["gemma3_text-old", "gemma3n_text-plain"])
def test_gemma3_gives_the_context_after_scaling(name: str) -> None:
    spec = read_spec(_config(name))
    assert spec.dims.ropes[0].rope_type == "linear" and spec.max_position == MAX_SEQ_LEN


def test_learned_positions_are_the_context() -> None:
    assert read_spec(_config("gpt2-learned", n_positions=77)).max_position == 77


@pytest.mark.parametrize("factor", [1e-5, float(MAX_SIZE)])
def test_a_context_out_of_range_is_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match="rope scaling results in a context of"):
        read_spec(_config("llama-plain", rope_parameters={"rope_type": "linear", "factor": factor}))


# Of these transformers' defaults must be ours: whatever a config.json may leave out.
OPTIONAL = {
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "tie_word_embeddings",
    "attention_bias",
    "attention_out_bias",
    "mlp_bias",
    "use_bias",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_types",
    "sliding_window",
    "sliding_window_pattern",
    "use_sliding_window",
    "no_rope_layer_interval",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "logit_scale",
    "use_qk_norm",
    "use_post_norm",
    *(field for family in FAMILIES.values() for field in family.optional),
}


# Not in transformers, and other names of what is.
APART = {name for family in FAMILIES.values() if family.oracle is not None for name in family.architectures}
APART |= {name for family in FAMILIES.values() for name in family.aliases}


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - APART))
def test_fields_left_out_have_transformers_defaults(architecture: str) -> None:
    """A config.json without the fields that may be missing reads as the one that transformers makes of it."""
    from transformers import CONFIG_MAPPING

    optional = OPTIONAL.union(*(one.own_optional for one in FAMILIES.values() if architecture in one.architectures))
    bare = {key: value for key, value in OF_ARCHITECTURE[architecture].config.items() if key not in optional}
    if "num_attention_heads" in bare:  # some have defaults of all sizes
        bare |= {"num_hidden_layers": 9} if "num_hidden_layers" in bare else {}
        bare |= {"hidden_size": 16 * bare["num_attention_heads"]}
    filled = CONFIG_MAPPING[bare["model_type"]](**{key: bare[key] for key in bare if key != "architectures"}).to_dict()
    if architecture == "Gemma3ForCausalLM":
        assert filled["attn_logit_softcapping"] is None
    spec = read_spec(bare)
    found = read_spec({**filled, "architectures": [architecture], "torch_dtype": "float32"})
    assert spec.dims == found.dims


# Those with a default of their own; that of the others is 2048.
@pytest.mark.parametrize(
    "architecture", sorted(name for name in ARCHITECTURES.keys() - APART if ARCHITECTURES[name].default != 2048)
)
def test_a_context_that_is_left_out_is_transformers(architecture: str) -> None:
    from transformers import CONFIG_MAPPING

    row, config = ARCHITECTURES[architecture], OF_ARCHITECTURE[architecture].config
    bare = {
        key: value for key, value in config.items() if key not in (row.positions, "rope_scaling", "rope_parameters")
    }
    assert read_spec(bare).max_position == getattr(CONFIG_MAPPING[config["model_type"]](), row.positions)


@pytest.mark.parametrize(
    ("alias", "tiny"), [(name, family.tiny[0]) for family in FAMILIES.values() for name in family.aliases]
)
def test_another_name_of_an_architecture_reads_the_same(alias: str, tiny: Tiny) -> None:
    spec = read_spec({**tiny.config, "architectures": [alias]})
    assert replace(spec, architecture="", config={}) == replace(read_spec(tiny.config), architecture="", config={})


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("mistral-window", "sliding_window", 0),
        ("mistral-window", "sliding_window", "all"),
        ("ministral-window", "layer_types", ["full_attention"]),
        ("ministral-window", "layer_types", ["full_attention", "full_attention", "chunked_attention"]),
        ("qwen2-window", "use_sliding_window", "yes"),
        ("qwen2-window", "max_window_layers", -1),
        ("gemma-tied", "hidden_act", "silu"),
        ("gemma2-capped", "hidden_activation", "silu"),
        ("gemma2-capped", "attn_logit_softcapping", -50.0),
        ("gemma2-capped", "final_logit_softcapping", "30"),
        ("gemma2-capped", "query_pre_attn_scalar", 0),
        ("gemma2-capped", "use_bidirectional_attention", True),
        ("gemma3_text-old", "attn_logit_softcapping", 50.0),
        ("gemma3_text-old", "sliding_window_pattern", 0),
        ("gemma3_text-old", "rope_local_base_freq", -1.0),
        ("olmo2-biased", "attention_bias", 1),
        ("granite-scaled", "embedding_multiplier", 0),
        ("granite-scaled", "residual_multiplier", -1),
        ("granite-scaled", "attention_multiplier", "1"),
        ("granite-scaled", "logits_scaling", 0.0),
        ("hyperclovax-scaled", "use_post_norm", "yes"),
        ("cohere-normed", "logit_scale", -1),
        ("cohere-normed", "use_qk_norm", 1),
        ("cohere-normed", "layer_norm_eps", 0),
        ("smollm3-nope", "no_rope_layers", [1, 2, 0]),
        ("smollm3-nope", "no_rope_layers", [1]),
        ("smollm3-nope", "no_rope_layer_interval", 0),
        ("smollm3-nope", "sliding_window", -4),
        ("seed_oss-biased", "attention_out_bias", 0.0),
        ("ernie4_5-biased", "use_bias", "no"),
        ("exaone4-window", "sliding_window_pattern", "LLLX"),
        ("olmo3-window", "rope_parameters", {"full_attention": {**YARN, "truncate": False}}),
        ("phi3-short", "partial_rotary_factor", 2.0),
        ("phi3-short", "original_max_position_embeddings", "long"),
        *(bad for family in FAMILIES.values() for bad in family.bad),
    ],
)
def test_a_bad_field_is_named(name: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"\b{re.escape(field)}\b"):
        read_spec(_config(name, **{field: value}))


def test_a_spec_keeps_the_fields_that_were_looked_at() -> None:
    """Those of a config.json that decide something, as they are spelled there, and no other."""
    config = {
        **_config("llama-biased"),
        "transformers_version": "4.0",
        "_name_or_path": "somewhere",
        "sliding_window": None,
    }
    kept = read_spec(config).config
    assert {name: config[name] for name in kept} == kept
    assert {"architectures", "torch_dtype", "eos_token_id", "rms_norm_eps", "rope_theta", "rope_scaling"} <= kept.keys()
    assert not kept.keys() & {"transformers_version", "_name_or_path", "sliding_window"}, "llama has no windows"
    assert read_spec(_config("mistral-window")).config["sliding_window"] is not None
    other = {name: value for name, value in config.items() if name != "torch_dtype"}
    assert read_spec(config) == read_spec({**other, "dtype": config["torch_dtype"]}), "spelling is no difference"
