"""Two layers in the shapes of models that people serve: wide, with vocabularies of 32 k to 256 k, through all passes.

What tiny sizes cannot show: sums over thousands of terms, tables at their real base and length, the range of 16 bits.
Weights are random, of the size of trained ones' activations. One model at a time, each freed before the next.
"""

import gc
import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import disagreement
from families import weights
from hf_model import hf_model
from run_seed import again, run_seed
from safetensors.torch import save_file
from serve_artifact import teacher_forced_artifact
from staged import LIMITS, staged, traced

from ingot import compile_model
from ingot.ir.numerics.harness import InterpreterRun, load_params, teacher_forced
from ingot.ir.numerics.tolerances import compare

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("hub-shapes")]

LENGTHS = (1, 19, 40)
# The table is for single ops, and these logits come of some ten sums in a row, each with a rounding of its own: 1.2e-5
# at worst was measured, over millions of logits. In 16 bits transformers' own error is the measure.
FACTOR = 2.0

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _shape(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    common = {"architectures": [architecture], "model_type": model_type, "num_hidden_layers": 2}
    return {**common, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **fields}


# Each from the config.json that is published with the model of that name on the Hugging Face hub, but for the depth.
SHAPES: Mapping[str, dict[str, Any]] = {
    "Llama-3.2-1B": _shape(
        "LlamaForCausalLM",
        "llama",
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        vocab_size=128256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=_LLAMA3,
        tie_word_embeddings=True,
    ),
    "Qwen3-1.7B": _shape(
        "Qwen3ForCausalLM",
        "qwen3",
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=6144,
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
    ),
    "gemma-2-2b": _shape(
        "Gemma2ForCausalLM",
        "gemma2",
        hidden_size=2304,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=9216,
        vocab_size=256000,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
    ),
    "Phi-3-mini-4k-instruct": _shape(
        "Phi3ForCausalLM",
        "phi3",
        hidden_size=3072,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=8192,
        vocab_size=32064,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        sliding_window=2047,
        tie_word_embeddings=False,
    ),
    "MiniCPM-1B-sft-bf16": _shape(
        "MiniCPMForCausalLM",
        "minicpm",
        hidden_size=1536,
        num_attention_heads=24,
        num_key_value_heads=8,
        intermediate_size=3840,
        vocab_size=73440,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        scale_emb=12,
        dim_model_base=256,
        scale_depth=1.4,
        tie_word_embeddings=True,
    ),
    "OLMo-2-0425-1B": _shape(
        "Olmo2ForCausalLM",
        "olmo2",
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=8192,
        vocab_size=100352,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=500000.0,
        tie_word_embeddings=False,
    ),
    "pythia-410m": _shape(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=4096,
        vocab_size=50304,
        max_position_embeddings=2048,
        layer_norm_eps=1e-5,
        hidden_act="gelu",
        rotary_pct=0.25,
        rotary_emb_base=10000,
        use_parallel_residual=True,
        tie_word_embeddings=False,
    ),
}


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    yield
    gc.collect()


def _requests(config: Mapping[str, Any], name: str) -> list[list[int]]:
    draw = random.Random(f"{run_seed()} {name}")
    return [[draw.randrange(config["vocab_size"]) for _ in range(length)] for length in LENGTHS]


def _tensors(config: Mapping[str, Any], name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    seed = random.Random(f"{run_seed()} {name} weights").randrange(1 << 30)
    return {key: tensor.to(dtype) for key, tensor in weights(config, seed).items()}


def _theirs(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, requests: list[list[int]]
) -> torch.Tensor:
    model = hf_model(config, {name: tensor.to(dtype) for name, tensor in tensors.items()}, dtype, LIMITS.max_seq_len)
    with torch.no_grad():
        return torch.cat([model(torch.tensor([request])).logits[0].float() for request in requests])


def _compare(
    name: str,
    dtype: torch.dtype,
    ours: Callable[[dict[str, Any], dict[str, torch.Tensor], list[list[int]]], torch.Tensor],
) -> None:
    config = {**SHAPES[name], "torch_dtype": str(dtype).removeprefix("torch.")}
    tensors, requests = _tensors(config, name, dtype), _requests(config, name)
    found = ours(config, tensors, requests)
    expected = _theirs(config, tensors, torch.float32, requests)
    print(name, end=", ")
    if dtype == torch.float32:
        problem = compare(found, expected, dtype, factor=FACTOR)
    else:
        problem = disagreement(found, expected, _theirs(config, tensors, dtype, requests), dtype)
    assert problem is None, f"{problem}; {again(name)}"
    # Where two tokens are further apart than the error, the more likely one is the same.
    error, (best, order) = (found - expected).abs().max(), expected.topk(2)
    decided = best[:, 0] - best[:, 1] > 2 * error
    assert decided.any() and torch.equal(found.argmax(-1)[decided], order[decided, 0])
    print(f"{dtype}: worst logit {float(error):.1e}, the best token at {int(decided.sum())} of {len(found)} positions")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_two_layers_of_a_hub_shape_agree(name: str, dtype: torch.dtype) -> None:
    def interpreted(
        config: dict[str, Any], tensors: dict[str, torch.Tensor], requests: list[list[int]]
    ) -> torch.Tensor:
        program = staged(traced(config, **{name: tensor.dtype for name, tensor in tensors.items()}))[0][-1].program
        run = InterpreterRun(program, load_params(program.params, tensors.__getitem__))
        return torch.cat(teacher_forced(program.input_types(), run, requests, chunk=23, seed=1))

    _compare(name, dtype, interpreted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_hub_shape_through_inductor_agrees(dtype: torch.dtype, tmp_path: Path) -> None:
    def compiled(config: dict[str, Any], tensors: dict[str, torch.Tensor], requests: list[list[int]]) -> torch.Tensor:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        compile_model(folder, tmp_path / "m.ingot", backend="inductor", max_batch=8, max_tokens=256, max_seq_len=160)
        return torch.cat(teacher_forced_artifact(str(tmp_path / "m.ingot"), requests, chunk=23))

    _compare("Llama-3.2-1B", dtype, compiled)
