"""Gemma 3n: the text part of a model with images and sound, tables that lack tokens, and caches that layers share."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TINY

from ingot import LLM, SamplingParams
from ingot.compile.request import Request
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir import ops
from ingot.ir.cache.summary import CacheSummary
from ingot.ir.errors import CheckpointError
from ingot.ir.numerics.harness import load_params
from ingot.models.architectures import read_spec
from ingot.runtime.loading.loader import load_artifact

TENSORS, INSIDE = "model.safetensors", "model.language_model."


def params(folder: Path) -> dict[str, torch.Tensor]:
    program = Request.read(folder, backend="reference").trace().entries["main"]
    return load_params(program.params, Checkpoint.open(folder).read)


def test_the_text_part_is_the_model_of_text_alone(tmp_path: Path) -> None:
    """Tensors of the other parts are there, and keys and values of layers that have none."""
    parts = TINY["gemma3n-parts"].write(tmp_path / "parts")
    found = load_file(parts / TENSORS)
    text = {f"model.{name.removeprefix(INSIDE)}": one for name, one in found.items() if name.startswith(INSIDE)}
    assert len(text) < len(found) and "model.layers.5.self_attn.k_proj.weight" in text
    alone = TINY["gemma3n_text-shared"].write(tmp_path / "text")
    save_file(text, alone / TENSORS, metadata={"format": "pt"})
    one, other = params(parts), params(alone)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_tensor_of_no_part_is_refused(tmp_path: Path) -> None:
    folder = TINY["gemma3n-parts"].write(tmp_path / "parts")
    save_file({**load_file(folder / TENSORS), "model.depth_tower.weight": torch.ones(2)}, folder / TENSORS)
    with pytest.raises(CheckpointError, match=r"extra(.|\n)*model\.depth_tower\.weight"):
        params(folder)


def test_fields_beside_the_text_part_count() -> None:
    config = dict(TINY["gemma3n-parts"].config)
    assert read_spec(config).dims.head.tied and not read_spec({**config, "tie_word_embeddings": False}).dims.head.tied
    assert read_spec({**config, "eos_token_id": [1, 106]}).eos_token_ids == (1, 106)


def test_tokens_without_embeddings_for_layers_have_those_of_the_first(tmp_path: Path) -> None:
    tiny = TINY["gemma3n_text-shared"]
    table = params(tiny.write(tmp_path / "m"))["inputs.table"]
    rows = tiny.config["vocab_size_per_layer_input"]
    stored = load_file(tmp_path / "m" / TENSORS)["model.embed_tokens_per_layer.weight"]
    assert torch.equal(table[:rows], stored) and len(table) == tiny.config["vocab_size"] > rows
    assert torch.equal(table[rows:], stored[:1].expand(len(table) - rows, -1))


def test_layers_that_share_a_cache_have_none(artifact: Callable[..., Path]) -> None:
    loaded = load_artifact(artifact("gemma3n_text-shared", backend="reference"), num_pages=4)
    (plan,) = loaded.plans.plans.values()
    assert [name for name in plan.states if name.startswith("kv.")] == ["kv.0", "kv.1", "kv.2"]
    calls = [one.target for one in plan.buckets[0].instructions]
    writes = sum(target in (f"ingot.{ops.kv_append.name}", f"ingot.{ops.qk_norm_rope_append.name}") for target in calls)
    assert writes == 3 and calls.count(f"ingot.{ops.paged_attention.name}") == 6
    groups = {group.name: group for group in CacheSummary.of(loaded.plans).groups}
    assert {name: group.layers for name, group in groups.items()} == {"full": "2", "window_21": "0–1"}
    assert groups["window_21"].page_bytes == 2 * groups["full"].page_bytes


def test_a_prefix_that_is_found_changes_nothing(artifact: Callable[..., Path]) -> None:
    llm = LLM(str(artifact("gemma3n_text-shared", backend="reference")))
    params, prompt = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), list(range(40, 110))
    first, again = (llm.generate([{"prompt_token_ids": prompt}], params)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 64)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
