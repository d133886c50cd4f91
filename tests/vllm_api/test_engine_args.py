"""vLLM's arguments: on a command line, in code, and the reasons for those that are refused."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from kept_records import kept_records

from ingot.ir.errors import ArtifactError, IngotError, OptionError
from ingot.vllm_api import EngineArgs, FlexibleArgumentParser
from ingot.vllm_api.argument_meanings import (
    FORMER,
    MEANINGS,
    NO_EFFECT,
    OF_ABSENT_FEATURES,
    REFUSED,
    defaults,
    meanings,
)
from ingot.vllm_api.open_model import open_model


def parser() -> FlexibleArgumentParser:
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


def test_each_argument_has_one_meaning() -> None:
    names = [*MEANINGS, *OF_ABSENT_FEATURES]
    for groups in (NO_EFFECT, REFUSED):
        names += [name for arguments in groups.values() for name in arguments]
    assert len(names) == len(set(names))
    assert set(defaults()) == set(meanings()) == set(names) - OF_ABSENT_FEATURES


def test_defaults_of_the_command_line_are_accepted() -> None:
    """As scripts pass them: `LLM(**vars(args))`."""
    found = EngineArgs.from_cli_args(parser().parse_args([]))
    assert dataclasses.asdict(found) == defaults() == dataclasses.asdict(EngineArgs())
    assert dataclasses.asdict(EngineArgs(**vars(parser().parse_args([])))) == defaults()


def test_options_have_dashes_or_underscores_and_their_types() -> None:
    given = [
        "--model=a/b",
        "--max_model_len",
        "4k",
        "--max-num-seqs=8",
        "--no-enable_prefix_caching",
        "--enforce-eager",
    ]
    given += ["--gpu-memory-utilization", "0.5", "--override_generation_config", '{"top_k": 3}', "--revision", "None"]
    found = EngineArgs.from_cli_args(parser().parse_args(given))
    assert (found.model, found.max_model_len, found.max_num_seqs) == ("a/b", 4000, 8)
    assert (found.enable_prefix_caching, found.enforce_eager, found.gpu_memory_utilization) == (False, True, 0.5)
    assert (found.override_generation_config, found.revision) == ({"top_k": 3}, None)
    assert parser().parse_args(["--max-model-len", "4K"]).max_model_len == 4096


def test_a_group_of_a_parser_takes_options_too() -> None:
    made = FlexibleArgumentParser()
    group = EngineArgs.add_cli_args(made.add_argument_group("engine"))
    group.set_defaults(model="a")
    made.add_argument("--max_tokens", type=int)
    found = vars(made.parse_args(["--max-tokens", "3"]))
    assert (found["model"], found.pop("max_tokens")) == ("a", 3) and EngineArgs(**found).model == "a"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("data_parallel_size", True, "one machine"),
        ("enable_expert_parallel", True, "one machine"),
        ("lora_dtype", "float32", "model's dtype"),
        ("enable_lora", 1, "True or False"),
        ("speculative_config", {"method": "ngram"}, "draft"),
        ("hf_overrides", {"rope_theta": 1}, "compiled as it is"),
        ("quantization", "lut_b_moe", "experts alone"),
        ("quantization", "online", "quantization_config"),
        ("quantization", "hqq", "compile-model --quantize"),
        ("quantization", 8, "compile-model --quantize"),
        ("load_format", "dummy", "safetensors"),
        ("cpu_offload_gb", 4, "device's memory"),
        ("mamba_block_size", 8, "does not have"),
        ("generation_config", "/folder", "generation_config"),
        ("seed", "7", "an integer or None"),
        ("max_model_len", 1.5, "an integer or None"),
        ("max_num_seqs", True, "an integer or None"),
        ("enforce_eager", "no", "True or False"),
        ("enable_chunked_prefill", 0, "True, False or None"),
        ("override_generation_config", "top_k=1", "a dict or None"),
    ],
)
def test_what_has_no_meaning_is_refused_with_the_reason(name: str, value: object, reason: str) -> None:
    with pytest.raises(OptionError, match=name) as caught:
        EngineArgs(model="a", **{name: value})
    assert reason in str(caught.value)


def test_a_model_is_a_name() -> None:
    with pytest.raises(OptionError, match="model = None"):
        EngineArgs(model=None)


def test_an_unknown_argument_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean 'max_model_len'"):
        EngineArgs(model="a", max_modell_len=3)


def test_former_arguments_are_refused_with_what_to_use() -> None:
    assert not FORMER.keys() & {*defaults(), *OF_ABSENT_FEATURES}
    with pytest.raises(OptionError, match="earlier versions") as caught:
        EngineArgs(model="a", task="embed")
    assert "runner='pooling'" in str(caught.value)


def test_what_has_no_effect_is_logged() -> None:
    with kept_records("ingot", logging.WARNING) as records:
        EngineArgs(model="a", compilation_config=3, hf_overrides={}, swap_space=0)
    assert [record.getMessage() for record in records] == [
        "compilation_config has no effect: the compiler has chosen kernels and launches",
        "swap_space has no effect: the scheduler has its own rules",
    ]


def test_what_a_checkpoint_is_compiled_with(
    checkpoint: Path, chat_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permission to run code of the checkpoint, which scripts give, reaches no compile and no engine."""
    seen: list[tuple[Any, dict[str, Any], Any]] = []

    def found(model: Any, options: dict[str, Any], quantized_by: Any) -> Path:
        seen.append((model, options, quantized_by))
        return chat_artifact

    monkeypatch.setattr("ingot.vllm_api.open_model.find_artifact", found)
    given = {
        "dtype": "half",
        "max_model_len": 64,
        "kv_cache_dtype": "fp8",
        "revision": "v1",
        "tokenizer_revision": "v1",
    }
    llm = open_model(EngineArgs(model=str(checkpoint), trust_remote_code=True, **given))
    open_model(EngineArgs(model=checkpoint, max_model_len=-1, quantization="ptpc_fp8"))
    open_model(EngineArgs(model=checkpoint, quantization="gptq_marlin"))
    for name in ("fp8_e4m3", "fp8_per_token_head", "int8_per_token_head"):
        open_model(EngineArgs(model=checkpoint, kv_cache_dtype=name))
    wanted = {"dtype": "float16", "max_seq_len": 64, "kv_cache_dtype": "fp8", "revision": "v1"}
    assert seen == [
        (str(checkpoint), wanted, None),
        (checkpoint, {"quantize": "fp8_per_channel_per_token"}, ()),
        (checkpoint, {}, ("gptq",)),
        (checkpoint, {"kv_cache_dtype": "fp8"}, None),
        (checkpoint, {"kv_cache_dtype": "fp8", "kv_cache_scales": "token"}, None),
        (checkpoint, {"kv_cache_dtype": "int8", "kv_cache_scales": "token"}, None),
    ]
    assert llm.llm_engine._scheduler.config.max_seq_len == 64


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"tokenizer": "other"}, "tokenizer = 'other'"),
        ({"revision": "main", "tokenizer_revision": "v2"}, "tokenizer_revision = 'v2'"),
        ({"dtype": "bfloat16"}, "dtype = 'bfloat16'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype = 'fp8'"),
        ({"quantization": "fp8_per_block"}, "--quantize fp8_block128"),
        ({"quantization": "awq"}, "compile-model CHECKPOINT -o NAME.ingot$"),
        ({"block_size": 32}, "block_size = 32"),
        ({"max_logprobs": 50}, "max_logprobs = 50"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization = 1.5"),
        ({"max_model_len": 4096}, "max_model_len is 4096"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"scheduling_policy": "random"}, "random"),
    ],
)
def test_what_disagrees_with_an_artifact_is_refused(
    chat_artifact: Path, given: dict[str, object], complaint: str
) -> None:
    with pytest.raises(IngotError, match=complaint):
        open_model(EngineArgs(model=str(chat_artifact), **given))


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ArtifactError, match="is not there"):
        open_model(EngineArgs(model="/nowhere/model"))


def test_arguments_reach_the_engine(chat_artifact: Path) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    args = {"max_num_seqs": 256, "max_num_batched_tokens": 32, "max_model_len": 40, "dtype": "float", "block_size": 16}
    more = {"num_gpu_blocks_override": 20, "scheduling_policy": "priority", "enable_prefix_caching": False}
    llm = open_model(EngineArgs(model=str(chat_artifact), **args, **more, gpu_memory_utilization=0.5, seed=None))
    config = llm.llm_engine._scheduler.config
    assert (config.max_batch, config.max_tokens, config.max_seq_len) == (4, 32, 40)  # lowered to the compiled 4
    assert (config.policy, config.prefix_caching) == ("priority", False)
    assert llm.loaded.num_pages >= 20 and whole > 0
