"""The benchmark of grammars measures both kinds of steps, and the masks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import config_of

from ingot import compile_model


@pytest.mark.slow
def test_steps_with_and_without_a_schema(
    benchmarks: None, results: ModuleType, call: Callable[..., None], committed: None, tmp_path: Path
) -> None:
    config = config_of("1b")
    checkpoint = importlib.import_module("random_checkpoint").write_checkpoint(tmp_path / "checkpoint", config)
    importlib.import_module("random_tokenizer").write_tokenizer(checkpoint, config["vocab_size"])
    compile_model(checkpoint, tmp_path / "tiny.ingot", backend="reference", max_seq_len=256, max_batch=4)
    less = ("--sequences", 3, "--steps", 12, "--rounds", 2)
    call("grammar", tmp_path / "tiny.ingot", *less, "--json", tmp_path / "found.json")
    figures = results.read_result(tmp_path / "found.json").figures
    assert len(figures["schema"].values) == len(figures["without"].values) == 2
    assert figures["ratio"].value == pytest.approx(figures["schema"].value / figures["without"].value)
    assert 0 < figures["masks"].value <= figures["masks_p99"].value
