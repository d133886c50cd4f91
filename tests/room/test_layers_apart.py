"""Layers that differ: pages of other sizes in each cache, layers without a cache, and none that has one."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import TINY, compile_options

from ingot import LLM, SamplingParams, compile_model
from ingot.ir.cache.summary import CacheSummary
from ingot.runtime.loading.loader import load_artifact

PAGE, DIM, FLOAT = 16, 14, 4  # tokens, elements of a head, bytes of one
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(given, GREEDY)]


@pytest.mark.xdist_group("parity-decilm-heads")
def test_a_page_is_as_many_bytes_as_its_caches_have_heads(artifact: Callable[..., Path]) -> None:
    loaded = load_artifact(artifact("decilm-heads", backend="reference"), num_pages=1)
    (group,) = CacheSummary.of(loaded.plans).groups
    heads = TINY["decilm-heads"].config["num_key_value_heads_per_layer"]
    assert group.page_bytes == sum(heads) * 2 * PAGE * DIM * FLOAT
    assert [form.partition(",")[0] for form in group.forms] == ["2 heads", "6 heads", "1 head", "3 heads"]


@pytest.mark.xdist_group("parity-decilm-heads")
def test_sequences_that_share_and_give_up_pages_answer_alike(artifact: Callable[..., Path]) -> None:
    """Pages are copied and cleared in caches of several sizes."""
    folder, (*_, long) = artifact("decilm-heads", backend="reference"), TINY["decilm-heads"].prompts()
    prompts = [long, long[:40], [*long[:40], 7, 8, 9], long]
    plenty = LLM(folder, enable_prefix_caching=False)
    expected = answers(plenty, prompts)
    few = LLM(folder, num_kv_pages=10, enable_prefix_caching=True)  # those of one sequence at full length
    assert answers(few, prompts) == expected
    assert answers(few, prompts) == expected, "of what the first requests left behind"


@pytest.mark.xdist_group("parity-nemotron_nas-blocks")
def test_caches_are_of_the_layers_that_have_attention(artifact: Callable[..., Path]) -> None:
    loaded = load_artifact(artifact("nemotron_nas-blocks", backend="reference"), num_pages=1)
    layers = {group.name: group.layers for group in CacheSummary.of(loaded.plans).groups}
    assert layers == {"full": "0, 3", "window_19": "5"}


def test_a_model_without_attention_has_no_pages(tmp_path: Path) -> None:
    blocks = [
        {"attention": {"no_op": True}, "ffn": {"no_op": True}},
        {"attention": {"replace_with_linear": True}, "ffn": {"intermediate_size": 40}},
    ]
    tiny = TINY["nemotron_nas-late"]
    folder = tiny.write(tmp_path / "checkpoint", num_hidden_layers=2, block_configs=blocks)
    compile_model(folder, tmp_path / "blind.ingot", backend="reference", **compile_options(tiny.name))
    llm = LLM(tmp_path / "blind.ingot")
    assert llm.loaded.pages == {}
    # A token follows from the one before it alone.
    after_one, after_many = answers(llm, [[5], [300, 17, 5]])
    assert after_one == after_many
