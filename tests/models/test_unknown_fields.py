"""Fields that a family's reader does not know: what changes the computation is refused, the rest is named."""

import functools
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from random_config import random_config
from run_seed import run_seed
from tiny import TINY, first_of

from ingot.ir.errors import ConfigError
from ingot.models.architectures import ARCHITECTURES, ignored_fields, read_spec
from ingot.models.config import ConfigReader
from ingot.models.config_fields import CHANGES_THE_COMPUTATION, GENERIC
from ingot.models.families import reading
from ingot.models.known_fields import known_fields

# Configurations of checkpoints on the Hugging Face hub, whole: what real ones hold beside the fields that are read.
# Some thirty are quoted from public code and documentation; the rest have the fields and sizes that are published, put
# together by hand.
PUBLISHED = json.loads((Path(__file__).parents[1] / "goldens" / "published_configs.json").read_text())


def _config(name: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**TINY[name].config, **changes}.items() if value is not ...}


def _ignored(config: Mapping[str, Any]) -> tuple[str, ...]:
    return ignored_fields(config, read_spec(config))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_taken(name: str) -> None:
    assert _ignored(PUBLISHED[name]) == ()


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_configuration_is_taken(name: str) -> None:
    assert _ignored(TINY[name].config) == ()


@pytest.mark.parametrize("family", {tiny.family: None for tiny in TINY.values()})
def test_no_random_configuration_has_an_unknown_field(family: str) -> None:
    """Of those that the fuzz compiles. Some are refused for what they say, as a rope of one element."""
    tiny = next(tiny for tiny in TINY.values() if tiny.family == family)
    for number in range(10):
        draw = random.Random(f"{run_seed()} {family} {number} fields")
        config = random_config(tiny.config["architectures"][0], tiny.config["model_type"], draw)
        try:
            assert _ignored(config) == (), config
        except ConfigError as error:
            assert "does not know" not in error.what, f"{config}\n{error}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_transformers_writes_of_a_family_is_known(architecture: str) -> None:
    """All that its configuration class holds, with its defaults. Families without a class are skipped."""
    from transformers import CONFIG_MAPPING

    config = first_of(architecture).config
    if config["model_type"] not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no configuration of {config['model_type']}")
    written = CONFIG_MAPPING[config["model_type"]]().to_dict()
    written |= {"head_dim": 64} if architecture == "Glm4MoeForCausalLM" else {}  # half of its 42 elements is odd
    written |= {"num_experts_per_tok": 6} if architecture == "DeepseekV2ForCausalLM" else {}  # its default is none
    written |= {"architectures": [architecture], "dtype": "float32"}
    assert _ignored(written) == ()


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama-plain", "num_local_experts", 8),
        ("llama-plain", "n_routed_experts", 64),
        ("llama-plain", "kv_lora_rank", 512),
        ("llama-plain", "mamba_d_state", 16),
        ("llama-plain", "alibi", True),
        ("llama-plain", "attn_logit_softcapping", 50.0),
        ("llama-plain", "clip_qkv", 8.0),
        ("llama-plain", "use_qk_norm", True),
        ("llama-plain", "qk_layernorm", True),
        ("llama-plain", "residual_multiplier", 0.22),
        ("llama-plain", "logit_scale", 0.0625),
        ("llama-plain", "is_causal", False),
        ("llama-plain", "use_sliding_window", True),
        ("llama-plain", "sliding_window", 7),
        ("llama-plain", "no_rope_layers", [1, 0, 1]),
        ("llama-plain", "rope_interleaved", True),
        ("llama-plain", "query_pre_attn_scalar", 19),
        ("llama-plain", "layer_norm_eps", 0.1),
        ("llama-plain", "n_layer", 4),
        ("llama-plain", "num_kv_heads", 3),
        ("llama-plain", "layer_types", ["full_attention", "linear_attention", "full_attention"]),
        ("qwen3-plain", "mlp_bias", True),
        ("qwen2-window", "attention_bias", True),
        ("qwen2-window", "attention_multiplier", 1.0),
        ("gpt2-learned", "rope_theta", 10000.0),
        ("gpt2-learned", "num_key_value_heads", 2),
        ("gpt2-learned", "hidden_size", 85),
        ("gpt2-learned", "scale_attn_weights", "no"),
        ("gemma-tied", "final_logit_softcapping", 30.0),
        ("gemma-tied", "hidden_activation", "relu"),
        ("gemma3_text-old", "_sliding_window_pattern", 5),
        ("cohere2-window", "rotary_pct", 0.5),
        ("cohere2-window", "position_embedding_type", "rope_gpt_neox"),
        ("cohere2-window", "use_parallel_block", False),
        ("granite-scaled", "num_experts", 4),
        ("llama-plain", "is_encoder_decoder", True),
    ],
)
def test_what_changes_the_computation_is_refused(name: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read_spec(_config(name, **{field: value}), "there/config.json")
    error = caught.value
    assert field in str(error) and (repr(value) in str(error) or isinstance(value, str)), error
    assert "there/config.json" in error.where and error.expected


def test_all_refused_fields_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_spec(_config("llama-plain", num_experts=8, logit_scale=0.5, remark="mine"))
    error = caught.value
    assert "the definition of llama does not support" in error.what
    assert "field 'num_experts' is 8: experts" in error.what and "field 'logit_scale' is 0.5: a scale" in error.what
    assert "remark" not in error.what
    assert error.expected == "no such field or null or false or 1" and "Remove the field from config.json" in error.hint


def test_a_field_of_a_rope_table_is_named_with_its_place() -> None:
    table = {"rope_type": "default", "rope_theta": 503.0}
    with pytest.raises(ConfigError, match=r"'rope_parameters\.mrope_section' is \[2, 2, 3\]"):
        read_spec(_config("llama-plain", rope_parameters={**table, "mrope_section": [2, 2, 3]}))
    assert _ignored(_config("llama-plain", rope_parameters={**table, "finetuned": True})) == (
        "rope_parameters.finetuned",
    )


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama-plain", {"num_experts": 0, "n_routed_experts": None, "alibi": False, "clip_qkv": None}),
        ("llama-plain", {"embedding_multiplier": 1.0, "residual_multiplier": 1, "logits_scaling": 1.0}),
        ("llama-plain", {"is_causal": True, "rotary_pct": 1.0, "mlp_multipliers": []}),
        ("llama-plain", {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 2}),
        ("llama-plain", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}),
        ("llama-plain", {"sliding_window": 160, "layer_types": ["full_attention"] * 3}),
        ("llama-plain", {"layer_norm_eps": 0.013, "n_layer": 3, "n_ctx": 160, "n_head": 5}),
        ("llama-plain", {"moe_intermediate_size": 1407, "num_experts": None}),
        ("gpt2-learned", {"hidden_size": 84, "num_attention_heads": 6, "max_position_embeddings": 160, "head_dim": 14}),
        ("gpt2-learned", {"num_key_value_heads": 6, "num_hidden_layers": 3}),
        ("gemma-tied", {"hidden_activation": "gelu_pytorch_tanh"}),
        ("gemma2-capped", {"hidden_act": "gelu_pytorch_tanh"}),
    ],
)
def test_values_that_change_nothing_are_taken(name: str, fields: dict[str, Any]) -> None:
    config = _config(name, **fields)
    assert _ignored(config) == ()
    assert read_spec(config).dims == read_spec(_config(name)).dims


def test_training_and_general_fields_are_not_worth_a_word() -> None:
    fields = {"attention_dropout": 0.1, "resid_pdrop": 0.1, "initializer_range": 0.5, "router_aux_loss_coef": 0.001}
    general = {"auto_map": {"AutoModel": "x.Y"}, "id2label": {"0": "a"}, "_commit_hash": "abc", "pretraining_tp": 2}
    assert _ignored(_config("llama-plain", **fields, **general)) == ()


def test_fields_that_nothing_knows_are_named() -> None:
    assert _ignored(_config("llama-plain", remark="mine", lora_alpha=16, nothing=None, off=False)) == (
        "remark",
        "lora_alpha",
    )


def test_words_of_specs_are_no_fields_of_others() -> None:
    """Readers hand them on as strings, as in `**{"bias": …}`. Those that are fields of others are in the list."""
    assert _ignored(_config("llama-plain", rotary="mine")) == ("rotary",)
    with pytest.raises(ConfigError, match="'bias' is True: biases"):
        read_spec(_config("qwen2-window", bias=True))


def test_the_list_says_what_a_field_changes() -> None:
    assert all(CHANGES_THE_COMPUTATION.values()) and not CHANGES_THE_COMPUTATION.keys() & GENERIC


# --- what the code of a reader names ----------------------------------------------------------------------------------

_FLAGS = ("in_a_tuple",)


def _helper(config: ConfigReader, field: str = "by_default") -> None:
    """Words of a docstring."""
    config.flag(field, False)


def _reader(config: ConfigReader) -> None:
    if config.flag("switch", False):
        config.integer("size_when_on", most=7)
    for field in _FLAGS:
        config.flag(field, False)
    _helper(config)
    reading.read_biases(config)
    assert [config.flag(name, default=False) for name in ["in_a_list"]] == [False]
    config.sliding_layers(3, None)


def test_fields_on_any_path_are_known() -> None:
    found = known_fields(_reader)
    assert {"switch", "size_when_on", "in_a_tuple", "by_default", "in_a_list", "layer_types"} <= found
    assert "attention_bias" in found, "through a module"
    assert not found & {"docstring", "most", "default", "rope_theta", "config", "field"}
    with_more = known_fields(functools.partial(_helper, field="by_partial"))
    assert {"by_partial", "by_default"} <= with_more


def test_a_name_that_is_made_at_run_time_is_known_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ARCHITECTURES["LlamaForCausalLM"]
    llama = row.read

    def read(config: ConfigReader) -> Any:
        assert [config.flag(f"skip_{place}", False) for place in (1, 2)] == [True, False]
        return llama(config)

    monkeypatch.setitem(ARCHITECTURES, "LlamaForCausalLM", replace(row, read=read))  # type: ignore[arg-type]
    config = _config("llama-plain", skip_1=True, skip_3=True)
    assert "skip_1" not in known_fields(read) and _ignored(config) == ("skip_3",)
