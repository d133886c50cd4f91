"""A tiny chat model, and a tiny model that pools, compiled once for all tests of vLLM's interface."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_world import write_checkpoint
from pooled_decoder import pool_by
from pooling_artifacts import write_pooling_artifacts

LIMITS = {"max_batch": 4, "max_tokens": 64, "target": "cpu", "backend": "reference", "jobs": 1}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("vllm_api") / "tiny")


@pytest.fixture(scope="session")
def chat_artifact(checkpoint: Path) -> Path:
    from ingot import compile_model

    compile_model(checkpoint, checkpoint.parent / "chat.ingot", **LIMITS)  # type: ignore[arg-type]
    return checkpoint.parent / "chat.ingot"


@pytest.fixture(scope="session")
def pooling_artifact(checkpoint: Path) -> Path:
    from ingot import compile_model

    with pytest.MonkeyPatch.context() as patch:
        pool_by(patch, whole=0, unit=1)
        compile_model(checkpoint, checkpoint.parent / "pool.ingot", **LIMITS)  # type: ignore[arg-type]
    return checkpoint.parent / "pool.ingot"


@pytest.fixture(scope="session")
def classes_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that pools the logits of three classes."""
    return write_pooling_artifacts(tmp_path_factory.mktemp("classes"))["classify"]
