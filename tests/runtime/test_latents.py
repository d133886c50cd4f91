"""A model with latent attention, served: its caches hold a latent and a rotated key per token. A GPU has kernels."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_text import command_text
from drawn import drawn
from staged import LIMITS, pass_context, traced
from tiny import TINY, compile_options

from ingot import LLM, SamplingParams, bisect, compile_model
from ingot.backends.cublas.emit import Cublas
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.backends.triton.emit import Triton
from ingot.compile.buckets import bucket_classes
from ingot.ir.machine.target import Target
from ingot.ir.program import VIEWS, Stage, target_name
from ingot.passes.insert_paged_kv import InsertPagedKV
from ingot.passes.manager import run_pipeline
from ingot.passes.pipeline import PIPELINE

NAME = "deepseek_v3-groups"
ROW = TINY[NAME].config["kv_lora_rank"] + TINY[NAME].config["qk_rope_head_dim"]
TINY_ONES = ("deepseek_v2-lite", "deepseek_v2-groups", NAME, "deepseek_v3-halves")
pytestmark = [pytest.mark.xdist_group("latents"), pytest.mark.one_in_file(3)]


@pytest.fixture(scope="module")
def made(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents") / "m.ingot"
    compile_model(checkpoint(NAME), folder, **compile_options(NAME), backend="reference", dtype="float32")
    return folder


def _served(llm: LLM) -> list[Any]:
    prompts: list[Any] = [
        {"prompt_token_ids": prompt} for prompt in TINY[NAME].prompts() if len(prompt) in (1, 17, 33, 64)
    ]
    return llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))


def test_a_page_holds_latents(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three layers, 16 tokens a page, 34 numbers of four bytes a token: a sixth of keys and values of six heads."""
    assert ROW == 34
    llm = LLM(made, num_kv_pages=60)
    assert llm.loaded.plan.memory.page == 3 * 16 * ROW * 4
    assert {str(one.type) for one in llm.loaded.plan.states.values() if one.kind == "paged_kv"} == {
        f"f32[pages, 1, 16, 1, {ROW}]"
    }
    assert "1 head, keys of 34 numbers, of which 26 are values, f32" in command_text(capsys, "inspect", made)


def test_prefixes_are_cached_and_sequences_preempted(made: Path) -> None:
    """With the same tokens: pages, prefixes and chunks know nothing of latents."""
    llm = LLM(made, num_kv_pages=60, enable_prefix_caching=True)
    first, again = _served(llm), _served(llm)
    tokens = [list(one.outputs[0].token_ids) for one in first]
    assert [list(one.outputs[0].token_ids) for one in again] == tokens
    assert [one.num_cached_tokens for one in again] == [0, 16, 32, 48]
    few = LLM(made, num_kv_pages=8, max_num_batched_tokens=20)
    assert [list(one.outputs[0].token_ids) for one in _served(few)] == tokens
    assert few._engine._scheduler.num_preemptions


def test_a_cache_of_eight_bits(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    options = {**compile_options(NAME), "backend": "reference", "dtype": "float32", "kv_cache_dtype": "fp8"}
    compile_model(checkpoint(NAME), tmp_path / "m.ingot", **options)
    llm = LLM(tmp_path / "m.ingot", num_kv_pages=60)
    assert llm.loaded.plan.memory.page == 3 * 16 * ROW
    assert all(len(one.outputs[0].token_ids) == 24 for one in _served(llm))


@pytest.mark.slow
def test_nothing_is_blamed(made: Path) -> None:
    """A bisection knows what caches hold, from the latents and rotated keys of the traced program."""
    assert not bisect(made)


# The sizes of DeepSeek-V2-Lite and of DeepSeek-V3, with few columns elsewhere.
PUBLISHED = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "heads", "deterministic"), drawn(2, [*itertools.product(TINY_ONES, (6, 16, 128), (False, True))])
)
def test_a_gpu_has_kernels_for_each_call(name: str, heads: int, deterministic: bool) -> None:
    """In steps of all sizes, over caches in the dtype of q and of eight bits. Layers have no experts here."""
    config = {**TINY[name].config, "dtype": "bfloat16"}
    config["first_k_dense_replace"] = config["num_hidden_layers"]
    config |= {} if heads == 6 else {**PUBLISHED, "num_attention_heads": heads, "num_key_value_heads": heads}
    target = Target.named("sm_90")
    backends = (Triton(), Cublas(), Reference(asked=False), Rowwise(asked=False))
    classes = bucket_classes(target, backends, LIMITS.max_tokens, LIMITS.max_batch, deterministic=deterministic)
    context = pass_context(target=target, backends=backends, deterministic=deterministic, bucket=None)
    model = traced(config)
    for kv_cache_dtype, per_token in (("auto", False), ("fp8", False), ("int8", True)):
        changed = InsertPagedKV(kv_cache_dtype=kv_cache_dtype, per_token=per_token)
        pipeline = tuple(
            replace(phase, passes=tuple(changed if one.name == changed.name else one for one in phase.passes))
            for phase in PIPELINE
        )
        for program in run_pipeline(model, context, classes, pipeline, upto=Stage.LOWERED).programs.values():
            assert program.bucket is not None
            made = {
                (target_name(node.target), node.meta["backend"])
                for node in program.calls()
                if node.target not in VIEWS and "backend" in node.meta
            }
            others = {one for one in made if one[1] != "triton"}
            assert others <= ({("ingot.linear", "cublas")} if not deterministic else set())
            names = {name.removeprefix("ingot.") for name, _ in made}
            assert names >= {"head_linear", "kv_append", "rope", "concat"}
            expanded = kv_cache_dtype == "auto" and program.bucket.name == "extend" and not deterministic
            attention = {"partial_attention", "step_latent_attention"} if expanded else {"paged_attention"}
            assert {name for name in names if "attention" in name} == attention
