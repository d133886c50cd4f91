"""A model with latent attention, served: its caches hold a latent and a rotated key per token, and a GPU refuses it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_text import command_text
from staged import LIMITS, pass_context, traced
from tiny import TINY, compile_options

from ingot import LLM, SamplingParams, bisect, compile_model
from ingot.backends.cublas.emit import Cublas
from ingot.backends.inductor.emit_cuda import InductorCuda
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.backends.triton.emit import Triton
from ingot.compile.buckets import bucket_classes
from ingot.ir.errors import PassError
from ingot.ir.machine.target import Target
from ingot.ir.program import Stage
from ingot.passes.manager import run_pipeline

NAME = "deepseek_v3-groups"
ROW = TINY[NAME].config["kv_lora_rank"] + TINY[NAME].config["qk_rope_head_dim"]
pytestmark = pytest.mark.xdist_group("latents")


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


@pytest.mark.parametrize("here", ["", "the GPU of this machine: none"])
def test_a_gpu_refuses_it(here: str) -> None:
    """By each backend with its reason, and what to do. Inductor too, on the machine of such a GPU and elsewhere."""
    target = Target.named("sm_90")
    backends = (Triton(), InductorCuda(missing=lambda _: here), Cublas(), Reference(asked=False), Rowwise(asked=False))
    classes = bucket_classes(target, backends, LIMITS.max_tokens, LIMITS.max_batch, deterministic=False)
    context = pass_context(target=target, backends=backends, bucket=None)
    model = traced({**TINY[NAME].config, "dtype": "bfloat16"})
    with pytest.raises(PassError, match=r"no backend computes ingot\.head_linear") as caught:
        run_pipeline(model, context, classes, upto=Stage.LOWERED)
    error = caught.value
    assert "triton: no kernel for ingot.head_linear" in error.what
    assert "inductor: on a GPU ingot.head_linear needs a kernel" in error.what
    assert "reference: on a GPU it does not replace a missing kernel" in error.what
    assert "backend='reference', which is slow, or for another target" in error.hint
    asked = pass_context(target=target, backends=(Triton(), Reference()), bucket=None)
    assert run_pipeline(model, asked, classes, upto=Stage.LOWERED).programs
