"""Limits and memory that groups of caches do not fit: each ends in an error with figures, and with what would work."""

import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import TINY

from ingot import LLM, SamplingParams, compile_model
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.ir.backend import No
from ingot.ir.cache.memory import MemoryNeed
from ingot.ir.errors import ConfigError, OptionError, PassError, RequestError
from ingot.ir.ops import op_of, paged_attention
from ingot.runtime.loading.loader import load_artifact

pytestmark = pytest.mark.xdist_group("groups-bad-input")
OPTIONS: dict[str, Any] = {"backend": "reference", "max_batch": 2, "max_tokens": 64, "max_seq_len": 160, "jobs": 1}
GEMMA, MISTRAL = "gemma3_text-new", "mistral-window"
PAGE, WINDOW = 16, 33


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The artifact of a family with a window, and with other options."""
    folder = tmp_path_factory.mktemp("groups")
    made: dict[str, Path] = {}

    def get(name: str, window: int = WINDOW, **options: Any) -> Path:
        key = f"{name}-{window}-{sorted(options.items())}"
        if key not in made:
            source = TINY[name].write(folder / str(len(made)), sliding_window=window)
            compile_model(source, output := folder / f"{len(made)}.ingot", **{**OPTIONS, **options})
            made[key] = output
        return made[key]

    return get


def served(path: Path, length: int, **options: Any) -> int:
    llm = LLM(path, **options)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    return len(llm.generate({"prompt_token_ids": [1] * length}, params)[0].outputs[0].token_ids)


def test_memory_below_the_least_of_the_groups(compiled: Callable[..., Path]) -> None:
    """The figures of each group, and the longest sequences that the same memory serves when they are compiled for."""
    path = compiled(GEMMA)
    plans = load_artifact(path).plans
    need = MemoryNeed.of(plans, mmap.PAGESIZE)
    full, window = need.groups["full"].page, need.groups["window_33"].page
    # At full length 10 pages keep every token. 33 of them lie in 3 pages at most, and one is never handed out.
    assert need.sequence == 10 * full + 4 * window
    figures = f"{need.sequence} bytes (10 of {full} bytes in full and 4 of {window} bytes in window_33)"
    memory = need.fixed + 7 * full + 4 * window
    with pytest.raises(OptionError, match=re.escape(figures)) as caught:
        load_artifact(path, memory=memory)
    assert caught.value.expected == f"{need.fixed + need.sequence} bytes"
    assert caught.value.hint == "give more memory, or compile with a max_seq_len of at most 112"
    shorter = load_artifact(compiled(GEMMA, max_seq_len=112), memory=memory).pages  # whose steps take less, too
    assert shorter["full"] >= 7 and shorter["window_33"] >= 4
    # With two pages of each and one that is never handed out, 32 tokens.
    with pytest.raises(OptionError, match="at most 32"):
        load_artifact(path, memory=need.fixed + 2 * full + 3 * window)
    with pytest.raises(OptionError, match="the weights leave no room"):
        load_artifact(path, memory=need.weights)
    for given in (memory, need.fixed + need.sequence - 1):
        with pytest.raises(OptionError, match="do not fit into memory"):
            LLM(path, memory=given)
    assert served(path, 150, memory=need.fixed + need.sequence) == 5


@pytest.mark.parametrize(("name", "least", "group"), [(GEMMA, 7, " of the group full"), (MISTRAL, 3, "")])
def test_pages_below_the_least(name: str, least: int, group: str, compiled: Callable[..., Path]) -> None:
    """A request that the pages never hold is refused. What the error asks for serves it; shorter ones are served."""
    path = compiled(name)
    with pytest.raises(RequestError, match=f"prompt and output need {least} KV pages{group}") as caught:
        served(path, 100, num_kv_pages=least - 1)
    assert f"at most {least - 1} pages of {PAGE} tokens" in caught.value.expected
    assert f"num_kv_pages of at least {least}," in caught.value.hint
    assert served(path, 100, num_kv_pages=least) == 5 and served(path, 11, num_kv_pages=1) == 5


def test_pages_that_do_not_fit(compiled: Callable[..., Path]) -> None:
    path = compiled(GEMMA)
    need = MemoryNeed.of(load_artifact(path).plans, mmap.PAGESIZE)
    full, window = need.groups["full"].page, need.groups["window_33"].page
    memory = need.fixed + 5 * need.page + window
    figures = rf"6 KV pages of {full} bytes \(full\), {window} bytes \(window_33\) each"
    with pytest.raises(OptionError, match=figures) as caught:
        load_artifact(path, memory=memory, num_pages=6)
    assert caught.value.expected == "at most 5 pages"
    assert load_artifact(path, memory=memory, num_pages=5).pages == {"full": 5, "window_33": 6}


def test_a_window_larger_than_the_table_keeps_every_token(compiled: Callable[..., Path]) -> None:
    path = compiled(MISTRAL, window=4096)
    assert set(load_artifact(path).pages) == {"full"} and served(path, 150) == 5


@pytest.mark.parametrize("window", [0, -1, 1 << 31])
def test_a_window_of_no_size(window: int, tmp_path: Path) -> None:
    source = TINY[MISTRAL].write(tmp_path / "checkpoint", sliding_window=window)
    with pytest.raises(ConfigError, match=f"'sliding_window' is {window}") as caught:
        compile_model(source, tmp_path / "a.ingot", **OPTIONS)
    assert caught.value.expected == "a whole number from 1 to 16777216" and not (tmp_path / "a.ingot").exists()


def test_a_mask_without_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both backends of the choice refuse: the reasons of each are told."""
    for one in (Reference, Rowwise):
        monkeypatch.setattr(one, "claim", _without_windows(one.claim))
    source = TINY[GEMMA].write(tmp_path / "checkpoint", sliding_window=WINDOW)
    with pytest.raises(PassError, match=r"no backend computes ingot\.paged_attention by the mask window_33") as caught:
        compile_model(source, tmp_path / "a.ingot", **OPTIONS)
    for name in ("reference", "rowwise"):
        assert f"{name}: kernels for windows of up to 32 tokens" in caught.value.what
    assert "layer 1" in caught.value.where and "another backend" in caught.value.hint


def _without_windows(claim: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, nodes: Any, *others: Any) -> Any:
        if op_of(nodes[0].target) is paged_attention and "window" in nodes[0].kwargs.get("mask", ""):
            return No("kernels for windows of up to 32 tokens")
        return claim(self, nodes, *others)

    return run
