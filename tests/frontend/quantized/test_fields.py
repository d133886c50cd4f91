"""Fields of a quantization_config: patterns of modules, and fields as checkpoints on the hub have them."""

import pytest

from ingot.frontend.quantized.fields import Fields, matcher
from ingot.frontend.quantized.readers import find_reader
from ingot.ir.errors import ConfigError


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.0.mlp", "model.layers.0.mlp.up_proj", True),
        ("layers.0.mlp", "model.layers.0.mlp.up_proj", True),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("layers.1", "model.layers.10.mlp.up_proj", False),
        (r"re:.*\.down_proj$", "model.layers.0.mlp.down_proj", True),
        ("re:down_proj", "model.layers.0.mlp.down_proj", False),
    ],
)
def test_patterns_are_whole_words(pattern: str, module: str, matches: bool) -> None:
    assert matcher([pattern])(module) is matches


def test_a_field_is_read_by_its_type() -> None:
    fields = Fields({"a": True, "b": 3, "c": None, "d": {"e": 1}}, "config.json")
    assert fields.get("b", int, 0) == 3 and fields.get("c", int, 5) == 5 and fields.object("c") is None
    with pytest.raises(ConfigError, match="the field 'a' of the quantization is True"):
        fields.get("a", int, 0)
    with pytest.raises(ConfigError, match="not understood: d"):
        fields.end()


ARGS = {"num_bits": 8, "observer": None, "observer_kwargs": {}, "symmetric": True, "group_size": None, "actorder": None}
HUB = {
    "Qwen3 in FP8": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
    },
    "Llama 3.1 in FP8 by llm-compressor": {
        "config_groups": {
            "group_0": {
                "input_activations": {**ARGS, "dynamic": True, "strategy": "token", "type": "float"},
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {**ARGS, "block_structure": None, "dynamic": False, "strategy": "channel", "type": "float"},
            }
        },
        "format": "float-quantized",
        "global_compression_ratio": 1.239,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "frozen",
        "sparsity_config": {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured"},
    },
    "Qwen2.5 in GPTQ": {
        "batch_size": 1,
        "bits": 4,
        "block_name_to_quantize": None,
        "cache_block_outputs": True,
        "damp_percent": 0.01,
        "dataset": None,
        "desc_act": False,
        "exllama_config": {"version": 1},
        "group_size": 128,
        "max_input_length": None,
        "model_seqlen": None,
        "module_name_preceding_first_block": None,
        "modules_in_block_to_quantize": None,
        "pad_token_id": None,
        "quant_method": "gptq",
        "sym": True,
        "tokenizer": None,
        "true_sequential": True,
        "use_cuda_fp16": False,
        "use_exllama": True,
    },
    "Qwen2.5 in AWQ": {
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    },
    "Llama 3.1 405B in FP8 by FBGEMM": {
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj"],
        "quant_method": "fbgemm_fp8",
    },
}


@pytest.mark.parametrize("name", HUB)
def test_configurations_as_on_the_hub(name: str) -> None:
    assert find_reader({"quantization_config": HUB[name]}, "config.json") is not None
