"""A model whose tokens read chosen positions, served: the indexer's keys have a cache with the pages of latents."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_text import command_text
from staged import LIMITS, pass_context, traced
from tiny import TINY, compile_options

from ingot import LLM, SamplingParams, bisect, compile_model
from ingot.backends.cublas.emit import Cublas
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.backends.triton.emit import Triton
from ingot.compile.buckets import bucket_classes
from ingot.frontend.trace import Limits
from ingot.ir.machine.target import Target
from ingot.ir.program import VIEWS, Stage, target_name
from ingot.passes.manager import run_pipeline

NAME = "deepseek_v32-few"
ROW = TINY[NAME].config["kv_lora_rank"] + TINY[NAME].config["qk_rope_head_dim"]
WIDTH, TOP_K = TINY[NAME].config["index_head_dim"], TINY[NAME].config["index_topk"]
OPS = {"ingot.paged_choose_positions", "ingot.sparse_attention"}
pytestmark = [pytest.mark.xdist_group("sparse-attention"), pytest.mark.one_in_file(3)]


@pytest.fixture(scope="module")
def made(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse") / "m.ingot"
    compile_model(checkpoint(NAME), folder, **compile_options(NAME), backend="reference", dtype="float32")
    return folder


def _served(llm: LLM) -> list[Any]:
    prompts: list[Any] = [
        {"prompt_token_ids": prompt} for prompt in TINY[NAME].prompts() if len(prompt) in (1, 17, 33, 64)
    ]
    return llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))


def _tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in outputs]


def test_a_page_holds_latents_and_the_indexers_keys(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both have one page table: what keeps every token is one group."""
    llm = LLM(made, num_kv_pages=60)
    assert llm.loaded.plan.memory.page == 3 * 16 * (ROW + WIDTH) * 4
    caches = {name: str(one.type) for name, one in llm.loaded.plan.states.items() if one.kind == "paged_kv"}
    assert caches == {f"kv.{layer}": f"f32[pages, 1, 16, 1, {ROW}]" for layer in range(3)} | {
        f"index.{layer}": f"f32[pages, 1, 16, 1, {WIDTH}]" for layer in range(3)
    }
    shown = command_text(capsys, "inspect", made)
    assert "1 head, keys of 34 numbers, of which 26 are values, f32" in shown
    assert f"1 head, keys of {WIDTH} numbers, f32" in shown and "0–2" in shown


def test_prefixes_are_cached_and_sequences_preempted(made: Path) -> None:
    """With the same tokens: a cached page has the indexer's keys too."""
    llm = LLM(made, num_kv_pages=60, enable_prefix_caching=True)
    first, again = _served(llm), _served(llm)
    assert _tokens(again) == _tokens(first)
    assert [one.num_cached_tokens for one in again] == [0, 16, 32, 48]
    few = LLM(made, num_kv_pages=8, max_num_batched_tokens=20)
    assert _tokens(_served(few)) == _tokens(first)
    assert few._engine._scheduler.num_preemptions


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "size"), [("fp8", ROW), ("int8", ROW + 6)])
def test_a_cache_of_eight_bits_is_that_of_latents(
    kind: str, size: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Rows in i8 end in a scale, which is aligned to 4 bytes."""
    options = {**compile_options(NAME), "backend": "reference", "dtype": "float32", "kv_cache_dtype": kind}
    compile_model(checkpoint(NAME), tmp_path / "m.ingot", **options)
    llm = LLM(tmp_path / "m.ingot", num_kv_pages=60)
    assert llm.loaded.plan.memory.page == 3 * 16 * (size + 4 * WIDTH)
    assert all(len(one.outputs[0].token_ids) == 24 for one in _served(llm))


@pytest.mark.slow
def test_nothing_is_blamed(made: Path) -> None:
    """A bisection knows what both caches hold."""
    assert not bisect(made)


def _program(max_seq_len: int, **fields: Any) -> Any:
    limits = Limits(max_seq_len, LIMITS.max_batch, LIMITS.max_tokens)
    model = traced({**TINY[NAME].config, **fields}, limits)
    return run_pipeline(model, pass_context(limits, bucket=None), (), upto=Stage.FUSED).fused


def test_a_context_in_which_all_positions_are_chosen_needs_no_indexer() -> None:
    """Of one token more, it does."""
    short, long = _program(TOP_K), _program(TOP_K + 1)
    names = [{target_name(node.target) for node in program.calls()} for program in (short, long)]
    assert not OPS & names[0] and "ingot.paged_attention" in names[0]
    assert names[1] >= OPS and "ingot.paged_attention" not in names[1]
    assert not [name for name in (*short.params, *short.states) if "index" in name]
    assert {name for name in long.states if name.startswith("index")} == {f"index.{layer}" for layer in range(3)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpu_has_kernels_for_every_call(deterministic: bool) -> None:
    """In steps of all sizes, with and without a choice. The references would run on the host."""
    config = {**TINY[NAME].config, "dtype": "bfloat16", "index_topk": 64, "first_k_dense_replace": 3}
    target = Target.named("sm_90")
    backends = (Triton(), Cublas(), Reference(asked=False), Rowwise(asked=False))
    for max_seq_len in (65, 64):
        limits = replace(LIMITS, max_seq_len=max_seq_len)
        classes = bucket_classes(target, backends, LIMITS.max_tokens, LIMITS.max_batch, deterministic=deterministic)
        context = pass_context(limits, target=target, backends=backends, deterministic=deterministic, bucket=None)
        lowered = run_pipeline(traced(config, limits), context, classes, upto=Stage.LOWERED)
        for program in lowered.programs.values():
            calls = [node for node in program.calls() if node.target not in VIEWS]
            by = {target_name(node.target): node.meta["backend"] for node in calls}
            assert set(by.values()) <= {"triton", "cublas"}
            assert {name: by.get(name) for name in OPS} == dict.fromkeys(OPS, "triton" if max_seq_len == 65 else None)
