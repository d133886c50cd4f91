"""Models with windows for tests: an artifact, one whose caches keep everything, and NaN where nothing is to be read."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY

from ingot import LLM, compile_model
from ingot.ir.cache.groups import FULL, CacheGroup


def with_and_without(model: str, folder: Path, window: int, **options: Any) -> tuple[Path, Path]:
    """An artifact with windows, and one of the same checkpoint whose caches keep every token."""
    # The tiny models have fewer positions, and none depends on how many there are.
    checkpoint = TINY[model].write(folder / "checkpoint", sliding_window=window, max_position_embeddings=512)
    compile_model(checkpoint, folder / "windows.ingot", **options)
    # `ingot.passes.insert_paged_kv`, by name: the package may have a pass of that name.
    module = importlib.import_module("ingot.passes.insert_paged_kv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_group_of", lambda node, context: FULL)
        compile_model(checkpoint, folder / "whole.ingot", **options)
    return folder / "windows.ingot", folder / "whole.ingot"


def caches_of(llm: LLM, group: CacheGroup) -> list[torch.Tensor]:
    """The caches of a group on the device."""
    loaded = llm._loaded
    return [
        loaded.executor.states[name]
        for name, state in loaded.plan.states.items()
        if state.kind == "paged_kv" and CacheGroup.named(state.group) == group
    ]


def poison(llm: LLM) -> None:
    """NaN in whatever is not written, in what is given up, and in scratch pages between steps; page 0 of a window stays
    as it is."""
    pages, launch = llm._engine._scheduler.pages, llm._loaded.executor.launch
    scratch = {CacheGroup.named(name): list(numbers) for name, numbers in llm._loaded.scratch_pages.items()}
    caches = {group: caches_of(llm, group) for group in pages.groups}

    def fill(group: CacheGroup, numbers: list[int]) -> None:
        finish_steps()
        for cache in caches[group]:
            cache[numbers] = float("nan")
        finish_steps()

    def launch_on_poison(inputs: Any, *rest: Any) -> Any:
        for group, numbers in scratch.items():
            fill(group, numbers)
        return launch(inputs, *rest)

    for group, pool in zip(pages.groups, pages.pools, strict=True):
        fill(group, list(range(group.reserved, pool.num_pages)))
        pool._on_release = lambda released, group=group: fill(group, released)
    llm._loaded.executor.launch = launch_on_poison  # type: ignore[method-assign]


def finish_steps() -> None:
    """A GPU runs steps on a stream of their own."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
